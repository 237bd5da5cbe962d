"""From lists of neighbours to a partition: which tokens form a community, as arrays that an index is made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from numba import njit

from ckv_compile.community.engines import partition_graph
from ckv_compile.community.graph import (
    ExtendedGraph,
    TokenGraph,
    attention_graph,
    extended_graph,
    key_graphs_csr,
    mixed_graph,
)
from ckv_compile.community.hierarchy import number_by_coarse_level
from ckv_compile.community.leiden import leiden_batch, seeded, start_labels, stop_flag
from ckv_compile.community.resolution import NODES_PER_CONSTANT, ResolutionMemory, SearchPlan, search_gamma
from ckv_compile.config import (
    GROUP,
    RUN,
    SPARE_COMMUNITIES,
    CommunityConfig,
    coarse_from,
    community_room,
    is_hierarchical,
)

# Of the number that the mean size asks for. Leaves of a hub whose community is full stay alone at any resolution.
MOST_COMMUNITIES = 1.2
MORE_PASSES = 3  # after the planned ones, where nothing waits: later ones change little


@dataclasses.dataclass
class Partition:
    """The communities of one graph over ``n`` positions; positions count from the start of what was partitioned.

    labels: int32 [n], -1 for a position that is not a node (a sink or padding).
    start, size: int32 [C], where a community's members begin and how many they are; communities are numbered as
    ``gather_partitions`` says, or by coarse communities (``number_by_coarse_level``) where steps look at these. member:
    int32 [number of nodes], positions ordered by community, then by position.
    gamma: the resolution used, 0 for pages. dropped: entries with an unusable weight.
    weight: float64 [C], the sum of the members' strengths (w_C of eq. 7); None for pages.
    fallback: why pages stand in for communities, None when they do not.
    graph: what was partitioned, node i at position ``n - num_nodes + i``; None for pages and for blocks.
    """

    labels: np.ndarray
    start: np.ndarray
    size: np.ndarray
    member: np.ndarray
    gamma: float = 0.0
    dropped: int = 0
    fallback: str | None = None
    weight: np.ndarray | None = None
    graph: TokenGraph | ExtendedGraph | None = None

    @property
    def num_communities(self) -> int:
        return len(self.size)


@njit(nogil=True, cache=True)
def _gather(labels, alone, first, run, cap, room, spread, members, starts, sizes, counts):
    """Turn labels into communities that cover every node, no more of them than ``room``.

    labels: int32 [G, n], in [0, n); updated. alone: bool [G, n], nodes without an edge. first: int32 [G].
    spread: see ``gather_partitions``. members: int32 [G, n], starts, sizes: int32 [G, n], counts: int32 [G]: written.
    """
    graphs, n = labels.shape
    new = np.empty(2 * n + 1, np.int32)
    size = np.empty(2 * n + 1, np.int32)
    for g in range(graphs):
        row = labels[g]
        for i in range(min(n, first[g])):
            row[i] = -1
        # Nodes without an edge, in position order, in runs of the mean size.
        in_run = 0
        label = n - 1
        for i in range(first[g], n):
            if alone[g, i]:
                if in_run == 0:
                    label += 1
                row[i] = label
                in_run = in_run + 1 if in_run + 1 < run else 0
        new[:] = -1
        count = 0
        for i in range(first[g], n):
            if new[row[i]] < 0:
                new[row[i]] = count
                size[count] = 0
                count += 1
            row[i] = new[row[i]]
            size[row[i]] += 1
        # Too many: merge the smallest with the next small ones in position order, until they fit.
        small = 1
        while count > room and room > 0 and small < 4 * n:
            bound = max(run, 2 * small)
            if cap > 0 and small <= cap:
                bound = min(bound, cap)
            excess = count - room
            target = -1
            kept = 0
            for c in range(count):
                if size[c] <= small and excess > 0:
                    if target >= 0 and size[target] + size[c] <= bound:
                        size[target] += size[c]
                        new[c] = target
                        excess -= 1
                        continue
                    target = kept
                size[kept] = size[c]
                new[c] = kept
                kept += 1
            if kept < count:
                for i in range(first[g], n):
                    row[i] = new[row[i]]
                count = kept
            small *= 2
        number = 0
        stride = max(1, -(-count // RUN)) if spread else 1  # between communities of consecutive numbers, in the text
        for offset in range(stride):
            for c in range(offset, count, stride):
                new[c] = number
                sizes[g, number] = size[c]
                number += 1
        for i in range(first[g], n):
            row[i] = new[row[i]]
        place = 0
        for c in range(count):
            starts[g, c] = place
            place += sizes[g, c]
            new[c] = starts[g, c]
        for i in range(first[g], n):
            members[g, new[row[i]]] = i
            new[row[i]] += 1
        counts[g] = count


def gather_partitions(
    labels: np.ndarray,
    alone: np.ndarray,
    first: np.ndarray,
    *,
    mean_size: int,
    max_community_size: int,
    room: int,
    gammas: np.ndarray,
    dropped: int = 0,
    spread: bool = True,
) -> list[Partition]:
    """Partitions of several graphs over the same positions.

    labels: int32 [G, n], in [0, n). alone: bool [G, n], nodes without an edge: they form runs of about ``mean_size`` in
    position order, so every node belongs to a community. first: int32 [G], earlier positions are not nodes.
    room: the most communities a graph may have; the smallest are merged in position order, within
    ``max_community_size`` as long as that leaves few enough. spread: communities that follow each other in the text are
    far from each other in number, ``RUN`` of consecutive numbers all over it; otherwise they are numbered by their first
    positions, as a policy wants that takes the newest.
    """
    graphs, n = labels.shape
    labels = labels.copy()
    members, starts, sizes = (np.empty((graphs, n), np.int32) for _ in range(3))
    counts = np.empty(graphs, np.int32)
    _gather(labels, alone, first, mean_size, max_community_size, room, spread, members, starts, sizes, counts)
    return [
        Partition(
            labels[g], starts[g, : counts[g]].copy(), sizes[g, : counts[g]].copy(), members[g, : max(0, n - first[g])],
            float(gammas[g]), dropped,
        )
        for g in range(graphs)
    ]  # fmt: skip


def partitions_of(labels: np.ndarray, first: int, config: CommunityConfig) -> list[Partition]:
    """Partitions that labels of another origin give, of any size. labels: int32 [G, n], in [0, n) from ``first`` on."""
    graphs, n = labels.shape
    return gather_partitions(
        labels, np.zeros(labels.shape, np.bool_), np.full(graphs, first, np.int32), mean_size=config.mean_size,
        max_community_size=0, room=_most_communities(n, config), gammas=np.zeros(graphs),
    )  # fmt: skip


def contiguous_pages(n: int, node_first: int, page: int, *, reason: str | None = None) -> Partition:
    """Communities that are runs of ``page`` tokens: what stands in when a graph could not be partitioned."""
    first = min(max(0, int(node_first)), n)
    nodes = n - first
    labels = np.full(n, -1, np.int32)
    labels[first:] = np.arange(nodes, dtype=np.int32) // page
    start = np.arange(0, nodes, page, dtype=np.int32)
    size = np.minimum(page, nodes - start).astype(np.int32)
    return Partition(labels, start, size, np.arange(first, n, dtype=np.int32), fallback=reason)


def pages_block(
    graphs: int, n: int, node_first: int | np.ndarray, page: int, *, reason: str | None = None
) -> list[Partition]:
    """``contiguous_pages`` for every graph of a block."""
    return [
        contiguous_pages(n, int(first), page, reason=reason)
        for first in np.broadcast_to(node_first, (graphs,)).tolist()
    ]


def partition_keys_block(
    neighbors: np.ndarray,
    node_first: int | np.ndarray,
    *,
    config: CommunityConfig,
    memory: ResolutionMemory,
    layer: int,
    stop: np.ndarray | None = None,
    backlog: Callable[[], int] | None = None,
    context: int = 0,
) -> list[Partition]:
    """Partition one block of every graph of a layer by its nearest keys.

    neighbors: int32 [G, n, kappa], positions within the block, -1 for an empty slot. node_first: positions before it
    are sinks or padding and never nodes; one number, or one per graph. backlog: how many jobs wait; while none does,
    more passes follow (None: never). context: tokens that there are so far, of which the block is a part. The result is
    one partition per graph.
    """
    neighbors = np.ascontiguousarray(neighbors, np.int32)
    graphs, n, _ = neighbors.shape
    first = np.clip(np.broadcast_to(node_first, (graphs,)), 0, n).astype(np.int32)
    plan = SearchPlan.of(config)
    nodes = (n - first).astype(np.int64)
    gammas = np.array(
        [_start_gamma(plan, config, memory, (layer, g), int(nodes[g])) for g in range(graphs)], np.float64
    )
    indptr, indices, weights, strength = key_graphs_csr(neighbors, first)
    if config.leiden_engine == "native":
        labels = np.tile(np.arange(n, dtype=np.int32), (graphs, 1))
        leiden_batch(
            indptr, indices, weights, strength, gammas, float(config.mean_size), plan.tolerance, plan.corrections,
            plan.passes, config.max_community_size, config.seed, labels, stop_flag(stop),
        )  # fmt: skip
        _more_passes(indptr, indices, weights, strength, gammas, config, labels, stop, backlog)
    else:
        labels = np.empty((graphs, n), np.int32)
        for g in range(graphs):
            begin, end = indptr[g, 0], indptr[g, n]
            graph = TokenGraph(indptr[g] - begin, indices[begin:end], weights[begin:end], strength[g])
            labels[g], gammas[g] = _search(graph, float(gammas[g]), plan, config, None, stop)
    if plan.corrections and not (stop is not None and stop[0]):
        for g in range(graphs):
            _remember(memory, (layer, g), float(gammas[g]), int(nodes[g]), plan)
    partitions = gather_partitions(
        labels, indptr[:, 1:] == indptr[:, :-1], first, mean_size=config.mean_size,
        max_community_size=config.max_community_size, room=_most_communities(n, config), gammas=gammas,
        spread=config.policy != "streaming",
    )  # fmt: skip
    for g, partition in enumerate(partitions):
        begin, end = indptr[g, 0], indptr[g, n]
        own = indptr[g] - begin, indices[begin:end], weights[begin:end], strength[g]
        _number(partition, *own, config, context, stop)
        _weigh(partition, strength[g])
    return partitions


def partition_attention(
    neighbors: np.ndarray,
    weights: np.ndarray,
    node_first: int,
    *,
    config: CommunityConfig,
    memory: ResolutionMemory,
    layer: int,
    graph: int,
    initial: np.ndarray | None = None,
    gamma: float | None = None,
    stop: np.ndarray | None = None,
    backlog: Callable[[], int] | None = None,
) -> Partition:
    """Partition all positions of one graph by attention (eq. 1-5).

    neighbors, weights: int32 and float32 [H, n, kappa], the top lists of the heads that share the graph; -1 for an
    empty slot. node_first: positions before it are sinks or padding. initial: int32 [n], labels of an earlier partition
    with -1 for new positions (a warm start). gamma: resolution to keep, searched for the mean size when None. backlog:
    how many jobs wait: where some do, a pass is saved, and while none does, more follow (None: neither).
    """
    token_graph = attention_graph(neighbors, weights, lam=config.lam, prune=config.prune, first=node_first)
    n = neighbors.shape[1]
    return _partition_one(token_graph, n, config, memory, (layer, graph), initial, gamma, stop, backlog)


def partition_mixed(
    neighbors: np.ndarray,
    weights: np.ndarray,
    key_neighbors: np.ndarray,
    node_first: int,
    *,
    config: CommunityConfig,
    memory: ResolutionMemory,
    layer: int,
    graph: int,
    initial: np.ndarray | None = None,
    gamma: float | None = None,
    stop: np.ndarray | None = None,
    backlog: Callable[[], int] | None = None,
) -> Partition:
    """Partition all positions of one graph by attention and nearest keys together (``mixed_graph``).

    key_neighbors: int32 [n, kappa]; the other arguments are those of ``partition_attention``.
    """
    token_graph = mixed_graph(neighbors, weights, key_neighbors, lam=config.lam, prune=config.prune, first=node_first)
    n = neighbors.shape[1]
    return _partition_one(token_graph, n, config, memory, (layer, graph), initial, gamma, stop, backlog)


def partition_built(
    token_graph: TokenGraph,
    n: int,
    *,
    config: CommunityConfig,
    memory: ResolutionMemory,
    layer: int,
    graph: int,
    stop: np.ndarray | None = None,
    backlog: Callable[[], int] | None = None,
) -> Partition:
    """What ``partition_attention`` or ``partition_mixed`` makes of n positions, from their graph."""
    return _partition_one(token_graph, n, config, memory, (layer, graph), None, None, stop, backlog)


def partition_refreshed(
    kept: Partition,
    neighbors: np.ndarray,
    weights: np.ndarray,
    key_neighbors: np.ndarray | None = None,
    *,
    config: CommunityConfig,
    memory: ResolutionMemory,
    layer: int,
    graph: int,
    stop: np.ndarray | None = None,
    backlog: Callable[[], int] | None = None,
) -> Partition:
    """All positions of a graph partitioned again after m more tokens, from the communities and the graph that there are.

    Arguments as for ``partition_repaired`` and ``partition_attention``. The graph is the earlier one with the later
    tokens' edges, pruned again; building it from all lists anew would take ten times as long.
    """
    token_graph, labels = _extended(kept, neighbors, weights, config, key_neighbors)
    first = len(kept.labels) - _nodes(kept)
    initial = np.concatenate([np.full(first, -1, np.int32), labels])
    merged = token_graph.merged(config.prune)
    return _partition_one(merged, len(initial), config, memory, (layer, graph), initial, None, stop, backlog)


def partition_repaired(
    kept: Partition,
    neighbors: np.ndarray,
    weights: np.ndarray,
    key_neighbors: np.ndarray | None = None,
    *,
    config: CommunityConfig,
    stop: np.ndarray | None = None,
) -> Partition:
    """A partition after m more tokens, by local moves that start at them and spread where modularity gains (eq. 5).

    kept: a partition by attention or mixed edges, with its graph; it stays as it is. neighbors, weights: int32 and
    float32 [H, m, kappa], the later tokens' lists. key_neighbors: int32 [m, kappa] with graph="mixed". Gamma and the
    scale of key edges stay, and edges are not pruned until the whole is partitioned again. Weights and graph of the
    result are those of all n + m positions. Neither the time nor the memory grows with the edges that there are.
    """
    token_graph, labels = _extended(kept, neighbors, weights, config, key_neighbors)
    seeds = np.arange(_nodes(kept), token_graph.num_nodes)
    labels = seeded(
        token_graph, labels, seeds, gamma=kept.gamma, max_community_size=config.max_community_size, stop=stop
    )  # fmt: skip
    return _gathered(token_graph, labels, len(kept.labels) - _nodes(kept), kept.gamma, config, stop)


def _nodes(kept: Partition) -> int:
    assert kept.graph is not None
    return kept.graph.num_nodes


def _extended(kept: Partition, neighbors, weights, config, key_neighbors) -> tuple[ExtendedGraph, np.ndarray]:
    """The graph of a partition with the edges of later tokens, and the labels of its nodes, -1 for these tokens."""
    assert kept.graph is not None
    first = len(kept.labels) - _nodes(kept)
    graph = extended_graph(kept.graph, neighbors, weights, lam=config.lam, first=first, key_neighbors=key_neighbors)
    return graph, np.concatenate([kept.labels[first:], np.full(neighbors.shape[1], -1, np.int32)])


def warm_up(config: CommunityConfig) -> None:
    """Compile, or load from numba's cache, the kernels that a configuration uses: some 15 s the first time ever.

    Otherwise the first partition pays for it, and compiling holds the GIL.
    """
    lists = np.array([[[-1, -1], [0, -1], [-1, -1], [2, -1]]], np.int32)  # two communities, which can be numbered anew
    weights = np.full(lists.shape, 0.25, np.float32)
    config = dataclasses.replace(config, leiden_engine="native")
    memory = ResolutionMemory()
    context = config.mean_size * coarse_from(config) + 1  # where steps score groups
    if config.graph == "keys":
        partition_keys_block(lists, 0, config=config, memory=memory, layer=0, context=context)
    elif config.graph == "attention":
        partition_attention(lists, weights, 0, config=config, memory=memory, layer=0, graph=0)
    else:
        partition_mixed(lists, weights, lists[0], 0, config=config, memory=memory, layer=0, graph=0)
    if config.graph != "keys":
        kept = partition_attention(lists, weights, 0, config=config, memory=memory, layer=0, graph=0)
        assert isinstance(kept.graph, TokenGraph)
        edges = kept.graph.indptr, kept.graph.indices, kept.graph.weights, kept.graph.strength
        _number(kept, *edges, config, context, None)
        later = lists[:, :1], weights[:, :1], lists[0, :1]
        partition_repaired(kept, *later, config=config)
        partition_refreshed(kept, *later, config=config, memory=memory, layer=0, graph=0)


def _most_communities(n: int, config: CommunityConfig) -> int:
    room = community_room(n, config.mean_size)
    if config.gamma is not None:  # whatever size it gives
        return room
    return min(room, int(MOST_COMMUNITIES * n / config.mean_size) + SPARE_COMMUNITIES)


def _partition_one(graph, n, config, memory, key, initial, gamma, stop, backlog) -> Partition:
    first = n - graph.num_nodes
    plan = SearchPlan.of(config)
    if gamma is not None:
        plan = dataclasses.replace(plan, corrections=0)
    else:
        gamma = _start_gamma(plan, config, memory, key, graph.num_nodes)
    if initial is not None:
        initial = np.asarray(initial)[first:]
    # One pass serves a warm start, and must do where jobs wait; more follow if none does.
    short = initial is not None or (backlog is not None and backlog() > 0)
    if short:
        plan = dataclasses.replace(plan, passes=1)
    labels, gamma = _search(graph, float(gamma), plan, config, initial, stop)
    if short and config.leiden_engine == "native":
        one = (graph.indptr[None], graph.indices, graph.weights, graph.strength[None], np.array([gamma]))
        _more_passes(*one, config, labels[None], stop, backlog)
    if plan.corrections and not (stop is not None and stop[0]):
        _remember(memory, key, gamma, graph.num_nodes, plan)
    return _gathered(graph, labels, first, gamma, config, stop)


def _more_passes(indptr, indices, weights, strength, gammas, config, labels, stop, backlog) -> None:
    """Up to MORE_PASSES passes over the graphs of ``leiden_batch``, from ``labels``, as long as no job waits."""
    for _ in range(MORE_PASSES if backlog is not None else 0):
        if backlog() or (stop is not None and stop[0]):
            return
        before = labels.copy()
        leiden_batch(
            indptr, indices, weights, strength, gammas, float(config.mean_size), 0.0, 0, 1, config.max_community_size,
            config.seed, labels, stop_flag(stop),
        )  # fmt: skip
        if np.array_equal(before, labels):
            return


def _gathered(
    graph: TokenGraph | ExtendedGraph, labels: np.ndarray, first: int, gamma: float, config, stop
) -> Partition:
    """The partition of positions ``0 .. first + num_nodes - 1`` that labels of the nodes give."""
    n = first + graph.num_nodes
    padded = np.zeros((1, n), np.int32)
    padded[0, first:] = labels
    alone = np.zeros((1, n), np.bool_)
    alone[0, first:] = graph.alone()
    partition = gather_partitions(
        padded, alone, np.array([first], np.int32), mean_size=config.mean_size,
        max_community_size=config.max_community_size, room=_most_communities(n, config),
        gammas=np.array([gamma]), dropped=graph.dropped, spread=config.policy != "streaming",
    )[0]  # fmt: skip
    strength = np.zeros(n)
    strength[first:] = graph.strength
    if _is_numbered(config, n):
        whole = graph.merged() if isinstance(graph, ExtendedGraph) else graph
        indptr = np.concatenate([np.zeros(first, whole.indptr.dtype), whole.indptr])
        _number(partition, indptr, whole.indices + np.int32(first), whole.weights, strength, config, n, stop)
    _weigh(partition, strength)
    partition.graph = graph
    return partition


def _number(partition: Partition, indptr, indices, weights, strength, config, context: int, stop) -> None:
    """Number communities by coarse ones where steps over ``context`` tokens score groups; CSR over all positions."""
    if _is_numbered(config, context):
        number_by_coarse_level(
            partition.labels, partition.start, partition.size, partition.member, indptr, indices, weights, strength,
            gamma=partition.gamma, mean_size=GROUP, seed=config.seed, stop=stop_flag(stop),
        )  # fmt: skip


@njit(nogil=True, cache=True)
def _weights(labels, strength, count):
    weight = np.zeros(count, np.float64)
    for i in range(len(labels)):
        if labels[i] >= 0:
            weight[labels[i]] += strength[i]
    return weight


def _is_numbered(config: CommunityConfig, context: int) -> bool:
    return is_hierarchical(config) and context > config.mean_size * coarse_from(config)


def _weigh(partition: Partition, strength: np.ndarray) -> None:
    """Set the weights of the communities; strength: float64 [n], of every position."""
    partition.weight = _weights(partition.labels, strength, len(partition.size))


def _search(graph: TokenGraph, gamma, plan, config, initial, stop) -> tuple[np.ndarray, float]:
    """Labels of one graph and the gamma they were found at, by the configured engine."""
    if config.leiden_engine == "native":
        labels = start_labels(graph.num_nodes, initial)[None]
        gammas = np.array([gamma], np.float64)
        leiden_batch(
            graph.indptr[None], graph.indices, graph.weights, graph.strength[None], gammas, float(config.mean_size),
            plan.tolerance, plan.corrections, plan.passes, config.max_community_size, config.seed, labels,
            stop_flag(stop),
        )  # fmt: skip
        return labels[0], float(gammas[0])

    linked = int((np.diff(graph.indptr) > 0).sum())

    def evaluate(gamma: float) -> tuple[np.ndarray, float]:
        labels = partition_graph(
            graph, engine=config.leiden_engine, gamma=gamma, passes=plan.passes, initial=initial, seed=config.seed,
            max_community_size=config.max_community_size, stop=stop, timeout=config.partition_timeout,
        )  # fmt: skip
        communities = len(np.unique(labels)) - (graph.num_nodes - linked)
        return labels, linked / communities if communities > 0 else 0.0

    return search_gamma(
        evaluate, gamma, config.mean_size, tolerance=plan.tolerance, corrections=plan.corrections if linked else 0
    )


def _start_gamma(plan: SearchPlan, config: CommunityConfig, memory: ResolutionMemory, key, nodes: int) -> float:
    if config.gamma is not None:
        return config.gamma
    constant = plan.constant if config.deterministic else memory.get(key, plan.constant)
    return plan.start_gamma(nodes, constant)


def _remember(memory: ResolutionMemory, key, gamma: float, nodes: int, plan: SearchPlan) -> None:
    if nodes > 0:
        memory.put(key, gamma * NODES_PER_CONSTANT / nodes, plan.constant)
