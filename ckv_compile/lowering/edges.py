"""Edges of a new token on CUDA: a split kernel over its attended positions keeps the best, a merge joins the splits."""

from __future__ import annotations

from typing import Any

import torch

from ckv_compile.lowering.sparse_attention import keys_per_block, num_splits
from ckv_compile.lowering.template_call import Config, Template, empty, fixed, next_power_of_2

NO_ENTRY = -(2**63 - 1)  # below every entry of a list

split = Template("edges", lambda meta: (meta["SPLITS"], meta["BATCH"] * meta["LISTS"], 1), "attended")
merge = Template("merge_edges", lambda meta: (meta["BATCH"] * meta["LISTS"], 1, 1))


def configs(dtype: torch.dtype, dim: int, kept: int) -> list[Config]:
    """Blocks of 64 keys; fewer where their bytes would not fit the registers, but as many as are kept."""
    block = max(kept, keys_per_block(dtype, dim))
    return [
        {"BLOCK_N": block, "STAGES": stages, "num_warps": warps, "num_stages": stages}
        for stages, warps in ((1, 4), (2, 4), (1, 8))
    ]


def merge_configs() -> list[Config]:
    return [{"num_warps": 4, "num_stages": 1}]


def split_constants(
    batch: int, heads: int, kv_heads: int, dim: int, graphs: int, budget: int, sinks: int, window: int,
    kappa: int, scale: float | None,
) -> dict[str, Any]:  # fmt: skip
    """The split kernel's constants. heads: query heads; scale: of their scores, None for cosines of keys."""
    keys = scale is None
    lists = graphs if keys else max(graphs, kv_heads)
    return {
        "KEYS": keys, "BATCH": batch, "LISTS": lists, "GRAPHS": graphs, "KV_HEADS": kv_heads,
        "HEADS": 1 if keys else heads // lists, "PARTS": kv_heads // lists if keys else 1, "D": dim,
        "BLOCK_D": max(16, next_power_of_2(dim)), "BLOCK_H": 1 if keys else max(16, next_power_of_2(heads // lists)),
        "BUDGET": budget, "SM_SCALE": scale or 1.0, "SPLITS": num_splits(batch * lists), "SINKS": sinks,
        "WINDOW": window, "KEPT": max(2, next_power_of_2(kappa)), "NO_ENTRY": NO_ENTRY,
    }  # fmt: skip


def merge_constants(constants: dict[str, Any], kappa: int) -> dict[str, Any]:
    """The merge kernel's constants, from the split kernel's; its lists are edge lists."""
    same = {name: constants[name] for name in ("KEYS", "BATCH", "SPLITS", "KEPT", "NO_ENTRY")}
    return {**same, "LISTS": constants["LISTS"] * constants["HEADS"], "KAPPA": kappa}


def lower_edges(query: Any | None, key: Any, others: list[Any], constants: dict[str, Any], kappa: int) -> list[Any]:
    """Nodes of neighbor int32 and weight float32 [B, edge lists, kappa]; others: tokens ... first of the operator."""
    device, batch, splits, kept = key.get_device(), constants["BATCH"], constants["SPLITS"], constants["KEPT"]
    lists = constants["LISTS"] * constants["HEADS"]
    queries = [] if query is None else [query]
    statistics = [empty([batch, splits, lists], torch.float32, device) for _ in range(2 * len(queries))]
    entries = split(
        [*fixed(*queries, key, *others), *statistics], ([batch, splits, lists, kept], torch.int64), statistics,
        constants, configs(key.get_dtype(), constants["D"], kept),
    )  # fmt: skip
    weight = empty([batch, lists, kappa], torch.float32, device)
    neighbor = merge(
        [*fixed(entries), *statistics, weight], ([batch, lists, kappa], torch.int32), [weight],
        merge_constants(constants, kappa), merge_configs(),
    )  # fmt: skip
    return [neighbor, weight]
