"""What ``bench.ablations`` changes: one factor at a time, by an option where there is one, else by an experiment.

Experiments are not options of the backend. They put another function in the place of the one that partitions a graph, or
give it other lists than the prefill's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components, minimum_spanning_tree

from ckv_compile.community.graph import TokenGraph, attention_graph
from ckv_compile.community.partition import Partition, partition_built, partitions_of
from ckv_compile.community.resolution import ATTENTION_NUMERATOR, NODES_PER_CONSTANT
from ckv_compile.config import CommunityConfig

Labels = Callable[..., Partition]  # with the arguments of ``partition_attention``


@dataclasses.dataclass(frozen=True)
class Arm:
    """One value of one factor; the other factors are at the family's defaults.

    options: of the backend. lists: of the prompt's attention, "heads" (a list of every query head), "sinks" (the same,
    leading positions included) or "pooled" (one list per KV head, of the mean of its queries). partition: in the place
    of ``partition_attention``. first_layer: options of layer 0 alone. stream: whether tokens follow for longer, as only
    then the value can matter. predicted: whether predictions are measured too. default: whether it is the default.
    """

    family: str
    factor: str
    value: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    lists: str = "heads"
    partition: Labels | None = None
    neighbors_of_attention: bool = False
    first_layer: dict[str, Any] | None = None
    stream: bool = False
    predicted: bool = False
    default: bool = False

    @property
    def setting(self) -> str:
        """Arms of one setting are compared with that setting's default."""
        if self.first_layer is not None:
            return "layer 0"
        return "stream" if self.stream else "prompt"

    @property
    def name(self) -> str:
        return f"{self.family}, {self.factor}, {self.value}"


# ---------------------------------------------------------------------- experiments


def self_ties(neighbors: np.ndarray, weights: np.ndarray, lam: float, first: int) -> np.ndarray:
    """w_ii of eq. 4, float64 [n - first]: eq. 3 for i = j, and a token's attention to itself.

    neighbors, weights: [H, n, kappa] as for ``attention_graph``.
    """
    n = neighbors.shape[1]
    listed = neighbors >= first
    co_attention = np.bincount(neighbors[listed], weights[listed].astype(np.float64) ** 2, n)
    own = np.where(neighbors == np.arange(n)[:, None], weights, 0.0).sum((0, 2))
    return (lam * own + (1.0 - lam) * co_attention)[first:]


def with_self_ties(neighbors, weights, node_first, *, config, memory, layer, graph, stop=None, **unused) -> Partition:
    """A token's tie with itself counts in eq. 5, as eq. 3 says: it adds to the strength of a node and to m."""
    made = attention_graph(neighbors, weights, lam=config.lam, prune=config.prune, first=node_first)
    ties = self_ties(neighbors, weights, config.lam, node_first)
    made = dataclasses.replace(made, strength=made.strength + ties)
    return partition_built(
        made, neighbors.shape[1], config=config, memory=memory, layer=layer, graph=graph, stop=stop
    )  # fmt: skip


def with_sinks(neighbors, weights, node_first, *, config, memory, layer, graph, stop=None, **unused) -> Partition:
    """Leading positions are nodes of the graph (paper, section 4.4); steps attend to them always, as ever."""
    n, first = neighbors.shape[1], max(0, node_first - config.num_sink_tokens)
    whole = attention_graph(neighbors, weights, lam=config.lam, prune=config.prune, first=first)
    found = partition_built(whole, n, config=config, memory=memory, layer=layer, graph=graph, stop=stop)
    made = attention_graph(neighbors, weights, lam=config.lam, prune=config.prune, first=node_first)
    return relabelled(found.labels, made, found.gamma, config)


def components(neighbors, weights, node_first, *, config, **unused) -> Partition:
    """Components of the same graph without its weakest edges, ``mean_size`` tokens on average (paper, table 7)."""
    made = attention_graph(neighbors, weights, lam=config.lam, prune=config.prune, first=node_first)
    nodes = made.num_nodes
    length = (
        float(made.weights.max(initial=0.0)) * 2 - made.weights
    )  # positive, and shortest where an edge is strongest
    tree = minimum_spanning_tree(csr_array((length, made.indices, made.indptr), shape=(nodes, nodes))).tocoo()
    kept = np.argsort(tree.data, kind="stable")[: nodes - max(1, round(nodes / config.mean_size))]
    forest = csr_array((np.ones(len(kept)), (tree.row[kept], tree.col[kept])), shape=(nodes, nodes))
    labels = np.full(neighbors.shape[1], -1, np.int32)
    labels[node_first:] = connected_components(forest, directed=False)[1]
    return relabelled(labels, made, 0.0, config)


def relabelled(labels: np.ndarray, graph: TokenGraph, gamma: float, config: CommunityConfig) -> Partition:
    """A partition of ``graph``, whose nodes are the last positions, from labels int32 [n] of all positions."""
    first = len(labels) - graph.num_nodes
    (found,) = partitions_of(np.maximum(labels, 0)[None], first, config)
    weight = np.bincount(found.labels[first:], graph.strength, len(found.size))
    return dataclasses.replace(found, gamma=gamma, weight=weight, graph=graph)


def strongest_neighbors(graph: TokenGraph, count: int, first: int) -> np.ndarray:
    """int32 [n, count]: absolute positions of the ``count`` strongest neighbours of every position, -1 for none."""
    found = np.full((first + graph.num_nodes, count), -1, np.int32)
    rows = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr))
    order = np.lexsort((-graph.weights, rows))
    slot = np.arange(len(order)) - graph.indptr[rows[order]]
    kept = slot < count
    found[first + rows[order][kept], slot[kept]] = first + graph.indices[order][kept]
    return found


# ---------------------------------------------------------------------- arms


def arms_of(context: int, budget: int) -> list[Arm]:
    """Every arm. Each factor has its default among its values; the default of a setting is the arm of that name."""
    window = budget - CommunityConfig.num_sink_tokens - 1
    start = ATTENTION_NUMERATOR / 16 * (context - CommunityConfig.num_sink_tokens) / NODES_PER_CONSTANT
    return [
        *_of("attention", "kappa", {2: True, 4: False, 8: None, 16: False, 32: True}, "kappa"),
        *_of("attention", "lam", {0.0: True, 0.25: False, 0.5: None, 0.75: False, 1.0: True}, "lam"),
        *_of("attention", "prune", {0.0: False, 0.03: None, 0.1: False}, "prune"),
        *_of("attention", "graph_aggregation", {"head": True, "group": None, "layer": True}, "graph_aggregation"),
        Arm("attention", "leading positions in the graph", "no", default=True),
        Arm(
            "attention", "leading positions in the graph", "yes", lists="sinks", partition=with_sinks, predicted=True,
        ),
        Arm("attention", "self-ties (eq. 3)", "left out", default=True),
        Arm("attention", "self-ties (eq. 3)", "kept", partition=with_self_ties, predicted=True),
        Arm("attention", "lists of", "every head", default=True),
        Arm("attention", "lists of", "the group's mean query", lists="pooled", predicted=True),
        *_of("attention", "mean_size", {8: True, 16: None, 32: False}, "mean_size"),
        Arm("attention", "gamma", "searched", default=True),
        Arm("attention", "gamma", "where the search starts", {"gamma": start}),
        *_of("attention", "max_community_size", {32: False, 64: None, 128: False}, "max_community_size"),
        *_of("attention", "centroid_budget", {0: None, 4: False, 16: True, 64: False}, "centroid_budget"),
        *_of("attention", "score", {"max": None, "softmax": False}, "score"),
        Arm("attention", "groups", "Leiden", default=True),
        Arm("attention", "groups", "components", partition=components, predicted=True),
        Arm(
            "attention", "groups", "neighborhoods", {"graph": "keys", "policy": "neighborhoods"},
            neighbors_of_attention=True, predicted=True,
        ),
        Arm("attention", "groups", "kmeans of keys", {"graph": "keys", "policy": "kmeans"}),
        Arm("attention", "groups", "newest tokens", {
            "graph": "keys", "policy": "streaming", "recent_window": window, "append_block": 32,
        }),
        Arm("attention", "refresh, repair every", "512, 128", stream=True, default=True),
        *(
            Arm("attention", "refresh, repair every", f"{refresh}, {repair or 'never'}".replace("4096", "never"), {
                "refresh_interval": refresh, "repair_interval": repair,
            }, stream=True)
            for refresh, repair in ((128, 128), (512, 0), (4096, 128), (4096, 0))
        ),
        Arm("keys", "graph", "keys", default=True),
        Arm("keys", "graph", "mixed", {"graph": "mixed"}, predicted=True),
        Arm("keys", "graph", "attention", {"graph": "attention"}, predicted=True),
        *_of("keys", "block_size", {512: True, 1024: False, 2048: None, 4096: True}, "block_size"),
        *_of("keys", "mean_size", {4: False, 8: None, 16: True}, "mean_size"),
        *_of("keys", "score", {"max": None, "softmax": True}, "score"),
        *_of("keys", "kappa", {2: False, 4: False, 8: None, 16: True, 32: False}, "kappa"),
        *_of("keys", "max_community_size", {32: False, 64: None, 128: False}, "max_community_size"),
        *_of("keys", "graph_aggregation", {"group": None, "layer": True}, "graph_aggregation"),
        *_of("keys", "recent_window", {16: True, 32: False, 64: None, 128: False}, "recent_window"),
        *_of("keys", "hierarchy", {"off": None, "on": True}, "hierarchy"),
        *_of("keys", "centroid_budget", {0: None, 4: False, 16: True, 64: False}, "centroid_budget"),
        Arm("keys", "groups", "Leiden", default=True),
        *(
            Arm("keys", "groups", policy, {"policy": policy}, predicted=policy == "neighborhoods")
            for policy in ("components", "neighborhoods", "kmeans")
        ),
        Arm("keys", "groups", "newest tokens", {"policy": "streaming", "recent_window": window, "append_block": 32}),
        Arm("keys", "graph of layer 0", "keys", first_layer={}, default=True),
        Arm("keys", "graph of layer 0", "attention", first_layer={"graph": "attention"}, predicted=True),
        Arm("keys", "graph of layer 0", "mixed", first_layer={"graph": "mixed"}, predicted=True),
        Arm("keys", "append", "attend", stream=True, default=True),
        Arm("keys", "append", "assign", {"append": "assign"}, stream=True),
        Arm("keys", "append_block", "128", stream=True, default=True),
        *(Arm("keys", "append_block", str(size), {"append_block": size}, stream=True) for size in (16, 32, 64, 512)),
    ]  # fmt: skip


def _of(family: str, factor: str, values: dict[Any, bool | None], option: str) -> list[Arm]:
    """Arms of an option. values: whether predictions are measured too, None for the default."""
    return [
        Arm(family, factor, str(value), {} if predicted is None else {option: value}, predicted=bool(predicted),
            default=predicted is None)
        for value, predicted in values.items()
    ]  # fmt: skip
