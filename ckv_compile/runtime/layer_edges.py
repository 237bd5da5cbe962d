"""The edges of a layer's tokens, in the pieces in which calls and refreshes brought them."""

from __future__ import annotations

import dataclasses

from ckv_compile.runtime import jobs

# Pieces that are joined, by the thread that runs the model, and tokens that they have.
LEAST_JOINED = 8
MOST_JOINED = 8192


@dataclasses.dataclass
class LayerEdges:
    """Edges of one layer so far ("attention", "mixed"), and the partition that the last of them are missing in."""

    pieces: list[jobs.EdgePiece] = dataclasses.field(default_factory=list)
    tokens: int = 0
    kept: list[list] | None = None  # the published partition, with its graphs; None where pages stand in

    def append(self, piece: jobs.EdgePiece) -> None:
        self.pieces.append(piece)
        self.tokens += piece.tokens

    def since(self, token: int) -> list[jobs.EdgePiece] | None:
        """The pieces from a token on; None where none begins with it."""
        start = self.tokens
        for place in range(len(self.pieces) - 1, -1, -1):
            start -= self.pieces[place].tokens
            if start == token:
                return self.pieces[place:]
        return None

    def keep(self, partitions: list[list], stop: int) -> None:
        """Partitions ``[row][graph]`` of the first ``stop`` tokens were published; graphs live on in them."""
        self.pieces = [dataclasses.replace(piece, graphs=None) if piece.graphs else piece for piece in self.pieces]
        self._join(stop)
        usable = all(partition.graph is not None for row in partitions for partition in row)
        self.kept = partitions if usable else None

    def _join(self, stop: int) -> None:
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
            self.pieces = [*self.pieces[:begin], jobs.joined_pieces(self.pieces[begin:end]), *rest]

    def truncate(self, length: int) -> None:
        if self.kept is not None and len(self.kept[0][0].labels) > length:
            self.kept = None
        while self.tokens > length:
            last = self.pieces.pop()
            self.tokens -= last.tokens
            if self.tokens < length:
                self.append(last.first(length - self.tokens))
