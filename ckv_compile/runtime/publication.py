"""From what workers brought back to the index of a layer, between two steps, on the caller's thread."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import torch

from ckv_compile.community.assign import assign_greedily

if TYPE_CHECKING:
    from ckv_compile.runtime.sequence import Sequence


def publish_layer(sequence: Sequence, layer: int) -> None:
    """Publish what has come back for a layer and is next in order."""
    index = sequence.index
    if sequence.in_blocks:
        while True:
            indexed = index.marks[layer][-1][0] if index.marks[layer] else 0
            finished = sequence.waiting.pop((layer, indexed), None)
            if finished is None:
                break
            index.append_block(layer, finished.start, finished.stop, finished.result, sequence.keys(layer))
            sequence.statistics.partitioned(layer, finished.result)
        _publish_joined(sequence, layer)
        return
    finished = sequence.waiting.pop((layer, 0), None)
    if finished is None or (index.marks[layer] and finished.stop < index.marks[layer][-1][0]):
        return  # nothing, or overtaken by a partition of more tokens
    logged = _logged_since(sequence, layer, finished.stop)
    index.replace(layer, finished.stop, finished.result, sequence.keys(layer))
    sequence.statistics.partitioned(layer, finished.result)
    if logged is not None:
        _assign_meanwhile(sequence, layer, finished.stop, *logged)


def _publish_joined(sequence: Sequence, layer: int) -> None:
    """Put one partition in the place of several small blocks; where it failed, they stay."""
    finished = sequence.joined.pop(layer, None)
    if finished is not None:
        sequence.joining.discard(layer)
        sequence.closed[layer] = finished.stop
        if not finished.errors:
            sequence.index.join_blocks(layer, finished.start, finished.stop, finished.result, sequence.keys(layer))
    sequence.offer_joined(layer)


def _logged_since(sequence: Sequence, layer: int, stop: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Edges ``[B, H, m, kappa]`` of the tokens from ``stop`` on that decode steps logged, or None."""
    index = sequence.index
    base = index.log_first[layer].tolist()
    low, high = stop - base[0], sequence.length - base[0]
    if len(set(base)) > 1 or not 0 <= low < high <= sequence.shape.log:
        return None
    return (
        index.edge_neighbor[layer, :, :, low:high].to("cpu").numpy().copy(),
        index.edge_weight[layer, :, :, low:high].to("cpu").numpy().copy(),
    )


def _assign_meanwhile(sequence: Sequence, layer: int, stop: int, neighbor: np.ndarray, weight: np.ndarray) -> None:
    """Assign tokens that arrived while the partition ran (eq. 7, with their logged edges).

    Where the index has no room for their communities they stay in the attended tail.
    """
    index, shape = sequence.index, sequence.shape
    new, used = neighbor.shape[2], index.used[layer]
    heads = shape.lists // shape.graphs
    lam = 1.0 if sequence.config.graph == "keys" else sequence.config.lam
    label = index.label[layer, :, :, :stop].to("cpu").numpy()
    community_weight = index.community_weight[layer].to("cpu").double().numpy()
    total = index.total_weight[layer].to("cpu").double().numpy()
    gamma = index.gamma[layer].tolist()
    joined = np.empty((shape.batch, shape.graphs, new), np.int32)
    for row, graph in itertools.product(range(shape.batch), range(shape.graphs)):
        lists = slice(graph * heads, (graph + 1) * heads)
        joined[row, graph] = assign_greedily(
            label[row, graph], community_weight[row, graph], total[row, graph : graph + 1], neighbor[row, lists],
            weight[row, lists], stop, gamma=gamma[row][graph], lam=lam, num_communities=used,
        )  # fmt: skip
    if joined.min(initial=0) < 0:
        return
    labels = torch.from_numpy(joined).to(index.device)
    index.label[layer, :, :, stop : stop + new].copy_(labels)
    index.log_community[layer, :, :, :new].copy_(labels)
    index.edge_neighbor[layer, :, :, :new].copy_(torch.from_numpy(neighbor))
    index.edge_weight[layer, :, :, :new].copy_(torch.from_numpy(weight))
    index.community_weight[layer].copy_(torch.from_numpy(community_weight.astype(np.float32)))
    index.total_weight[layer].copy_(torch.from_numpy(total.astype(np.float32)))
    upto = max(used, int(joined.max(initial=-1)) + 1)
    _join_centroids(sequence, layer, stop, joined, upto)
    index.num_communities[layer].fill_(upto)
    index.n_indexed[layer].fill_(stop + new)


def _join_centroids(sequence: Sequence, layer: int, stop: int, joined: np.ndarray, upto: int) -> None:
    """Running means and sizes of the communities that tokens ``stop ...`` joined; ``joined`` [B, G, m]."""
    index, key, graphs = sequence.index, sequence.keys(layer), sequence.shape.graphs
    used = index.used[layer]
    for name in ("start", "stored", "size", "centroid_mean"):
        index.buffers[name][layer, :, :, used:upto].zero_()
    for row, graph, token in np.ndindex(*joined.shape):
        community = int(joined[row, graph, token])
        if graphs == 1:
            own = key[row, :, stop + token].reshape(-1)
        else:
            own = key[row, graph * key.shape[1] // graphs, stop + token]
        size = index.size[layer, row, graph, community]
        size += 1
        mean = index.centroid_mean[layer, row, graph, community].float()
        mean = mean + (own.float() - mean) / size
        index.write_centroids(layer, (row, graph, slice(community, community + 1)), mean[None])
