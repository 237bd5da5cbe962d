"""What a rewritten graph asks of the code that runs it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import sympy
import torch
from torch import fx

from ckv_compile.passes.index_expressions import (
    IndexExpressions,
    Load,
    NotAnExpression,
    memory_owner,
    mutated_argument,
    shape_of,
)
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
class BlockInputs:
    """Where a call finds the block lists of flex_attention, and what they must agree with.

    lists: inputs of dynamo's that are ``BlockLists``' four tensors; the last two may be None.
    offset: input that must be the number of cached tokens.
    ahead: so many positions after the new token must be hidden by the padding mask, in every row.
    starts_empty: no token may be cached.
    """

    lists: tuple[int | None, ...]
    query_block: int
    key_block: int
    offset: int | None
    ahead: int = 0
    starts_empty: bool = False


@dataclasses.dataclass(frozen=True)
class RewritePlan:
    """How to call a rewritten graph with the arguments of dynamo's.

    ``past``, ``keep``, ``padding`` and ``mask`` index dynamo's inputs, ``kv_outputs`` and ``kept_outputs`` its outputs.
    ``state`` names the inputs that follow the kept ones: ``key_0, value_0, ...`` (dynamic caches), then index state.
    ``static_keys`` are inputs (decode, later prefill) or, with ``static_in_outputs``, outputs (first prefill);
    ``static_values`` are inputs of decode graphs.
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
    blocks: BlockInputs | None = None
    static_keys: list[int] = dataclasses.field(default_factory=list)
    static_values: list[int] = dataclasses.field(default_factory=list)
    static_in_outputs: bool = False
    static_length: int | None = None  # input that holds the number of cached tokens
    static_capacity: Callable[[list], int] | None = None
    batch: Callable[[list], int] = lambda args: 1
    num_new: Callable[[list], int] = lambda args: 1
    queries: int = 1  # new tokens per row of a decode step
    exact: str | None = None  # of a prefill with so few tokens that it might have been one: why it is not
    symbolic: list[str] = dataclasses.field(default_factory=list)
    counts: list[int] = dataclasses.field(default_factory=list)  # inputs that must be the number of cached tokens
    # By output: an input of those, and what is added to it.
    counted: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)


def block_inputs(site: AttentionSite, inputs: list[fx.Node]) -> BlockInputs | None:
    if site.blocks is None:
        return None
    blocks = site.blocks
    lists = (blocks.kv_num_blocks, blocks.kv_indices, blocks.full_kv_num_blocks, blocks.full_kv_indices)
    return BlockInputs(
        tuple(None if node is None else inputs.index(node) for node in lists),
        blocks.query_block,
        blocks.key_block,
        None if site.offset is None else inputs.index(site.offset),
        site.ahead,
        site.starts_empty,
    )


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
        "blocks",
        "offset",
        "ahead",
        "is_decode",
        "batch",
    ):
        values = {str(getattr(site, field)) for site in sites}
        if len(values) > 1:
            return f"the layers differ in {field}: {', '.join(sorted(values))}"
    lengths = {"new tokens": {shape_of(site.query)[2] for site in sites}}
    if sites[0].cache is Cache.DYNAMIC:
        # Symbolic lengths are not compared: dynamo gives each input its own symbol.
        past = (shape_of(node)[2] for site in sites for node in (site.past_key, site.past_value))
        lengths["cached tokens"] = {length for length in past if length.is_Integer}
    for what, values in lengths.items():
        if len(values) > 1:
            return f"the layers differ in the number of {what}: {', '.join(sorted(map(str, values)))}"
    return None


def require_unchanged(sites: list[AttentionSite]) -> None:
    """Raise ValueError if new keys or values are written in place after ``cat`` copied them: they are read later now."""
    order = {node: i for i, node in enumerate(sites[0].node.graph.nodes)}
    writes = [node for node in order if mutated_argument(node) is not None]
    for site in sites:
        for new, joined in ((site.key_new, site.key_cache), (site.value_new, site.value_cache)):
            for write in writes:
                if order[joined] < order[write] < order[site.node] and (
                    memory_owner(mutated_argument(write)) is memory_owner(new)
                ):
                    raise ValueError(f"{new.name} is written in place after it was added to the cache ({write.name})")


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


def static_sizes(
    graph: fx.Graph, sites: list[AttentionSite], inputs: list[fx.Node]
) -> tuple[int, Callable[[list], int]]:
    """(index of the input that counts the cached tokens of layer 0, reader of the capacity) of a static cache.

    Raises ValueError unless that counter is, for every layer, the position of the first new token.
    """
    expressions = IndexExpressions(graph)
    capacity = sites[0].key_cache.meta["example_value"].shape[2]
    read = size_reader(capacity, inputs)
    if read is None:
        raise ValueError("no input of the graph shows the capacity of the static cache")
    try:
        starts = {expressions.of(site.position).at((sympy.S.Zero,)): site for site in sites}
    except NotAnExpression as error:
        raise ValueError(f"the position in the static cache is computed in an unknown way ({error})") from None
    if len(starts) > 1:
        raise ValueError(
            f"the layers write at different positions of their static caches: {', '.join(map(str, starts))}"
        )
    (start,) = starts
    counter = expressions.loads.get(start.tensor_name) if isinstance(start, Load) else None
    if counter is None or counter not in inputs or any(size != 1 for size in shape_of(counter)):
        raise ValueError(f"the position in the static cache is {start}, not the value of one counter")
    return inputs.index(counter), read
