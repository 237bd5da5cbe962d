"""``ckv::prefill_attention`` on CUDA: torch's kernels for a first prompt, ``topk_prefill`` without lists for the rest.

torch's causal kernels know neither tokens before the queries nor padding nor learned sinks; masks would cost more than the
attention. Nothing here waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ckv_compile.lowering.topk_prefill import (
    DTYPES,
    architecture_of,
    attend_config,
    attend_constants,
    has_tma,
    most_dim,
)
from ckv_compile.rendered import cached_kernel


def applies(query: Tensor, value: Tensor, length: Tensor, first: Tensor, sink_logits: Tensor | None) -> bool:
    """Whether our kernel does it: not where host tensors say that torch's own is enough."""
    if query.dtype not in DTYPES or max(query.shape[3], value.shape[3]) > most_dim(query.dtype):
        return False
    if sink_logits is not None or length.device.type != "cpu" or first.device.type != "cpu":
        return True
    return query.shape[2] > 1 and bool(length.ne(0).any() or first.ne(0).any())


def prefill_attention(
    query: Tensor, key: Tensor, value: Tensor, length: Tensor, first: Tensor, scale: float, sink_logits: Tensor | None,
    **tuned: Any,
) -> Tensor:  # fmt: skip
    """``ckv::prefill_attention`` by one launch. tuned: changes the configuration."""
    (batch, heads, queries, dim), (_, kv_heads, _, value_dim) = query.shape, value.shape
    device = query.device
    out = torch.empty(batch, queries, heads, value_dim, dtype=query.dtype, device=device)
    constants = attend_constants(
        heads, kv_heads, dim, value_dim, scale, sinks=0, kappa=0, exact=False, has_sinks=sink_logits is not None,
        tma=has_tma(device) and all(reads_by_rows(cache) for cache in (key, value)),
    )  # fmt: skip
    config = attend_config(query.dtype, max(dim, value_dim), 0, False, architecture_of(device))
    constants |= {**config, **tuned}
    tensors = {
        "QUERY": query, "KEY": key, "VALUE": value, "LENGTH": length.to(device, torch.int32, non_blocking=True),
        "FIRST": first.to(device, torch.int32, non_blocking=True), "SINK_LOGITS": sink_logits,
    }  # fmt: skip
    grid = (-(-queries // constants["BLOCK_M"]), heads, batch)
    cached_kernel("topk_prefill", tuple(constants.items()))(grid, tensors, out)
    return out.transpose(1, 2)


def reads_by_rows(cache: Tensor) -> bool:
    """Whether the copy engine can read it: rows of 16 bytes."""
    numbers = (*cache.stride()[:3], cache.shape[3], cache.storage_offset())
    return cache.stride(3) == 1 and all(number * cache.element_size() % 16 == 0 for number in numbers)
