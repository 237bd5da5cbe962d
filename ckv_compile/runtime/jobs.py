"""What a worker does with the edges of one layer. Arrays in, partitions ``[row][graph]`` out; no torch."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ckv_compile.community import partition as partitions
from ckv_compile.policies import policy_of


@dataclasses.dataclass(frozen=True)
class EdgePiece:
    """Lists of consecutive tokens of one layer; arrays, or what still arrives (``transfer.Arriving``).

    neighbor: int32 [B, H, m, kappa]. weight: float32, the same shape. key_neighbor: int32 [B, G, m, kappa], absolute,
    None but for "mixed". tokens: m. graphs: what gives the graphs ``[row][graph]`` of exactly these lists, where they
    are built elsewhere (``device_graph.ArrivingGraphs``).
    """

    neighbor: Any
    weight: Any
    key_neighbor: Any
    tokens: int
    graphs: Any = None

    def wait(self) -> None:
        """Until everything has arrived."""
        for part in (self.graphs, self.neighbor, self.weight, self.key_neighbor):
            if part is not None and not isinstance(part, np.ndarray):
                part.wait()

    def first(self, tokens: int) -> EdgePiece:
        def cut(lists):
            if lists is None:
                return None
            return lists[:, :, :tokens] if isinstance(lists, np.ndarray) else lists.part(2, 0, tokens)

        return EdgePiece(cut(self.neighbor), cut(self.weight), cut(self.key_neighbor), min(tokens, self.tokens))

    def arrays(self) -> EdgePiece:
        """The lists as arrays."""

        def array(lists):
            return lists if lists is None or isinstance(lists, np.ndarray) else lists.array()

        return EdgePiece(array(self.neighbor), array(self.weight), array(self.key_neighbor), self.tokens)


@dataclasses.dataclass(frozen=True)
class Whole:
    """Partitions ``[row][graph]`` of all positions of a layer, and in one piece the edges that they were made of."""

    partitions: list[list]
    edges: EdgePiece | None = None


def joined_pieces(pieces: list[EdgePiece]) -> EdgePiece:
    """One piece for several that follow each other."""
    pieces = [piece.arrays() for piece in pieces]
    if len(pieces) == 1:
        return pieces[0]
    names = ("neighbor", "weight") if pieces[0].key_neighbor is None else ("neighbor", "weight", "key_neighbor")
    lists = {name: np.concatenate([getattr(piece, name) for piece in pieces], axis=2) for name in names}
    return EdgePiece(lists["neighbor"], lists["weight"], lists.get("key_neighbor"), sum(one.tokens for one in pieces))


def partition_edges(
    pieces: list[EdgePiece], kept: list[list] | None, first, graphs: int, config, memory, layer: int, backlog, *, stop
) -> Whole:
    """Partition all positions, starting from the communities that ``kept`` gives the first of them."""
    edges = joined_pieces(pieces)
    alone = pieces[0].graphs if len(pieces) == 1 and kept is None else None
    built = None if alone is None else alone.graphs()
    if built is not None:
        return Whole(partition_graphs(built, edges.tokens, config, memory, layer, stop=stop), edges)
    initial = None
    if kept is not None:
        initial = np.full((len(first), graphs, edges.tokens), -1, np.int32)
        for place in np.ndindex(*initial.shape[:2]):
            labels = kept[place[0]][place[1]].labels
            initial[place][: len(labels)] = labels
    arguments = (edges.neighbor, edges.weight, edges.key_neighbor, first, initial, graphs, config, memory, layer)
    return Whole(partition_whole(*arguments, backlog=backlog, stop=stop), edges)


def repair_edges(pieces: list[EdgePiece], kept: list[list], graphs: int, config, *, stop) -> Whole:
    """Communities of all positions from those that ``kept`` gives all but the tokens of ``pieces``, which follow."""
    edges = joined_pieces(pieces)
    heads = edges.neighbor.shape[1] // graphs

    def repaired(row: int, graph: int):
        lists = (row, slice(graph * heads, (graph + 1) * heads))
        key_neighbors = None if edges.key_neighbor is None else edges.key_neighbor[row, graph]
        return partitions.partition_repaired(
            kept[row][graph], edges.neighbor[lists], edges.weight[lists], config=config, key_neighbors=key_neighbors,
            stop=stop,
        )  # fmt: skip

    return Whole([[repaired(row, graph) for graph in range(graphs)] for row in range(len(kept))])


def partition_block(
    given: np.ndarray, first: list[int], config, memory, layer: int, backlog=None, context: int = 0, *, stop
) -> list[list]:
    """Worker side of an index in blocks: the groups that the policy makes of what it asked for, of one block.

    context: tokens that there are so far, of which the block is a part.
    """
    return policy_of(config.policy).partition(given, first, config, memory, layer, backlog, stop, context)


def partition_whole(
    neighbor, weight, key_neighbor, first, initial, graphs: int, config, memory, layer: int, *, backlog=None, stop
) -> list[list]:
    """Worker side of "attention" and "mixed"."""
    heads = neighbor.shape[1] // graphs
    result = []
    for row in range(len(first)):
        parts = []
        for graph in range(graphs):
            lists = slice(graph * heads, (graph + 1) * heads)
            common = {
                "config": config, "memory": memory, "layer": layer, "graph": graph,
                "initial": None if initial is None else initial[row, graph], "stop": stop,
                "backlog": backlog,
            }  # fmt: skip
            if config.graph == "mixed":
                parts.append(
                    partitions.partition_mixed(
                        neighbor[row, lists], weight[row, lists], key_neighbor[row, graph], first[row], **common
                    )
                )
            else:
                parts.append(
                    partitions.partition_attention(neighbor[row, lists], weight[row, lists], first[row], **common)
                )
        result.append(parts)
    return result


def partition_graphs(built: list[list], tokens: int, config, memory, layer: int, *, stop) -> list[list]:
    """Worker side of "attention" and "mixed" where the device built the graphs ``[row][graph]``."""
    return [
        [
            partitions.partition_built(one, tokens, config=config, memory=memory, layer=layer, graph=graph, stop=stop)
            for graph, one in enumerate(row)
        ]
        for row in built
    ]
