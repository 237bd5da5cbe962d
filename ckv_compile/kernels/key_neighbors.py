"""``ckv::key_neighbors`` on CUDA: a kernel that measures the keys and one that compares them.

The operator is called between graphs, not in them, so its kernels are launched here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ckv_compile.kernels.prefill_attention import reads_by_rows
from ckv_compile.lowering.template_call import Config, next_power_of_2
from ckv_compile.lowering.topk_prefill import has_tma
from ckv_compile.rendered import cached_kernel
from ckv_compile.runtime.transfer import to_device

MOST_KAPPA, GROUPS, PLACE_BITS = 16, 8, 10
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def applies(key: Tensor, block_size: int, kappa: int, *, join_heads: bool) -> bool:
    """Whether the kernel does it: places in a block must fit beside cosines of 22 bits."""
    return (
        not join_heads
        and key.dtype in DTYPES
        and key.shape[3] <= 256
        and kappa <= MOST_KAPPA
        and block_size <= GROUPS << PLACE_BITS
    )


def constants_of(heads: int, dim: int, sinks: int, kappa: int, *, tma: bool) -> dict[str, Any]:
    return {
        "HEADS": heads, "D": dim, "BLOCK_D": max(16, next_power_of_2(dim)), "SINKS": sinks, "KAPPA": kappa,
        "KEPT": max(2, next_power_of_2(kappa)), "GROUPS": GROUPS, "PLACE_BITS": PLACE_BITS, "TMA": tma,
    }  # fmt: skip


def length_constants(dim: int) -> dict[str, Any]:
    """Constants and configuration of the kernel that measures the keys."""
    block = max(16, next_power_of_2(dim))
    return {"D": dim, "BLOCK_D": block, "ROWS": (1 << 12) // block, "num_warps": 4, "num_stages": 1}


def configs(dtype: torch.dtype, dim: int) -> list[Config]:
    """Few warps per program, so that one sorts while another multiplies."""
    rows, keys = (16, 32) if dtype.itemsize == 4 else (64, 64)
    return [{"BLOCK_M": rows, "BLOCK_N": keys, "num_warps": 4, "num_stages": 2}]


def key_neighbors(
    key: Tensor, first: Tensor, start: int, stop: int, block_size: int, kappa: int, num_sink_tokens: int, **tuned: Any
) -> Tensor:
    """Neighbours as ``ckv::key_neighbors`` defines them, of all blocks at once. key: a view, nominal
    or not, of memory that holds ``stop`` tokens. tuned: changes the configuration.

    Nothing here waits for the device: ``first`` may be a host tensor.
    """
    batch, heads, _, dim = key.shape
    neighbor = torch.empty(batch, heads, stop - start, kappa, dtype=torch.int32, device=key.device)
    if start == stop:
        return neighbor
    constants = constants_of(heads, dim, num_sink_tokens, kappa, tma=has_tma(key.device) and reads_by_rows(key))
    constants |= {**configs(key.dtype, dim)[0], **tuned}
    tensors = {"KEY": key, "SPAN": _span((start, stop, block_size), first, key.device)}
    inverse = torch.empty(batch, heads, stop - start, dtype=torch.float32, device=key.device)
    lengths = length_constants(dim)
    cached_kernel("key_lengths", tuple(lengths.items()))(
        (-(-(stop - start) // lengths["ROWS"]), heads, batch), tensors, inverse
    )
    programs = -(-(stop - start) // block_size) * -(-block_size // constants["BLOCK_M"])
    grid = (programs, heads, batch)
    cached_kernel("key_neighbors", tuple(constants.items()))(grid, {**tensors, "INVERSE": inverse}, neighbor)
    return neighbor


_latest_span: tuple[Any, Tensor] = (None, torch.empty(0))


def _span(numbers: tuple[int, int, int], first: Tensor, device: torch.device) -> Tensor:
    """numbers, then first: int32 [3 + batch] on the device. As arguments they would be compiled in where they are 1 or
    multiples of 16. Layer after layer wants the same, which is copied once.
    """
    global _latest_span
    if first.is_cuda:
        return torch.cat([torch.tensor(numbers, dtype=torch.int32).to(device, non_blocking=True), first.int()])
    values = (*numbers, *first.tolist())
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
    known, span = _latest_span
    if known != (values, device, stream):
        span = to_device(np.array(values, np.int32), device)
        _latest_span = (values, device, stream), span
    return span
