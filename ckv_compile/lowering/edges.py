"""Edges of a new token on CUDA: the split kernel of sparse attention keeps the scores, or the best of a long tail.

Cosines that are summed over KV heads belong to none of that kernel's programs and have a split kernel of their own.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ckv_compile.index_layout import CANDIDATE_PARTS, candidate_slots, rest_slots
from ckv_compile.lowering.template_call import Config, Template, fixed, next_power_of_2, static_size

NO_ENTRY = -(2**63 - 1)  # below every entry of a list

template = Template("edges", lambda meta: (meta["SPLITS"], meta["BATCH"], 1), "attended", "edge_entries")


@dataclasses.dataclass
class Edges:
    """Nodes of the state that candidates go to; ``stored``: they are there already."""

    keys: bool  # cosines of keys; otherwise scores
    kappa: int
    candidate: Any
    score: Any
    rest: Any
    norm: Any
    new_key: Any
    stored: bool = False


def keys_per_block(dtype: torch.dtype, dim: int) -> int:
    """Keys that are read at a time: fewer where their bytes would not fit the registers."""
    return 64 if dtype.itemsize * dim <= 256 else 32 if dtype.itemsize * dim <= 512 else 16


def num_splits(lists: int) -> int:
    """Programs that share a list: a batch of one fills the device, a large one needs no more than a few each."""
    return max(8, min(CANDIDATE_PARTS, next_power_of_2(512 // lists)))


def kept_constants(keys: bool, kappa: int) -> dict[str, Any]:
    """What every kernel has that handles entries."""
    return {"EDGES": True, "KEYS": keys, "KEPT": rest_slots(kappa) // CANDIDATE_PARTS, "NO_ENTRY": NO_ENTRY}


def edge_constants(keys: bool, kappa: int, attends: dict[str, Any]) -> dict[str, Any]:
    """What the split kernel of sparse attention, with constants ``attends``, has besides or otherwise.

    The new key takes a row behind the queries.
    """
    heads = 1 if keys else attends["HEADS"]
    slots = candidate_slots(attends["BUDGET"], attends["SINKS"])
    return {
        **kept_constants(keys, kappa), "EDGE_HEADS": heads, "EDGE_ROWS": next_power_of_2(heads),
        "BLOCK_H": max(16, next_power_of_2(attends["HEADS"] + keys)), "SLOTS": slots, "PARTS": CANDIDATE_PARTS,
        "TAIL": slots - attends["BUDGET"] - attends["SINKS"],
    }  # fmt: skip


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
        "SPLITS": num_splits(batch), "SINKS": sinks, "WINDOW": window, **kept_constants(True, kappa),
        "PARTS": CANDIDATE_PARTS, "SLOTS": candidate_slots(budget, sinks),
    }  # fmt: skip


def store_layer_edges(key: Any, others: list[Any], edges: Edges, sinks: int, window: int) -> None:
    """Candidates by cosines that are summed over KV heads; others: tokens ... first of the operator."""
    batch, kv_heads, _, dim = static_size(key)
    constants = constants_of(batch, kv_heads, dim, static_size(others[0])[2], sinks, window, edges.kappa)
    written = fixed(edges.candidate, edges.score, edges.rest, edges.new_key)
    tuned = configs(key.get_dtype(), dim, constants["KEPT"])
    template([*fixed(key, *others), *written], ([batch, constants["SPLITS"]], torch.int32), written, constants, tuned)
    edges.stored = True
