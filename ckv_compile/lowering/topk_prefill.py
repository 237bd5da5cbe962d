"""``ckv::topk_prefill`` on CUDA: attention that keeps the best cells of every row, and a kernel that looks into them."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import fallback_handler, permute, register_lowering
from torch._inductor.virtualized import V

from ckv_compile.lowering.edges import NO_ENTRY
from ckv_compile.lowering.template_call import Config, Template, empty, fixed, next_power_of_2, static_size

_op = torch.ops.ckv.topk_prefill.default
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LEAST_KAPPA, MOST_KAPPA, MOST_DIM = 2, 32, 256

# A program per block of queries, query head and row; then one per few queries.
attend = Template(
    "topk_prefill", sized_grid=lambda sizes, meta, cdiv: (cdiv(sizes[1], meta["BLOCK_M"]), meta["HEADS"], sizes[0])
)
look_up = Template(
    "topk_neighbors", sized_grid=lambda sizes, meta, cdiv: (cdiv(sizes[2], meta["ROWS"]), meta["HEADS"], sizes[0])
)


def attend_constants(
    heads: int, kv_heads: int, dim: int, value_dim: int, scale: float, sinks: int, kappa: int, *, exact: bool,
    has_sinks: bool, tma: bool,
) -> dict[str, Any]:  # fmt: skip
    """The attention kernel's constants; kappa 0 is attention alone."""
    return {
        "HEADS": heads, "KV_HEADS": kv_heads, "D": dim, "DV": value_dim, "BLOCK_D": max(16, next_power_of_2(dim)),
        "BLOCK_DV": max(16, next_power_of_2(value_dim)), "SM_SCALE": scale, "SINKS": sinks, "KAPPA": kappa,
        "BLOCK_K": next_power_of_2(max(2, kappa)), "EXACT": exact, "HAS_SINKS": has_sinks, "TMA": tma,
    }  # fmt: skip


def columns(kappa: int, *, exact: bool) -> tuple[int, int]:
    """(GROUPS, DEPTH): columns of a block, and the cells that each keeps.

    The best kappa cells fall on columns at random: few columns must have to drop one of them.
    """
    if kappa <= 8:
        return 16, (4 if exact else 3) if kappa > 4 else (3 if exact else 2)
    return 32, (4 if exact else 3) if kappa <= 16 else (5 if exact else 4)


def attend_configs(dtype: torch.dtype, dim: int, kappa: int, *, exact: bool) -> list[Config]:
    """Blocks of 128 queries and keys where their scores, the output and the queues fit the registers."""
    groups, depth = columns(kappa, exact=exact)
    if dtype.itemsize == 4:
        tuned = [(64, 32, 8, 2), (32, 32, 4, 2)]
    elif dim > 128:
        tuned = [(64, 64, 8, 2), (128, 64, 8, 2)]
    elif kappa > 8:
        tuned = [(128, 64, 8, 3), (64, 64, 4, 3)]
    else:
        tuned = [(128, 128, 8, 3), (128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3)]
    return [
        {"BLOCK_M": rows, "BLOCK_N": keys, "GROUPS": groups, "DEPTH": depth, "num_warps": warps, "num_stages": stages}
        for rows, keys, warps, stages in tuned
    ]


def look_up_constants(constants: dict[str, Any]) -> dict[str, Any]:
    """The second kernel's constants, from the first one's with its configuration."""
    names = ("HEADS", "KV_HEADS", "D", "BLOCK_D", "SM_SCALE", "SINKS", "KAPPA", "BLOCK_K", "BLOCK_N", "GROUPS")
    return {**{name: constants[name] for name in names}, "NO_ENTRY": NO_ENTRY}


def look_up_configs(constants: dict[str, Any]) -> list[Config]:
    """Rows of which a program holds the keys of all candidates, some 16 KiB elements."""
    candidates = constants["BLOCK_K"] * constants["BLOCK_N"] // constants["GROUPS"]
    rows = max(1, (1 << 14) // (candidates * constants["BLOCK_D"]))
    return [{"ROWS": rows, "num_warps": 4, "num_stages": 1}]
