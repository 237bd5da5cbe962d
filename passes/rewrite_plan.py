"""What a rewritten graph asks of the code that runs it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import fx

from ckv_compile.passes.match_attention import AttentionSite, Cache


@dataclasses.dataclass(frozen=True)
class AttentionGeometry:
    """Sizes that all sites of a graph share."""

    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def num_graphs(self, aggregation: str) -> int:
        """Graphs per layer: one per KV group, per query head, or one for the layer."""
        return {"group": self.num_kv_heads, "head": self.num_query_heads, "layer": 1}[aggregation]

    def centroid_dim(self, aggregation: str) -> int:
        return self.head_dim * (self.num_kv_heads if aggregation == "layer" else 1)


@dataclasses.dataclass(frozen=True)
class RewritePlan:
    """How to call a rewritten graph with the arguments of dynamo's.

    ``past``, ``keep``, ``padding`` and ``mask`` index dynamo's inputs, ``kv_outputs`` and ``kept_outputs`` its outputs.
    ``state`` names the inputs that follow the kept ones: ``key_0, value_0, ...`` (dynamic caches), then index state.
    ``static_keys`` are inputs (decode, later prefill) or, with ``static_in_outputs``, outputs (first prefill).
    """

    phase: str  # "prefill" | "decode"
    cache: Cache
    geometry: AttentionGeometry
    num_inputs: int
    num_outputs: int
    keep: list[int]
    kept_outputs: list[int]
    state: list[str]
    names: list[str]
    past: list[int] = dataclasses.field(default_factory=list)
    kv_outputs: list[int] = dataclasses.field(default_factory=list)
    padding: int | None = None
    mask: int | None = None
    static_keys: list[int] = dataclasses.field(default_factory=list)
    static_in_outputs: bool = False
    static_length: int | None = None  # input that holds the number of cached tokens
    static_capacity: int | None = None
    batch: Callable[[list], int] = lambda args: 1
    num_new: Callable[[list], int] = lambda args: 1
    symbolic: list[str] = dataclasses.field(default_factory=list)


def geometry_of(sites: list[AttentionSite]) -> AttentionGeometry:
    first = sites[0]
    return AttentionGeometry(
        len(sites), first.num_query_heads, first.num_kv_heads, first.head_dim, first.dtype, first.device
    )


def uniform(sites: list[AttentionSite]) -> str | None:
    """Why the sites cannot share one index, or None if they can."""
    for field in (
        "num_query_heads",
        "num_kv_heads",
        "head_dim",
        "dtype",
        "device",
        "cache",
        "padding",
        "mask",
        "is_decode",
    ):
        values = {str(getattr(site, field)) for site in sites}
        if len(values) > 1:
            return f"the layers differ in {field}: {', '.join(sorted(values))}"
    return None


def size_reader(size: int | torch.SymInt, inputs: list[fx.Node]) -> Callable[[list], int] | None:
    """A function that reads a size off the run-time inputs; None if no input shows it."""
    if isinstance(size, int):
        return lambda args: size
    for position, node in enumerate(inputs):
        value = node.meta["example_value"]
        if isinstance(value, torch.SymInt) and value.node.expr == size.node.expr:
            return lambda args: int(args[position])
        if isinstance(value, torch.Tensor):
            for dim, extent in enumerate(value.shape):
                if isinstance(extent, torch.SymInt) and extent.node.expr == size.node.expr:
                    return lambda args, dim=dim: args[position].shape[dim]
    return None


def static_sizes(sites: list[AttentionSite], inputs: list[fx.Node]) -> tuple[int, int]:
    """(index of the input that counts the cached tokens of layer 0, capacity) of a static cache.

    Raises ValueError if the write position is not computed from exactly one counter.
    """
    counters, seen, pending = set(), set(), [sites[0].position]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        pending.extend(node.all_input_nodes)
        value = node.meta.get("example_value")
        if node.op == "placeholder" and isinstance(value, torch.Tensor):
            counters.add(inputs.index(node))
    capacity = sites[0].key_cache.meta["example_value"].shape[2]
    if len(counters) != 1:
        raise ValueError(f"the position in the static cache depends on {len(counters)} inputs, not on one counter")
    if not isinstance(capacity, int):
        raise ValueError("the capacity of the static cache is not known at compile time")
    return counters.pop(), capacity
