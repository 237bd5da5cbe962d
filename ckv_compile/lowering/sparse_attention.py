"""``ckv::sparse_attention`` on CUDA: a split kernel over sinks, retrieved tokens and tail, and a merge of the splits."""

from __future__ import annotations

from typing import Any

import torch

from ckv_compile.lowering.attend_summaries import Summaries, lower_summaries
from ckv_compile.lowering.edges import Edges, edge_constants, keys_per_block, num_splits
from ckv_compile.lowering.example_inputs import makers
from ckv_compile.lowering.template_call import Config, Template, empty, fixed, lowers, next_power_of_2, static_size

attend = Template(
    "sparse_attention", lambda meta: (meta["SPLITS"], meta["BATCH"] * meta["LISTS"], 1), "attended", "edge_entries"
)
merge = Template("merge_splits", lambda meta: (meta["BATCH"] * meta["HEADS"], 1, 1))


def configs(dtype: torch.dtype, dim: int, rows: int = 0, kept: int = 0) -> list[Config]:
    """Blocks of 64 keys, of a list and of the tail, and the next one fetched ahead.

    Half as many of a list, the second fetched ahead, take 0.8 us of 27 less on an H200 (4,096 tokens, one row), but 96
    registers: no longer are all programs resident at once, and a layer without an index, 131k keys, takes 143 us, not 134.

    Fewer where their bytes would not fit the registers, of which exact products need more. Several queries per head make
    many ``rows`` (0: one query): they get more warps, for each has its sums in registers. Programs that keep edges (0:
    none) read smaller blocks, but of at least as many keys: four of them then still have room on a multiprocessor.
    """
    least = 8 if dtype.itemsize == 4 or rows > 32 else 4
    block = keys_per_block(dtype, dim)
    shapes: tuple[tuple[int, int, int, int], ...] = (
        (1, 2, 2, 4),
        (2, 2, 2, 4),
        (2, 1, 2, 4),
        (1, 1, 2, 4),
        (1, 2, 3, 4),
        (1, 1, 2, 8),
    )
    # Otherwise ptxas spills a few bytes, on sm_80 and on sm_100.
    if dtype.itemsize == 4 and rows > 32:
        least, block, shapes = 16, 16, ((1, 1, 2, 16), *shapes)
    elif dtype.itemsize * dim <= 128:
        shapes = ((1, 3, 2, 4), *shapes)
    if kept:
        block = max(kept, 16 if dtype.itemsize == 4 else 32)
        shapes = ((1, 2, 2, 8), (1, 1, 2, 8), (1, 1, 1, 4), (1, 1, 2, 4))
        if dtype.itemsize * dim <= 256:
            shapes = ((1, 1, 1, 4), (1, 1, 2, 4), (1, 1, 2, 8))
    return [
        {
            "BLOCK_N": block,
            "LIST_N": max(16, block // parts),
            "LIST_STAGES": lists,
            "TAIL_STAGES": tail,
            "num_warps": max(least, warps),
            "num_stages": tail,
        }
        for parts, lists, tail, warps in shapes
    ]


@lowers(torch.ops.ckv.sparse_attention.default)
def sparse_attention(
    query: Any, key: Any, value: Any, tokens: Any, count: Any, n_indexed: Any, capacity: Any, length: Any,
    first: Any, sink_logits: Any | None, layer: int, scale: float, num_sink_tokens: int, recent_window: int,
    *described: Any,
) -> Any:  # fmt: skip
    others = [tokens, count, n_indexed, capacity, length, first]
    summaries = Summaries.of(described)
    return lower_attention(
        query, key, value, others, sink_logits, scale, num_sink_tokens, recent_window, summaries=summaries
    )


def lower_attention(
    query: Any, key: Any, value: Any, others: list[Any], sink_logits: Any | None, scale: float, sinks: int, window: int,
    edges: Edges | None = None, summaries: Summaries | None = None,
) -> Any:  # fmt: skip
    """The node of the output. others: tokens ... first of the operator. edges: to store besides. summaries: to attend."""
    device = query.get_device()
    batch, heads, queries, dim = static_size(query)
    _, graphs, budget = static_size(others[0])
    kv_heads, value_dim = static_size(key)[1], static_size(value)[3]
    attends = attend_constants(batch, heads, kv_heads, dim, value_dim, scale, graphs, budget, sinks, window, queries)
    extra = [] if summaries is None else lower_summaries(query, value, others[3], others[4], summaries, attends)
    if edges is not None and not edges.stored:
        attends |= edge_constants(edges.keys, edges.kappa, attends)
    splits, rows = attends["SPLITS"], heads * queries
    top = empty([batch, splits, rows], torch.float32, device)
    mass = empty([batch, splits, rows], torch.float32, device)
    written = [top, mass]
    if edges is not None and not edges.stored:
        written += fixed(edges.candidate, edges.score, edges.rest, edges.new_key)
    total = attend(
        [*fixed(query, key, value, *others), *written], ([batch, splits, rows, value_dim], torch.float32), written,
        attends,
        configs(
            query.get_dtype(), max(dim, value_dim), attends["BLOCK_H"] if queries > 1 else 0, attends.get("KEPT", 0)
        ),
        makers(batch, graphs, kv_heads * dim, 1, budget),
    )  # fmt: skip
    logits = [] if sink_logits is None else fixed(sink_logits)
    merges = merge_constants(batch, heads, value_dim, splits, queries, has_sinks=bool(logits))
    inputs, written = [*fixed(total), top, mass, *logits], []
    if edges is not None and not edges.keys:
        merges["EDGES"] = True
        written = fixed(edges.norm)
        inputs += [*fixed(others[3]), *written]
    if summaries is not None:
        merges["SUMMARIES"] = static_size(summaries.ids)[2]
        inputs += extra
    out = ([batch, heads, queries, value_dim], query.get_dtype())
    return merge(inputs, out, written, merges, merge_configs(merges))


def attend_constants(
    batch: int, heads: int, kv_heads: int, dim: int, value_dim: int, scale: float, graphs: int, budget: int,
    sinks: int, window: int, queries: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """The split kernel's constants; where there are more graphs than KV heads, or fewer, the larger number of lists.

    A query head counts once for each of its queries.
    """
    lists = max(graphs, kv_heads)
    rows = heads * queries // lists
    return {
        "BATCH": batch,
        "LISTS": lists,
        "GRAPHS": graphs,
        "KV_HEADS": kv_heads,
        "HEADS": rows,
        "QUERIES": queries,
        "D": dim,
        "DV": value_dim,
        "BLOCK_D": max(16, next_power_of_2(dim)),
        "BLOCK_DV": max(16, next_power_of_2(value_dim)),
        "BLOCK_H": max(16, next_power_of_2(rows)),
        "BUDGET": budget,
        "SM_SCALE": scale,
        "SPLITS": num_splits(batch * lists),
        "SINKS": sinks,
        "WINDOW": window,
    }


def merge_configs(merges: dict[str, Any]) -> list[Config]:
    """Two warps hold all splits of a head of 128 channels."""
    return [{"num_warps": max(2, merges["BLOCK_S"] * merges["BLOCK_DV"] // 4096), "num_stages": 1}]


def merge_constants(
    batch: int, heads: int, value_dim: int, splits: int, queries: int = 1, *, has_sinks: bool
) -> dict[str, Any]:
    return {
        "BATCH": batch,
        "HEADS": heads * queries,
        "QUERIES": queries,
        "SPLITS": splits,
        "DV": value_dim,
        "BLOCK_S": next_power_of_2(splits),
        "HAS_SINKS": has_sinks,
        "BLOCK_DV": max(16, next_power_of_2(value_dim)),
    }
