"""``ckv::key_neighbors``: nearest earlier keys inside one block of the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from ckv_compile.ops.library import register_op, require, require_at_least, require_first


def _check(
    key: Tensor, first: Tensor, start: int, stop: int, kappa: int, num_sink_tokens: int, block_size: int
) -> None:
    require(key.dim() == 4, "key", "have 4 dimensions [batch, heads, any, head_dim]", tuple(key.shape))
    require_first(first, key.shape[0])
    require_at_least("start", start, 0)
    require(stop >= start, "stop", f"be at least start ({start})", stop)
    require_at_least("kappa", kappa, 1)
    require_at_least("num_sink_tokens", num_sink_tokens, 0)
    require_at_least("block_size", block_size, 0)


def _key_neighbors(
    key: Tensor,
    first: Tensor,
    start: int,
    stop: int,
    kappa: int,
    num_sink_tokens: int,
    join_heads: bool,
    block_size: int,
) -> Tensor:
    if key.is_cuda:
        from ckv_compile.kernels import key_neighbors as kernel
        from ckv_compile.reference.nominal import cache_prefix

        if kernel.applies(key, block_size or stop - start, kappa, join_heads=join_heads):
            key = cache_prefix(key, stop, "key")
            return kernel.key_neighbors(key, first, start, stop, block_size or stop - start, kappa, num_sink_tokens)
    from ckv_compile.reference.key_neighbors import key_neighbors

    return key_neighbors(key, first, start, stop, kappa, num_sink_tokens, join_heads, block_size)


def _neighbors(key: Tensor, start: int, stop: int, kappa: int, join_heads: bool) -> Tensor:
    graphs = 1 if join_heads else key.shape[1]
    return key.new_empty((key.shape[0], graphs, stop - start, kappa), dtype=torch.int32)


register_op(
    "key_neighbors(Tensor key, Tensor first, int start, int stop, int kappa, int num_sink_tokens, bool join_heads, "
    "int block_size=0) -> Tensor",
    _check,
    _neighbors,
    _key_neighbors,
)
