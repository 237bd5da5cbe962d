"""What a worker does with the edges of one layer. Arrays in, partitions ``[row][graph]`` out; no torch."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import numpy as np

from ckv_compile.community import partition as partitions
from ckv_compile.policies import policy_of
from ckv_compile.runtime.rows import Origin


@dataclasses.dataclass(frozen=True)
class EdgePiece:
    """Lists of consecutive tokens of one layer; arrays, or what still arrives (``transfer.Arriving``).

    neighbor: int32 [B, H, m, kappa]. weight: float32, the same shape. key_neighbor: int32 [B, G, m, kappa], absolute,
    None but for "mixed". tokens: m. graphs: what gives the graphs of exactly these lists, where they are built elsewhere
    (``device_graph.ArrivingGraphs``). rows: where the rows went since.
    """

    neighbor: Any
    weight: Any
    key_neighbor: Any
    tokens: int
    graphs: Any = None
    rows: Origin = dataclasses.field(default_factory=Origin)

    def wait(self) -> None:
        """Until its graphs have arrived or, where it has none, its lists."""
        for part in (self.neighbor, self.weight, self.key_neighbor) if self.graphs is None else (self.graphs,):
            if part is not None and not isinstance(part, np.ndarray):
                part.wait()

    def first(self, tokens: int) -> EdgePiece:
        def cut(lists):
            if lists is None:
                return None
            return lists[:, :, :tokens] if isinstance(lists, np.ndarray) else lists.part(2, 0, tokens)

        lists = cut(self.neighbor), cut(self.weight), cut(self.key_neighbor)
        return EdgePiece(*lists, min(tokens, self.tokens), rows=self.rows)

    def fixed(self) -> EdgePiece:
        """For a job: with rows as they are now, whatever moves later."""
        return dataclasses.replace(self, rows=self.rows.fixed())

    def arrays(self, heads: slice = slice(None), graphs: slice = slice(None)) -> EdgePiece:
        """The lists as arrays, by the rows of now; those of some heads, and key lists of some graphs."""

        def array(lists, own: slice):
            if lists is None:
                return None
            own_lists = (lists if isinstance(lists, np.ndarray) else lists.array())[:, own]
            return own_lists if self.rows.rows is None else own_lists[self.rows.rows]

        lists = array(self.neighbor, heads), array(self.weight, heads), array(self.key_neighbor, graphs)
        return EdgePiece(*lists, self.tokens)


def joined_pieces(pieces: list[EdgePiece]) -> EdgePiece:
    """One piece for several that follow each other, of arrays and by the rows of now."""
    pieces = [piece.arrays() for piece in pieces]
    if len(pieces) == 1:
        return pieces[0]
    names = ("neighbor", "weight") if pieces[0].key_neighbor is None else ("neighbor", "weight", "key_neighbor")
    lists = {name: np.concatenate([getattr(piece, name) for piece in pieces], axis=2) for name in names}
    return EdgePiece(lists["neighbor"], lists["weight"], lists.get("key_neighbor"), sum(one.tokens for one in pieces))


class LayerParts:
    """Results of the graphs of a layer, each of which is a job of its own, until all of them are there."""

    def __init__(self, graphs: int) -> None:
        self._lock = threading.Lock()
        self._results: list[list | None] = [None] * graphs
        self._missing = graphs
        self.errors: list[str] = []

    def put(self, graph: int, result: list | None, error: str | None) -> list[list] | None:
        """result: ``[row]``, None if it was called off. Returns all, ``[row][graph]``, to whoever brings the last one."""
        with self._lock:
            self._results[graph] = result
            self._missing -= 1
            if error is not None and error not in self.errors:
                self.errors.append(error)
            if self._missing or any(result is None for result in self._results):
                return None
            return [list(row) for row in zip(*self._results, strict=True)]  # type: ignore[arg-type]


def _own(pieces: list[EdgePiece], graph: int, graphs: int) -> EdgePiece:
    """The lists of one graph, of consecutive pieces: ``[B, heads, m, kappa]`` and, of "mixed", ``[B, 1, m, kappa]``."""
    neighbor = pieces[0].neighbor
    lists = neighbor if isinstance(neighbor, np.ndarray) else neighbor.array()
    heads = lists.shape[1] // graphs
    own = slice(graph * heads, (graph + 1) * heads), slice(graph, graph + 1)
    return joined_pieces([piece.arrays(*own) for piece in pieces])


def partition_edges(
    pieces: list[EdgePiece], kept: list[list] | None, first, graphs: int, config, memory, layer: int, backlog, graph: int,
    *, stop,
) -> list:  # fmt: skip
    """Partition all positions in one graph of a layer, ``[row]``, from the lists of all of them.

    kept: partitions ``[row][graph]`` of the first positions, whose communities are started from.
    """
    alone = pieces[0].graphs if len(pieces) == 1 and kept is None else None
    built = None if alone is None else alone.of(graph)
    tokens = sum(piece.tokens for piece in pieces)
    common = {"config": config, "memory": memory, "layer": layer, "graph": graph, "stop": stop, "backlog": backlog}
    if built is not None:
        return [partitions.partition_built(one, tokens, **common) for one in pieces[0].rows.now(built)]
    edges = _own(pieces, graph, graphs)
    found = []
    for row, begin in enumerate(first):
        common["initial"] = None
        if kept is not None:
            labels = kept[row][graph].labels
            common["initial"] = np.concatenate([labels, np.full(tokens - len(labels), -1, np.int32)])
        lists = edges.neighbor[row], edges.weight[row]
        if config.graph == "mixed":
            found.append(partitions.partition_mixed(*lists, edges.key_neighbor[row, 0], begin, **common))
        else:
            found.append(partitions.partition_attention(*lists, begin, **common))
    return found


def refresh_edges(
    pieces: list[EdgePiece], kept: list[list], graphs: int, config, memory, layer: int, backlog, graph: int, *, stop
) -> list:
    """Partition all positions again in one graph of a layer, from what ``kept`` has of all but those of ``pieces``."""
    edges = _own(pieces, graph, graphs)
    common = {"config": config, "memory": memory, "layer": layer, "graph": graph, "stop": stop, "backlog": backlog}
    return [partitions.partition_refreshed(kept[row][graph], *_later(edges, row), **common) for row in range(len(kept))]


def repair_edges(pieces: list[EdgePiece], kept: list[list], graphs: int, config, *, stop) -> list[list]:
    """Communities of all positions, ``[row][graph]``, from those that ``kept`` gives all but the tokens of ``pieces``.

    One job for a layer: its graphs take some ten milliseconds each.
    """
    edges = [_own(pieces, graph, graphs) for graph in range(graphs)]
    return [
        [
            partitions.partition_repaired(row[graph], *_later(edges[graph], number), config=config, stop=stop)
            for graph in range(graphs)
        ]
        for number, row in enumerate(kept)
    ]


def _later(edges: EdgePiece, row: int) -> tuple:
    return edges.neighbor[row], edges.weight[row], None if edges.key_neighbor is None else edges.key_neighbor[row, 0]


def partition_block(
    given: np.ndarray, first: list[int], config, memory, layer: int, backlog=None, context: int = 0, *, stop
) -> list[list]:
    """Worker side of an index in blocks: the groups that the policy makes of what it asked for, of one block.

    context: tokens that there are so far, of which the block is a part.
    """
    return policy_of(config.policy).partition(given, first, config, memory, layer, backlog, stop, context)
