"""``ckv::sparse_attention`` on CUDA: a split kernel over sinks, retrieved tokens and tail, and a merge of the splits."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.lowering import fallback_handler, register_lowering

from ckv_compile.lowering.example_inputs import makers
from ckv_compile.lowering.template_call import Config, Template, empty, fixed, next_power_of_2, static_size

_op = torch.ops.ckv.sparse_attention.default

attend = Template("sparse_attention", lambda meta: (meta["SPLITS"], meta["BATCH"] * meta["LISTS"], 1), "attended")
merge = Template("merge_splits", lambda meta: (meta["BATCH"] * meta["HEADS"], 1, 1))


def keys_per_block(dtype: torch.dtype, dim: int) -> int:
    """Keys that are read at a time: fewer where their bytes would not fit the registers."""
    return 64 if dtype.itemsize * dim <= 256 else 32 if dtype.itemsize * dim <= 512 else 16


def configs(dtype: torch.dtype, dim: int, rows: int = 0) -> list[Config]:
    """Blocks of 64 keys; fewer where their bytes would not fit the registers, of which exact products need more.

    Several queries per head make many ``rows`` (0: one query): they get more warps, for each has its sums in registers.
    """
    least = 8 if dtype.itemsize == 4 or rows > 32 else 4
    block = keys_per_block(dtype, dim)
    if dtype.itemsize == 4 and rows > 32:
        least, block = 16, 16
    return [
        {
            "BLOCK_N": block,
            "LIST_STAGES": lists,
            "TAIL_STAGES": tail,
            "num_warps": max(least, warps),
            "num_stages": tail,
        }
        for lists, tail, warps in ((1, 2, 4), (2, 2, 4), (1, 3, 4), (1, 2, 8))
    ]


def num_splits(lists: int) -> int:
    """Programs that share a list: a batch of one fills the device, a large one needs no more than a few each."""
    return max(8, min(64, next_power_of_2(512 // lists)))


@register_lowering(_op, type_promotion_kind=None)
def sparse_attention(
    query: Any, key: Any, value: Any, tokens: Any, count: Any, n_indexed: Any, capacity: Any, length: Any,
    first: Any, sink_logits: Any | None, layer: int, scale: float, num_sink_tokens: int, recent_window: int,
) -> Any:  # fmt: skip
    device = query.get_device()
    if device.type != "cuda":
        return fallback_handler(_op)(
            query, key, value, tokens, count, n_indexed, capacity, length, first, sink_logits, layer, scale, num_sink_tokens,
            recent_window,
        )  # fmt: skip
    batch, heads, queries, dim = static_size(query)
    _, graphs, budget = static_size(tokens)
    kv_heads, value_dim = static_size(key)[1], static_size(value)[3]
    attends = attend_constants(
        batch, heads, kv_heads, dim, value_dim, scale, graphs, budget, num_sink_tokens, recent_window, queries
    )
    splits = attends["SPLITS"]
    rows = heads * queries
    top = empty([batch, splits, rows], torch.float32, device)
    mass = empty([batch, splits, rows], torch.float32, device)
    inputs = [*fixed(query, key, value, tokens, count, n_indexed, capacity, length, first), top, mass]
    total = attend(
        inputs, ([batch, splits, rows, value_dim], torch.float32), [top, mass], attends,
        configs(query.get_dtype(), max(dim, value_dim), attends["BLOCK_H"] if queries > 1 else 0),
        makers(batch, graphs, 1, 1, budget),
    )  # fmt: skip
    sinks = [] if sink_logits is None else fixed(sink_logits)
    merges = merge_constants(batch, heads, value_dim, splits, queries, has_sinks=bool(sinks))
    out = ([batch, heads, queries, value_dim], query.get_dtype())
    return merge([*fixed(total), top, mass, *sinks], out, [], merges, [{"num_warps": 4, "num_stages": 1}])


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
