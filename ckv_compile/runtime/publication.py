"""From what workers brought back to the index of a layer, between two steps, on the caller's thread."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import torch

from ckv_compile.community.assign import assign_greedily
from ckv_compile.runtime.transfer import to_device

if TYPE_CHECKING:
    from ckv_compile.runtime.sequence import Finished, Sequence


def publish_layers(sequence: Sequence, most: int) -> None:
    """Publish what has come back and is next in order in its layer.

    most: layers of which anything is published that is not the newest prefill's; the others keep it for later.
    """
    for layer in sorted({layer for layer, _ in sequence.waiting} | set(sequence.joined)):
        most -= publish_layer(sequence, layer, later=most > 0)


def publish_layer(sequence: Sequence, layer: int, *, later: bool = True) -> bool:
    """Publish what is next in order in a layer; whether any of it is not the newest prefill's, which ``later`` allows."""
    index, published = sequence.index, False
    if sequence.in_blocks:
        while True:
            indexed = index.marks[layer][-1][0] if index.marks[layer] else 0
            finished = _next(sequence, (layer, indexed), later=later)
            if finished is None:
                break
            index.append_block(layer, finished.start, finished.stop, finished.packed, *_cached(sequence, layer))
            sequence.statistics.partitioned(layer, finished.packed.counts)
            sequence.turns.unjoined.add(layer)
            published |= finished.stop > sequence.prompt
        return (later and _publish_joined(sequence, layer)) or published
    finished = _next(sequence, (layer, 0), later=later)
    if finished is not None:
        _publish_whole(sequence, layer, finished)
    return finished is not None and finished.stop > sequence.prompt


def _next(sequence: Sequence, place: tuple[int, int], *, later: bool) -> Finished | None:
    """What waits for (layer, start), unless it is not the newest prefill's and ``later`` is false."""
    finished = sequence.waiting.get(place)
    if finished is None or (not later and finished.stop > sequence.prompt):
        return None
    return sequence.waiting.pop(place)


def _publish_whole(sequence: Sequence, layer: int, finished: Finished) -> None:
    """Put a partition of all positions in the place of what a layer has, unless that is better."""
    index = sequence.index
    if index.marks[layer] and finished.stop < index.marks[layer][-1][0]:
        return  # overtaken by a partition of more tokens
    if finished.errors and index.marks[layer]:
        return  # communities of fewer tokens are better than pages
    logged = _logged_since(sequence, layer, finished.stop)
    index.replace(layer, finished.stop, finished.packed, *_cached(sequence, layer))
    if logged is not None:
        index.flush()
    sequence.keep(finished)
    sequence.statistics.partitioned(layer, finished.packed.counts)
    if logged is not None:
        _assign_meanwhile(sequence, layer, finished, *logged)


def _publish_joined(sequence: Sequence, layer: int) -> bool:
    """Put one partition in the place of several small blocks, where there is one; where it failed, they stay."""
    finished = sequence.joined.pop(layer, None)
    if finished is None:
        return False
    sequence.joining.discard(layer)
    sequence.closed[layer] = finished.stop
    sequence.turns.unjoined.add(layer)
    if not finished.errors:
        sequence.index.join_blocks(layer, finished.start, finished.stop, finished.packed, *_cached(sequence, layer))
    return True


def _cached(sequence: Sequence, layer: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """K of a layer, and V where the index keeps its means."""
    return sequence.keys(layer), sequence.values(layer) if sequence.config.centroid_budget else None


def _logged_since(sequence: Sequence, layer: int, stop: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Edges ``[B, H, m, kappa]`` of the tokens from ``stop`` on that decode steps logged, or None.

    Waits for the device where there are any.
    """
    index = sequence.index
    base = index.log_starts[layer]
    low, high = stop - base, sequence.length - base
    if not 0 <= low < high <= sequence.shape.log:
        return None
    return (
        index.edge_neighbor[layer, :, :, low:high].to("cpu").numpy().copy(),
        index.edge_weight[layer, :, :, low:high].to("cpu").numpy().copy(),
    )


def _assign_meanwhile(
    sequence: Sequence, layer: int, finished: Finished, neighbor: np.ndarray, weight: np.ndarray
) -> None:
    """Assign tokens that arrived while the partition ran (eq. 7, with their logged edges).

    Where the index has no room for their communities they stay in the attended tail.
    """
    index, shape, stop = sequence.index, sequence.shape, finished.stop
    new, used = neighbor.shape[2], index.used[layer]
    heads = shape.lists // shape.graphs
    lam = 1.0 if sequence.config.graph == "keys" else sequence.config.lam
    community_weight = np.zeros((shape.batch, shape.graphs, shape.communities))
    total = np.zeros((shape.batch, shape.graphs))
    joined = np.empty((shape.batch, shape.graphs, new), np.int32)
    for row, graph in itertools.product(range(shape.batch), range(shape.graphs)):
        lists = slice(graph * heads, (graph + 1) * heads)
        partition = finished.result[row][graph]
        if partition.weight is not None:
            community_weight[row, graph, : len(partition.weight)] = partition.weight
            total[row, graph] = partition.weight.sum()
        joined[row, graph] = assign_greedily(
            partition.labels, community_weight[row, graph], total[row, graph : graph + 1], neighbor[row, lists],
            weight[row, lists], stop, gamma=partition.gamma, lam=lam, num_communities=used,
        )  # fmt: skip
    if joined.min(initial=0) < 0:
        return

    def put(name: str, place: tuple, array: np.ndarray) -> None:
        index.buffers[name][layer][place].copy_(to_device(array, index.device))

    here = slice(None), slice(None)
    put("label", (*here, slice(stop, stop + new)), joined)
    put("log_community", (*here, slice(new)), joined)
    put("edge_neighbor", (*here, slice(new)), neighbor)
    put("edge_weight", (*here, slice(new)), weight)
    put("community_weight", here, community_weight.astype(np.float32))
    put("total_weight", here, total.astype(np.float32))
    upto = max(used, int(joined.max(initial=-1)) + 1)
    _join_centroids(sequence, layer, stop, joined, upto)
    index.num_communities[layer].fill_(upto)
    index.n_indexed[layer].fill_(stop + new)


def _join_centroids(sequence: Sequence, layer: int, stop: int, joined: np.ndarray, upto: int) -> None:
    """Means and sizes of the communities that tokens ``stop ...`` joined; ``joined`` [B, G, m].

    The partition was just published: entry 0 of the log is that of token ``stop``, and nobody has joined before.
    """
    index, (batch, graphs, new) = sequence.index, joined.shape
    key, value = _cached(sequence, layer)
    used = index.used[layer]
    for name in ("start", "stored", "size", "centroid_scale", "mean_value"):
        if name in index.buffers:
            index.buffers[name][layer, :, :, used:upto].zero_()
    graph_of = np.arange(batch * graphs).reshape(batch, graphs, 1)
    flat = (graph_of * index.shape.communities + joined).reshape(-1)
    communities, which, count = np.unique(flat, return_inverse=True, return_counts=True)
    graph_of, community = np.divmod(communities, index.shape.communities)
    last = np.zeros(len(communities), np.int64)  # of the entries of the log
    np.maximum.at(last, which.reshape(-1), np.tile(np.arange(new), batch * graphs))
    place = tuple(to_device(one, index.device) for one in (graph_of // graphs, graph_of % graphs, community))
    entry = to_device(last, index.device)
    # A matrix product adds in a fixed order; atomics would not.
    member = to_device((which.reshape(-1) == np.arange(len(communities))[:, None]).astype(np.float32), index.device)
    joins = to_device(count.astype(np.int32), index.device)
    before = index.size[layer][place]
    after = before + joins

    def mean_of(old: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        own = cache[:, :, stop : stop + new]
        # One graph over several heads holds theirs side by side.
        own = own.transpose(1, 2).flatten(2) if graphs == 1 else own.repeat_interleave(graphs // cache.shape[1], 1)
        total = old.float() * before[:, None] + member @ own.reshape(-1, own.shape[-1]).float()
        return (total / after[:, None]).to(index.dtype)

    mean = mean_of(index.gather_centroids(layer, place), key)
    index.log_mean[layer].index_put_((*place[:2], entry), mean)
    index.mean_at[layer].index_put_(place, entry.int())
    if value is not None:
        index.mean_value[layer].index_put_(place, mean_of(index.mean_value[layer][place], value))
    index.size[layer].index_put_(place, after)
    index.scatter_centroids(layer, place, mean)
