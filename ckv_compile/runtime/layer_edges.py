"""The edges of a layer's tokens, in the pieces in which calls and refreshes brought them."""

from __future__ import annotations

import dataclasses

from ckv_compile.runtime import jobs
from ckv_compile.runtime.rows import Origin, Origins

# Pieces that are joined, by the thread that runs the model, and tokens that they have.
LEAST_JOINED = 8
MOST_JOINED = 8192


@dataclasses.dataclass
class LayerEdges:
    """Edges of one layer so far ("attention", "mixed"), and the partition that the last of them are missing in."""

    pieces: list[jobs.EdgePiece] = dataclasses.field(default_factory=list)
    tokens: int = 0
    kept: list[list] | None = None  # the published partition, with its graphs; None where pages stand in
    kept_rows: Origin = dataclasses.field(default_factory=Origin)  # where its rows went since

    def copied(self, origins: Origins) -> LayerEdges:
        """The same of another cache of the same content, whose rows ``origins`` follows."""
        pieces = [dataclasses.replace(piece, rows=origins.follow(piece.rows)) for piece in self.pieces]
        return LayerEdges(pieces, self.tokens, self.kept, origins.follow(self.kept_rows))

    def append(self, piece: jobs.EdgePiece) -> None:
        self.pieces.append(piece)
        self.tokens += piece.tokens

    def all_pieces(self) -> list[jobs.EdgePiece]:
        """All pieces, for a job: by the rows of now, whatever moves later."""
        return [piece.fixed() for piece in self.pieces]

    def pieces_behind(self) -> list[jobs.EdgePiece] | None:
        """The same of the tokens that the kept partition misses; None where no piece begins with the first of them."""
        pieces = None if self.kept is None else self.since(len(self.kept[0][0].labels))
        return pieces and [piece.fixed() for piece in pieces]

    def kept_partition(self) -> list[list] | None:
        """The kept partition ``[row][graph]`` by the rows of now."""
        return None if self.kept is None else self.kept_rows.now(self.kept)

    def since(self, token: int) -> list[jobs.EdgePiece] | None:
        """The pieces from a token on; None where none begins with it."""
        start = self.tokens
        for place in range(len(self.pieces) - 1, -1, -1):
            start -= self.pieces[place].tokens
            if start == token:
                return self.pieces[place:]
        return None

    def keep(self, partitions: list[list], stop: int, rows: Origin) -> None:
        """Partitions ``[row][graph]`` of the first ``stop`` tokens were published; graphs live on in them.

        rows: those of now.
        """
        self.pieces = [dataclasses.replace(piece, graphs=None) if piece.graphs else piece for piece in self.pieces]
        self._join(stop, rows)
        usable = all(partition.graph is not None for row in partitions for partition in row)
        self.kept, self.kept_rows = partitions if usable else None, rows

    def _join(self, stop: int, rows: Origin) -> None:
        """Put one piece in the place of many small ones that end at ``stop`` and have arrived."""
        rest = [] if stop == self.tokens else self.since(stop)
        if rest is None:
            return
        end = begin = len(self.pieces) - len(rest)
        tokens = 0
        while begin > 0 and tokens + self.pieces[begin - 1].tokens <= MOST_JOINED:
            begin -= 1
            tokens += self.pieces[begin].tokens
        if end - begin >= LEAST_JOINED:
            joined = dataclasses.replace(jobs.joined_pieces(self.pieces[begin:end]), rows=rows)
            self.pieces = [*self.pieces[:begin], joined, *rest]

    def truncate(self, length: int) -> None:
        if self.kept is not None and len(self.kept[0][0].labels) > length:
            self.kept = None
        while self.tokens > length:
            last = self.pieces.pop()
            self.tokens -= last.tokens
            if self.tokens < length:
                self.append(last.first(length - self.tokens))
