"""What a worker does with the edges of one layer. Arrays in, partitions ``[row][graph]`` out; no torch."""

from __future__ import annotations

import numpy as np

from ckv_compile.community import partition as partitions

CONTROL_PAGE = 16  # tokens of one page of the control policies


def partition_block(neighbors: np.ndarray, first: list[int], config, memory, layer: int, *, stop) -> list[list]:
    """Worker side of "keys" (and of the control policies, whose communities are pages)."""
    if config.policy != "communities":
        graphs, nodes = neighbors.shape[1], neighbors.shape[2]
        return [[partitions.contiguous_pages(nodes, row, CONTROL_PAGE)] * graphs for row in first]
    return [
        partitions.partition_keys_block(
            neighbors[row], first[row], config=config, memory=memory, layer=layer, stop=stop
        )
        for row in range(len(first))
    ]


def partition_whole(
    neighbor, weight, key_neighbor, first, initial, graphs: int, config, memory, layer: int, *, stop
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
