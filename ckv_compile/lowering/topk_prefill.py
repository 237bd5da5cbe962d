"""``ckv::topk_prefill`` on CUDA: attention that keeps the best cells of every row, and a kernel that looks into them."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import fallback_handler, permute, register_lowering
from torch._inductor.virtualized import V

from ckv_compile.lowering.edges import NO_ENTRY
from ckv_compile.lowering.template_call import Config, Template, empty, fixed, next_power_of_2

_op = torch.ops.ckv.topk_prefill.default
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LEAST_KAPPA, MOST_KAPPA = 2, 32

PROGRAMS = 64  # of a KV head, which share its doubtful rows

# A program per block of queries, query head and row; then one per few queries; then a fixed number per KV head.
attend = Template(
    "topk_prefill", sized_grid=lambda sizes, meta, cdiv: (cdiv(sizes[1], meta["BLOCK_M"]), meta["HEADS"], sizes[0])
)
repair = Template("topk_repair", sized_grid=lambda sizes, meta, cdiv: (sizes[2], sizes[1], sizes[0]))
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


def depth_of(kappa: int, *, exact: bool) -> int:
    """Cells that each column keeps. The best kappa cells fall on columns at random: few must have to drop one of them.

    Measured on normal data with kappa 8: "fast" loses 0.04 % of the probability, "exact" repairs 0.2 % of the rows.
    """
    fast = 2 if kappa <= 8 else 3 if kappa <= 16 else 4
    return fast + 2 if exact and kappa > 4 else fast + exact


def attend_config(dtype: torch.dtype, dim: int, kappa: int, exact: bool, architecture: int = 9) -> Config:
    """As large blocks as fit the registers with scores, output and queues: 128 queries and keys on Hopper.

    architecture: the major number of the device's capability.
    """
    if dtype.itemsize == 4:
        rows, keys, stages = 32, 32, 2
    elif architecture != 9:
        rows = 32 if exact and kappa > 16 else 64
        keys, stages = (64 if dim <= 128 and kappa <= 16 else 32), 2
    elif dim > 128:
        rows, keys, stages = 64, 64, 2
    elif kappa > 16:
        rows, keys, stages = 64, 32 if exact else 64, 3
    elif kappa > 8:
        rows, keys, stages = 128, 64, 3
    else:
        rows, keys, stages = 128, 128, 3
    return {
        "BLOCK_M": rows, "BLOCK_N": keys, "GROUPS": 32, "DEPTH": depth_of(kappa, exact=exact), "num_warps": 8,
        "num_stages": stages,
    }  # fmt: skip


def look_up_constants(constants: dict[str, Any]) -> dict[str, Any]:
    """The second kernel's constants, from the first one's with its configuration."""
    names = ("HEADS", "KV_HEADS", "D", "BLOCK_D", "SM_SCALE", "SINKS", "KAPPA", "BLOCK_K", "EXACT", "BLOCK_N", "GROUPS")
    return {name: constants[name] for name in names}


def look_up_config(constants: dict[str, Any]) -> Config:
    """A row per warp, where the keys of its candidates fit the registers."""
    candidates = constants["BLOCK_K"] * constants["BLOCK_N"] // constants["GROUPS"]
    rows = max(1, min(4, (1 << 14) // (candidates * constants["BLOCK_D"])))
    return {"ROWS": rows, "num_warps": 4, "num_stages": 1}


def repair_constants(constants: dict[str, Any]) -> dict[str, Any]:
    """The third kernel's constants, from the second one's."""
    names = ("HEADS", "KV_HEADS", "D", "BLOCK_D", "SM_SCALE", "SINKS", "KAPPA", "BLOCK_K")
    return {**{name: constants[name] for name in names}, "NO_ENTRY": NO_ENTRY, "PROGRAMS": PROGRAMS}


def repair_config(dtype: torch.dtype, dim: int, kappa: int, architecture: int = 9) -> Config:
    """Few rows and many keys at a time: there are few doubtful rows, so that one program's way through all keys is the cost.

    8 query heads of 32,768 tokens on an H200: 0.1 to 0.4 ms, where blocks of 64 rows and 64 keys take 0.8.
    """
    wide = dtype.itemsize == 4 or dim > 128 or kappa > 16
    keys = 64 if wide else 256 if architecture >= 9 else 128
    return {"BLOCK_M": 16, "BLOCK_N": keys, "num_warps": 8 if keys == 256 else 4, "num_stages": 2}


@register_lowering(_op, type_promotion_kind=None)
def topk_prefill(
    query: Any, key: Any, value: Any, length: Any, first: Any, ticket: Any, scale: float, num_sink_tokens: int, kappa: int,
    sink_logits: Any | None, topk: str = "fast",
) -> list[Any]:  # fmt: skip
    if not _applies(query, key, value, kappa):
        return fallback_handler(_op)(
            query, key, value, length, first, ticket, scale, num_sink_tokens, kappa, sink_logits, topk
        )
    device, dtype = query.get_device(), query.get_dtype()
    batch, _, queries, _ = query.get_size()  # may be symbols
    (heads, dim), (kv_heads, value_dim) = _static(query, 1, 3), (*_static(key, 1), *_static(value, 3))
    query, key, value = fixed(query, key, value)
    length, first = (on_device(node, device) for node in fixed(length, first))
    constants = attend_constants(
        heads, kv_heads, dim, value_dim, scale, num_sink_tokens, kappa, exact=topk == "exact",
        has_sinks=sink_logits is not None, tma=has_tma(device) and all(fits_tma(node) for node in (key, value)),
    )  # fmt: skip
    architecture = architecture_of(device)
    config = attend_config(dtype, max(dim, value_dim), kappa, topk == "exact", architecture)
    lists = [batch, heads, queries, kappa]
    cell, weight = empty(lists, torch.int32, device), empty(lists, torch.float32, device)
    sinks = [] if sink_logits is None else fixed(sink_logits)
    exact = []
    if topk == "exact":
        doubtful = empty([batch, kv_heads, heads // kv_heads * queries], torch.int32, device)
        exact = [doubtful, empty([batch, kv_heads], torch.int32, device)]
    out = attend(
        [query, key, value, length, first, *sinks, cell, weight, *exact[1:]],
        ([batch, queries, heads, value_dim], dtype), [cell, weight, *exact[1:]], constants, [config],
    )  # fmt: skip
    looks = look_up_constants({**constants, **config})
    neighbor = look_up(
        [query, key, length, first, *fixed(cell), weight, *exact], (lists, torch.int32), [weight, *exact], looks,
        [look_up_config(looks)],
    )  # fmt: skip
    if topk == "exact":
        listed = fixed(neighbor)
        repair(
            [query, key, length, first, *exact, *listed, weight], ([batch, kv_heads, PROGRAMS], torch.int32),
            [*listed, weight], repair_constants(looks), [repair_config(dtype, dim, kappa, architecture)],
        )  # fmt: skip
    return [permute(out, [0, 2, 1, 3]), neighbor, weight]


def _applies(query: Any, key: Any, value: Any, kappa: int) -> bool:
    (dim,), (value_dim,) = _static(query, 3), _static(value, 3)
    return (
        query.get_device().type == "cuda"
        and query.get_dtype() in DTYPES
        and max(dim, value_dim) <= most_dim(query.get_dtype())
        and LEAST_KAPPA <= kappa <= MOST_KAPPA
    )


def most_dim(dtype: torch.dtype) -> int:
    """The widest heads that fit the registers."""
    return 128 if dtype.itemsize == 4 else 256


def _static(node: Any, *dimensions: int) -> list[int]:
    sizes = node.get_size()
    return [V.graph.sizevars.guard_int(sizes[dimension]) for dimension in dimensions]


def architecture_of(device: torch.device) -> int:
    """The major number of the device's capability; Hopper's for a host, which interprets kernels."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9


def has_tma(device: torch.device) -> bool:
    """Whether the device has the copy engine of Hopper and later."""
    return device.type == "cuda" and architecture_of(device) >= 9


def fits_tma(node: Any) -> bool:
    """Whether a cache can be read by the copy engine: rows of 16 bytes, whatever the sizes are."""
    *outer, last = node.get_stride()
    per_16 = 16 // node.get_dtype().itemsize
    multiple = V.graph.sizevars.statically_known_multiple_of
    return V.graph.sizevars.statically_known_equals(last, 1) and all(
        multiple(number, per_16) for number in (*outer, node.get_size()[3], node.get_layout().offset)
    )


def on_device(node: Any, device: torch.device) -> Any:
    """A host tensor of the graph's arguments on the device: copied once per graph, and nobody waits for it."""
    if node.get_device() == device:
        return node
    copies = V.graph.__dict__.setdefault("ckv_device_copies", {})
    name = node.get_name()
    if name not in copies:
        (copies[name],) = fixed(ir.TensorBox.create(ir.DeviceCopy.create(node, device, True)))
    return copies[name]
