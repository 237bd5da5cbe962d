"""Layout of the index of one cache: what decode graphs read and write, and how large it is.

Every buffer is contiguous. A compiled graph sees a flat nominal view of it and learns the capacities from an int32
tensor ``capacity`` per layer (communities, tokens, log entries, the layer's number), so that no capacity is compiled in
and the layers share their kernels.
"""

from __future__ import annotations

import dataclasses

import torch

from ckv_compile.config import (
    GROUP,
    SPARE_COMMUNITIES,
    CommunityConfig,
    coarse_from,
    community_room,
    is_hierarchical,
    least_groups,
)
from ckv_compile.policies import policy_of
from ckv_compile.policies.base import PAGE
from ckv_compile.policies.neighborhoods import edges_of

NOMINAL_LENGTH = 128  # length of the K and V views that a compiled graph sees
NOMINAL_STATE = 1  # the same for flat index state
CANDIDATE_TAIL = 1024  # positions of the tail whose scores a step keeps, beside those of listed tokens
CANDIDATE_PARTS = 64  # programs at most, each with its best of what has no slot
ASSIGNED_AT_ONCE = 2  # tokens that a step gives a community at most: more than arrive, so that it catches up
PROGRAMS = 64  # parts of the communities that list their best separately (``ckv::route``)
DEVIATIONS = 3.0  # of the communities of a group that its best is taken to lie above their mean
MOST_COVERAGE = 4  # times the fewest groups whose communities a step scores, where communities are very many

# name -> dtype (None: that of K and V), in the order in which decode graphs take them
INDEX_STATE: dict[str, torch.dtype | None] = {
    "n_indexed": torch.int32,
    "num_communities": torch.int32,
    "centroid": torch.int8,
    "centroid_scale": torch.float32,
    "channel_scale": torch.float32,
    "start": torch.int32,
    "stored": torch.int32,
    "size": torch.int32,
    "member": torch.int32,
    "log_community": torch.int32,
    "log_first": torch.int32,
    "scores": torch.float32,
    "tally": torch.int64,
}
# further state of graphs that assign new tokens to communities (eq. 6-7)
ASSIGN_STATE: dict[str, torch.dtype | None] = {
    "log_mean": None,
    "mean_at": torch.int32,
    "label": torch.int32,
    "community_weight": torch.float32,
    "total_weight": torch.float32,
    "gamma": torch.float32,
    "edge_neighbor": torch.int32,
    "edge_weight": torch.float32,
    "candidate": torch.int32,
    "candidate_score": torch.float32,
    "candidate_rest": torch.int64,
    "candidate_norm": torch.float32,
    "new_key": None,
}
CANDIDATES = ("candidate", "candidate_score", "candidate_rest", "candidate_norm")
# further state where communities that are not retrieved enter attention by their means (``centroid_budget``)
SUMMARY_STATE: dict[str, torch.dtype | None] = {"mean_value": None}
# further state where groups of communities are scored first
COARSE_STATE: dict[str, torch.dtype | None] = {
    "num_grouped": torch.int32,
    "coarse": torch.int8,
    "coarse_scale": torch.float32,
    "coarse_scores": torch.float32,
}
# and if new tokens are assigned besides
ASSIGN_SUMMARY_STATE: dict[str, torch.dtype | None] = {"new_value": None, "log_value": None}
# further state of policies other than communities; each names what it keeps (``ckv_compile.policies``)
POLICY_STATE: dict[str, torch.dtype | None] = {
    "importance": torch.float32,
    "neighbor": torch.int32,
    "page_low": None,
    "page_high": None,
    "last_query": torch.float32,
}
# the state of which a step leaves nothing to the next one, and that which counts for all rows together
NOT_OF_ROWS = ("scores", "coarse_scores", *CANDIDATES, "new_key", "new_value", "tally")
# what a buffer holds where nothing was written, if not 0
EMPTY = {"importance": torch.inf, "log_community": -1}
# the state that has an entry for each community, ``[L, B, G, C, ...]``
PER_COMMUNITY = (
    "start",
    "stored",
    "size",
    "centroid",
    "centroid_scale",
    "mean_at",
    "community_weight",
    "mean_value",
)
# for each token of the cache, and for each entry of the log
PER_TOKEN = ("member", "label", "importance", "neighbor")
PER_ENTRY = ("log_community", "log_mean", "log_value", "edge_neighbor", "edge_weight")


def waiting_entry(position):
    """Of a token in ``log_community`` that is logged and has no community yet; of numbers or of an int32 tensor."""
    return -2 - position


def in_blocks(config: CommunityConfig) -> bool:
    """Whether an index grows block by block, rather than being partitioned as a whole."""
    return config.graph == "keys" or config.policy != "communities"


def assigns_tokens(config: CommunityConfig) -> bool:
    """Whether decode steps assign the new token to a community instead of attending it until it is indexed."""
    return config.policy == "communities" and (config.graph != "keys" or config.append == "assign")


def centres_keys(config: CommunityConfig) -> bool:
    """Whether centroids are means less one vector of their graph, ``key_mean``.

    It adds the same to every product of a query, which no order of that query's own scores depends on. But the heads of a
    group share one list, and with it a head whose queries lie along what all keys have in common would fill it alone.
    Not where the means themselves are read: where tokens are assigned, and where communities are attended by their means.
    """
    return config.score == "relative"


def shortlist_slots(config: CommunityConfig) -> int:
    """Communities that ``route`` lists for ``retrieve``: some four times what fills the budget, 32 or 64 a part.

    If more of a part than that are among the best, ``retrieve`` has to look at all scores, many times slower.
    """
    return PROGRAMS * (32 if config.budget <= 8 * config.mean_size * PROGRAMS else 64)


def num_groups(communities: int) -> int:
    return -(-communities // GROUP)


def coarse_parts(least: int) -> int:
    """Parts of the groups that list their best separately (``ckv::route_coarse``), at most.

    A part that lists few misses some of the best where by chance it has more of them: on SmolLM2's keys four or more a
    part lose no more than one list of all, and one a part three times as much.
    """
    return max(8, min(PROGRAMS, 1 << max(0, (least // 4).bit_length() - 1)))


def visit_slots(config: CommunityConfig) -> int:
    """Groups that ``route_coarse`` can list: a multiple of PROGRAMS, with room for all that decode steps opened."""
    opened = 4 * config.refresh_interval // GROUP + 2 if assigns_tokens(config) else 0
    most = MOST_COVERAGE * least_groups(config)
    return sum(-(-part // PROGRAMS) * PROGRAMS for part in (most, opened))


def edge_lists(keys: bool, graphs: int, query_heads: int, kv_heads: int) -> tuple[int, int]:
    """(lists of candidates, edge lists) of a layer: of keys one per graph, else one per query head of a shared list."""
    return (graphs, graphs) if keys else (max(graphs, kv_heads), query_heads)


def candidate_slots(budget: int, num_sink_tokens: int) -> int:
    """Candidates of an edge list that keep their scores until the end of the step (``ckv::pick_edges``)."""
    return num_sink_tokens + budget + CANDIDATE_TAIL


def rest_slots(kappa: int) -> int:
    """Further candidates of an edge list: the best of each program, of what has no slot."""
    return CANDIDATE_PARTS * max(2, 1 << (kappa - 1).bit_length())


def state_dtypes(config: CommunityConfig, dtype: torch.dtype) -> dict[str, torch.dtype]:
    assigns, summarizes = assigns_tokens(config), config.centroid_budget > 0
    kinds = {
        **INDEX_STATE,
        **(ASSIGN_STATE if assigns else {}),
        **(SUMMARY_STATE if summarizes else {}),
        **(COARSE_STATE if is_hierarchical(config) else {}),
        **(ASSIGN_SUMMARY_STATE if assigns and summarizes else {}),
        **{name: POLICY_STATE[name] for name in policy_of(config.policy).state},
    }
    return {name: kind or dtype for name, kind in kinds.items()}


@dataclasses.dataclass(frozen=True)
class IndexShape:
    """Sizes of an index: L layers, B rows, G graphs a layer, H edge lists a layer, C communities, N tokens, E log.

    places: lists of candidates a layer, each for H / places edge lists. slots, rests: their lengths. groups: of
    communities, 0 where none are kept because the cache is not long enough for a step to score them. neighbors: that a
    policy keeps of each token.
    """

    layers: int
    batch: int
    graphs: int
    lists: int
    centroid_dim: int
    communities: int
    tokens: int
    log: int
    kappa: int
    kv_heads: int
    head_dim: int
    places: int
    slots: int
    rests: int
    query_heads: int = 0
    neighbors: int = 0
    groups: int = 0

    @classmethod
    def for_cache(cls, config: CommunityConfig, geometry, batch: int, tokens: int) -> IndexShape:
        # No more than there may be tokens: some ask for an interval that never ends.
        log = min(4 * config.refresh_interval, tokens) if assigns_tokens(config) else 1
        blocks = tokens // config.append_block + tokens // config.block_size + 2 if in_blocks(config) else 0
        graphs = geometry.num_graphs(config.graph_aggregation)
        heads = geometry.num_query_heads, geometry.num_kv_heads
        places, lists = edge_lists(config.graph == "keys", graphs, *heads)
        communities = community_room(tokens, config.mean_size) + SPARE_COMMUNITIES * blocks + log
        grouped = is_hierarchical(config) and tokens > config.mean_size * coarse_from(config)
        return cls(
            layers=geometry.num_layers,
            batch=batch,
            graphs=graphs,
            lists=lists,
            centroid_dim=geometry.centroid_dim(config.graph_aggregation),
            communities=communities,
            tokens=tokens,
            log=log,
            kappa=config.kappa,
            kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            places=places,
            slots=candidate_slots(config.budget, config.num_sink_tokens),
            rests=rest_slots(config.kappa),
            query_heads=geometry.num_query_heads,
            neighbors=edges_of(config),
            groups=num_groups(communities) if grouped else 0,
        )

    def of(self, name: str) -> tuple[int, ...]:
        per_row, per_graph = (self.layers, self.batch), (self.layers, self.batch, self.graphs)
        edges = (*per_row, self.lists, self.log, self.kappa)
        pages = (*per_row, self.kv_heads, -(-self.tokens // PAGE), self.head_dim)
        groups = max(1, self.groups)
        return {
            "num_grouped": per_graph,
            "coarse": (*per_graph, groups, 2, self.centroid_dim),
            "coarse_scale": (*per_graph, groups, 2),
            "coarse_scores": (self.batch, self.graphs, groups),
            "n_indexed": per_row,
            "log_first": per_row,
            "num_communities": per_graph,
            "total_weight": per_graph,
            "gamma": per_graph,
            "centroid": (*per_graph, self.communities, self.centroid_dim),
            "mean_value": (*per_graph, self.communities, self.centroid_dim),  # values are as wide as keys
            "centroid_scale": (*per_graph, self.communities),
            "channel_scale": (*per_graph, self.centroid_dim),
            "key_mean": (*per_graph, self.centroid_dim),
            "start": (*per_graph, self.communities),
            "stored": (*per_graph, self.communities),
            "size": (*per_graph, self.communities),
            "mean_at": (*per_graph, self.communities),
            "community_weight": (*per_graph, self.communities),
            "member": (*per_graph, self.tokens),
            "label": (*per_graph, self.tokens),
            "log_community": (*per_graph, self.log),
            "log_mean": (*per_graph, self.log, self.centroid_dim),
            "log_value": (*per_graph, self.log, self.centroid_dim),
            "edge_neighbor": edges,
            "edge_weight": edges,
            "candidate": (*per_row, self.places, self.slots),
            "candidate_score": (*per_row, self.lists, self.slots),
            "candidate_rest": (*per_row, self.lists, self.rests),
            "candidate_norm": (*per_row, self.lists),
            "new_key": (*per_row, self.kv_heads, self.head_dim),
            "new_value": (*per_row, self.kv_heads, self.head_dim),
            "importance": (*per_graph, self.tokens),
            "neighbor": (*per_graph, self.tokens, self.neighbors),
            "page_low": pages,
            "page_high": pages,
            "last_query": (*per_row, self.query_heads, self.head_dim),
            "scores": (self.batch, self.graphs, self.communities),
            "tally": (self.layers, 2),
        }[name]
