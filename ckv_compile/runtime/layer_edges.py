"""The edges of a layer's tokens, in the pieces in which calls and refreshes brought them."""

from __future__ import annotations

import dataclasses

from ckv_compile.runtime import jobs


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

    def join(self, piece: jobs.EdgePiece) -> None:
        """Put one piece in the place of those that cover its tokens."""
        self.pieces = [piece, *(self.since(piece.tokens) or [])]

    def truncate(self, length: int) -> None:
        if self.kept is not None and len(self.kept[0][0].labels) > length:
            self.kept = None
        while self.tokens > length:
            last = self.pieces.pop()
            self.tokens -= last.tokens
            if self.tokens < length:
                self.append(last.first(length - self.tokens))
