"""``ckv::grouped_linear`` on CUDA: one kernel for a few rows of input and up to four matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import fallback_handler, register_lowering, view

from ckv_compile.lowering.template_call import Config, Template, fixed, next_power_of_2, static_size

_op = torch.ops.ckv.grouped_linear.default
MOST_ROWS, MOST_MATRICES = 16, 4
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def programs(constants: dict[str, Any]) -> int:
    return sum(math.ceil(constants[f"N{i}"] / constants["BLOCK_N"]) for i in range(constants["MATRICES"]))


template = Template("grouped_linear", lambda meta: (programs(meta), 1, 1))


def configs(rows: int, channels: int, dtype: torch.dtype, major: int = 9) -> list[Config]:
    """A vector's warps lie side by side along K, so that the input is loaded in the layout of the weights.

    major: compute capability of the device; what is fastest on 9.0 spills a register on 8.0.
    """
    widest = max(16, next_power_of_2(channels))
    if rows == 1:
        lane = 16 // dtype.itemsize  # of one load of 16 bytes
        tuned = [
            (block, lane * 32 * warps, stages, unroll, warps)
            for block, warps, stages, unroll in (
                (2, 4, 1, 2), (8, 2, 3, 1), (4, 4, 3, 1), (4, 4, 1, 1), (4, 4, 1, 2), (8, 4, 1, 1), (4, 2, 1, 2),
                (4, 8, 1, 1), (8, 2, 1, 1), (4, 1, 1, 4),
            )
        ]  # fmt: skip
    else:
        shapes = [(16, 512, 4, 2), (32, 512, 4, 4), (16, 512, 4, 4), (16, 256, 6, 2), (32, 256, 5, 4), (16, 1024, 3, 4)]
        tuned = [
            (block, wide // dtype.itemsize, stages, 1, warps)
            for block, wide, stages, warps in (shapes if major >= 9 else shapes[2:])
        ]
    return [
        {"BLOCK_N": block, "BLOCK_K": min(widest, wide), "STAGES": stages, "UNROLL": unroll, "num_warps": warps,
         "num_stages": stages}
        for block, wide, stages, unroll, warps in tuned
    ]  # fmt: skip


@register_lowering(_op, type_promotion_kind=None)
def grouped_linear(input: Any, weights: Sequence[Any], biases: Sequence[Any | None]) -> Any:
    sizes = [static_size(weight)[0] for weight in weights]
    *lead, channels = static_size(input)
    if not _applies(input, weights, math.prod(lead)):
        return fallback_handler(_op)(input, weights, biases)
    rows = math.prod(lead)
    given = [bias for bias in biases if bias is not None]
    beside = [ir.ExternKernel.require_contiguous(node) for node in (view(input, [rows, channels]), *given)]
    row, *given = fixed(*beside)
    inputs = [row, *fixed(*weights), *given]
    constants = constants_of(rows, channels, sizes, [bias is not None for bias in biases])
    dtype = input.get_dtype()
    tuned = configs(rows, channels, dtype, torch.cuda.get_device_capability(input.get_device())[0])
    out = template(inputs, ([rows, sum(sizes)], dtype), [], constants, tuned)
    return view(out, [*lead, sum(sizes)])


def _applies(input: Any, weights: Sequence[Any], rows: int) -> bool:
    return (
        input.get_device().type == "cuda"
        and 1 <= rows <= MOST_ROWS
        and len(weights) <= MOST_MATRICES
        and input.get_dtype() in DTYPES
        and all(weight.get_dtype() == input.get_dtype() for weight in weights)
        and all(ir.is_contiguous_storage_and_layout(weight) for weight in weights)
    )


def constants_of(rows: int, channels: int, sizes: Sequence[int], biased: Sequence[bool]) -> dict[str, Any]:
    padded = [*sizes, 0, 0, 0, 0]
    return {
        "M": rows, "K": channels, "MATRICES": len(sizes), "N0": padded[0], "N1": padded[1], "N2": padded[2],
        "N3": padded[3], "BIASED": sum(given << number for number, given in enumerate(biased)),
    }  # fmt: skip
