"""The options of the backend: one frozen dataclass, validated when it is built."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import os
from typing import Any, Literal, get_args

GraphSource = Literal["keys", "attention", "mixed"]
Aggregation = Literal["group", "head", "layer"]
Score = Literal["max", "softmax", "relative"]
TopK = Literal["fast", "exact"]
Engine = Literal["native", "igraph", "leidenalg"]
Policy = Literal[
    "communities", "components", "neighborhoods", "kmeans", "kmeans_l2", "quest", "sparq", "tokenselect", "freekv", "h2o",
    "snapkv", "graphkv", "streaming", "random", "oracle",
]  # fmt: skip
Append = Literal["attend", "assign"]
Grouping = Literal["off", "inputs", "all"]
Hierarchy = Literal["auto", "on", "off"]

# Policies that score every token at a step, instead of publishing groups of them (``ckv_compile.policies``).
TOKEN_POLICIES = ("neighborhoods", "quest", "sparq", "tokenselect", "freekv", "h2o", "snapkv", "graphkv", "oracle")
KEY_GRAPH_POLICIES = ("components", "neighborhoods")  # those on the graph of nearest keys

# gamma of mean size s on a causal key graph of n nodes is about GAMMA_NUMERATOR / s * n / 512 (measured on two models).
GAMMA_NUMERATOR = 100.0

SPARE_COMMUNITIES = 8
LARGEST_BUDGET = 1 << 20
GROUP = 8  # communities of consecutive numbers that are scored as one first (``ckv::route_coarse``)

# Communities with consecutive ids that a part of ``ckv::route`` takes together: 8, whose scales, sizes and scores fill a
# sector of 32 bytes. Single ones cost 35 us where runs of 8 cost 19 (524k tokens, H200). Those that a query wants lie side
# by side in the text; in ids they are spread, or a part would have more of them than it can list. Of SmolLM2's keys over
# 32k tokens, at most 19 of a part were among the best of a budget of 4096 (26 if not spread); a list holds at least 20.
RUN = 8


def community_room(num_positions: int, mean_size: int) -> int:
    """Communities that an index keeps room for, for so many positions: twice the expected number and a few."""
    return 2 * num_positions // mean_size + SPARE_COMMUNITIES


def is_hierarchical(config: CommunityConfig) -> bool:
    """Whether an index keeps groups of communities; where communities are few, steps do not look at them.

    "auto" keeps them for the graph that they were measured on (bench.coarse_recall).
    """
    if config.hierarchy == "off" or config.score != "max" or config.policy != "communities":
        return False
    return config.hierarchy == "on" or config.graph == "keys"


def least_groups(config: CommunityConfig) -> int:
    """Groups whose communities a step scores at least, where it scores groups: as many communities as tokens of budget.

    They hold ``mean_size`` times what it attends to (bench.coarse_recall: fewer of larger ones lose more).
    """
    return -(-config.budget // GROUP)


def coarse_from(config: CommunityConfig) -> int:
    """Communities up to which a step scores all of them.

    "auto": four times those that it would score else; fewer are not worth another kernel. "on": as many.
    """
    return (4 if config.hierarchy == "auto" else 1) * GROUP * least_groups(config)


def _choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"options[{name!r}] must be one of {', '.join(map(repr, allowed))}, got {value!r}")


@dataclasses.dataclass(frozen=True)
class CommunityConfig:
    """Options of ``torch.compile(model, backend="communitykv", options={...})``; counts are in tokens.

    A field that is ``None`` takes the default that its comment names once the others are known.
    """

    graph: GraphSource = "keys"
    mean_size: int = None  # type: ignore[assignment]  # target mean community size: 8 with "keys" and "mixed", 16 with "attention"
    block_size: int = 2048  # tokens of one independently partitioned block ("keys")
    append_block: int = None  # type: ignore[assignment]  # generated tokens indexed together ("keys"): 512, at most budget / 2
    kappa: int = 8  # neighbours kept per token (paper, section 4)
    lam: float = 0.5  # weight of direct attention against co-attention, eq. 4 (paper, section 4)
    gamma: float | None = None  # Leiden resolution; searched per graph for mean_size when None
    max_community_size: int = 64
    score: Score = "max"
    prune: float = 0.03  # edges below this part of the smaller endpoint's strongest edge are dropped ("attention")
    centroid_budget: int = 0  # communities that enter attention by their means (paper, table 6: 0 is best)
    policy: Policy = "communities"  # the others are for comparison (``ckv_compile.policies``)
    hierarchy: Hierarchy = "off"  # groups of communities are scored first where these are many: slower so far (H200)

    num_sink_tokens: int = 10  # leading positions that are always attended (paper, section 4)
    recent_window: int = 64
    budget: int = 4096  # attended tokens of one query, everything included (paper, section 4)
    min_context: int = None  # type: ignore[assignment]  # contexts up to this length decode densely: budget
    refresh_interval: int = 512  # generated tokens between partitions ("attention", "mixed"; paper, appendix B)
    repair_interval: int = 128  # generated tokens between repairs by local moves in between; 0: none (bench.partition)
    graph_aggregation: Aggregation = "group"  # one index per KV group (paper, section 4.4)
    topk: TopK = "fast"  # lists of prefill on CUDA; "fast" keeps 99.9 % of the probability (bench.topk_prefill)
    append: Append = "attend"

    leiden_engine: Engine = "native"
    workers: int = None  # type: ignore[assignment]  # partition threads: cores - 1; 0 partitions in the calling thread
    partition_timeout: float = 60.0  # seconds after which contiguous pages stand in for a partition
    seed: int = 0
    cuda_graphs: bool = True
    deferred_stop: bool = True
    group_projections: Grouping = "all"  # linears of few rows and one input in one kernel (CUDA)
    deterministic: bool = False
    strict: bool = False

    def __post_init__(self) -> None:
        for name, literal in (
            ("graph", GraphSource), ("score", Score), ("policy", Policy), ("graph_aggregation", Aggregation),
            ("topk", TopK), ("append", Append), ("leiden_engine", Engine),
            ("group_projections", Grouping), ("hierarchy", Hierarchy),
        ):  # fmt: skip
            _choice(name, getattr(self, name), get_args(literal))
        for name, least in (
            ("block_size", 64), ("kappa", 1), ("max_community_size", 1), ("num_sink_tokens", 0),
            ("recent_window", 1), ("budget", 1), ("refresh_interval", 1), ("repair_interval", 0),
            ("seed", 0), ("centroid_budget", 0),
        ):  # fmt: skip
            self._integer(name, least)
        if self.budget > LARGEST_BUDGET:
            raise ValueError(
                f"options['budget'] must be at most {LARGEST_BUDGET}, got {self.budget}: a list of it is kept for every "
                "step; to decode densely, raise options['min_context'] instead"
            )
        for name in ("cuda_graphs", "deferred_stop", "deterministic", "strict"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"options[{name!r}] must be True or False, got {getattr(self, name)!r}")
        self._number("lam", 0.0, 1.0)
        self._number("prune", 0.0, 1.0)
        self._number("partition_timeout", 0.0, float("inf"))
        if self.gamma is not None:
            self._number("gamma", 0.0, float("inf"))

        self._default("mean_size", 16 if self.graph == "attention" else 8, 1)
        self._default("min_context", self.budget, 0)
        # Until then they are attended, whatever the budget: more than half of it, and retrieval has too little. At a
        # budget of 256, 128 recalls more than 16, 32, 64 and 512; at 1024, 64 to 512 are level (bench.ablations).
        self._default("append_block", min(512, self.block_size, max(16, self.budget // 2)), 16)
        self._default("workers", max(1, (os.cpu_count() or 2) - 1), 0)

        needed = self.num_sink_tokens + self.recent_window + 1 + self.centroid_budget
        if self.budget < needed:
            reserved = " + centroid_budget" if self.centroid_budget else ""
            raise ValueError(
                f"options['budget'] must be at least num_sink_tokens + recent_window + 1{reserved} ({needed}), "
                f"got {self.budget}; raise options['budget']"
            )
        if self.centroid_budget and self.policy in TOKEN_POLICIES:
            raise ValueError(
                f"options['centroid_budget'] must be 0 with policy={self.policy!r}, which forms no communities, "
                f"got {self.centroid_budget}"
            )
        if self.policy in KEY_GRAPH_POLICIES and self.graph != "keys":
            raise ValueError(
                f"options['policy'] = {self.policy!r} needs graph='keys', got graph={self.graph!r}: it is a control on "
                "the graph of nearest keys"
            )
        if self.append_block > self.block_size:
            raise ValueError(
                f"options['append_block'] must be at most block_size ({self.block_size}), got {self.append_block}"
            )
        if self.score == "relative" and (self.graph != "keys" or self.append == "assign" or self.centroid_budget):
            raise ValueError(
                "options['score'] = 'relative' needs graph='keys', append='attend' and centroid_budget=0, whose centroids "
                f"are centred, got graph={self.graph!r}, append={self.append!r} and centroid_budget={self.centroid_budget}"
            )
        if self.hierarchy == "on" and (self.score != "max" or self.policy != "communities"):
            raise ValueError(
                "options['hierarchy'] = 'on' needs score='max' and policy='communities', "
                f"got score={self.score!r} and policy={self.policy!r}; leave it at 'auto'"
            )
        if self.graph_aggregation == "head" and self.graph != "attention":
            raise ValueError(
                f"options['graph_aggregation'] = 'head' needs graph='attention', got graph={self.graph!r}: "
                "keys are shared by the query heads of a group, so their graph is too"
            )

    def _integer(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"options[{name!r}] must be an integer, got {value!r}")
        if value < least:
            raise ValueError(f"options[{name!r}] must be at least {least}, got {value}")

    def _number(self, name: str, least: float, most: float) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"options[{name!r}] must be a number, got {value!r}")
        if not least <= value <= most:
            raise ValueError(f"options[{name!r}] must be between {least} and {most}, got {value}")

    def _default(self, name: str, value: int, least: int) -> None:
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)
        self._integer(name, least)

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in dataclasses.fields(cls))

    @classmethod
    def from_options(cls, options: dict[str, Any] | None) -> tuple[CommunityConfig, dict[str, Any]]:
        """Split ``torch.compile``'s options into ours and Inductor's own.

        Returns the configuration and the options that Inductor's config knows. Any other name raises ``ValueError``.
        """
        from torch._inductor import config as inductor_config

        ours, inductors = {}, {}
        known = inductor_config.get_config_copy()
        for name, value in (options or {}).items():
            if name in cls.option_names():
                ours[name] = value
            elif name.replace("-", "_") in known:
                inductors[name.replace("-", "_")] = value
            else:
                near = difflib.get_close_matches(name, cls.option_names(), n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(
                    f"unknown option {name!r} for backend 'communitykv': it takes {', '.join(cls.option_names())} "
                    f"and the options of torch._inductor.config{hint}"
                )
        return cls(**ours), inductors

    def digest(self) -> str:
        """Hash of every option, for cache keys."""
        return hashlib.sha256(repr(dataclasses.astuple(self)).encode()).hexdigest()
