"""Edges of a new token on CUDA: the split kernel of sparse attention keeps the best, its merge joins the splits.

Cosines that are summed over KV heads belong to none of that kernel's programs and have a split kernel of their own.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ckv_compile.lowering.template_call import Config, Template, fixed, next_power_of_2, static_size

NO_ENTRY = -(2**63 - 1)  # below every entry of a list

template = Template("edges", lambda meta: (meta["SPLITS"], meta["BATCH"], 1), "attended", "edge_entries")


@dataclasses.dataclass
class Edges:
    """Nodes of the state that edges go to; ``entries`` are the best of every split where these are known already."""

    keys: bool  # cosines of keys; otherwise scores
    kappa: int
    new_neighbor: Any
    new_weight: Any
    new_key: Any
    entries: Any | None = None


def keys_per_block(dtype: torch.dtype, dim: int) -> int:
    """Keys that are read at a time: fewer where their bytes would not fit the registers."""
    return 64 if dtype.itemsize * dim <= 256 else 32 if dtype.itemsize * dim <= 512 else 16


def num_splits(lists: int) -> int:
    """Programs that share a list: a batch of one fills the device, a large one needs no more than a few each."""
    return max(8, min(64, next_power_of_2(512 // lists)))


def _kept(keys: bool, kappa: int) -> dict[str, Any]:
    return {"EDGES": True, "KEYS": keys, "KEPT": max(2, next_power_of_2(kappa)), "NO_ENTRY": NO_ENTRY}


def edge_constants(keys: bool, kappa: int, attends: dict[str, Any]) -> dict[str, Any]:
    """What the split kernel of sparse attention, with constants ``attends``, has besides or otherwise.

    The new key takes a row behind the queries.
    """
    heads = 1 if keys else attends["HEADS"]
    return {
        **_kept(keys, kappa), "EDGE_HEADS": heads, "EDGE_ROWS": next_power_of_2(heads), "SPLITS": attends["SPLITS"] // 2,
        "BLOCK_H": max(16, next_power_of_2(attends["HEADS"] + keys)),
    }  # fmt: skip


def edge_merge_constants(keys: bool, kappa: int, splits: int, lists: int) -> dict[str, Any]:
    """What the merge of sparse attention has besides, for edge lists in that many splits."""
    return {**_kept(keys, kappa), "KAPPA": kappa, "EDGE_SPLITS": splits, "EDGE_LISTS": lists}


def configs(dtype: torch.dtype, dim: int, kept: int) -> list[Config]:
    """Blocks of 64 keys; fewer where their bytes would not fit the registers, but as many as are kept."""
    block = max(kept, keys_per_block(dtype, dim))
    return [
        {"BLOCK_N": block, "STAGES": stages, "num_warps": warps, "num_stages": stages}
        for stages, warps in ((1, 8), (2, 8), (1, 4))
    ]


def constants_of(
    batch: int, kv_heads: int, dim: int, budget: int, sinks: int, window: int, kappa: int
) -> dict[str, Any]:
    """The constants of the kernel for cosines that are summed over KV heads."""
    return {
        "BATCH": batch, "KV_HEADS": kv_heads, "D": dim, "BLOCK_D": max(16, next_power_of_2(dim)), "BUDGET": budget,
        "SPLITS": num_splits(batch), "SINKS": sinks, "WINDOW": window, **_kept(True, kappa),
    }  # fmt: skip


def lower_layer_edges(key: Any, others: list[Any], new_key: Any, sinks: int, window: int, kappa: int) -> Any:
    """Node of the best entries int64 [B, splits, 1, KEPT]; others: tokens ... first of the operator."""
    batch, kv_heads, _, dim = static_size(key)
    constants = constants_of(batch, kv_heads, dim, static_size(others[0])[2], sinks, window, kappa)
    size = [batch, constants["SPLITS"], 1, constants["KEPT"]]
    written = fixed(new_key)
    tuned = configs(key.get_dtype(), dim, constants["KEPT"])
    return template([*fixed(key, *others), *written], (size, torch.int64), written, constants, tuned)
