"""``ckv::topk_prefill``: exact causal attention that also returns every query's strongest keys (eq. 1 and 2)."""

from __future__ import annotations

import torch
from torch import Tensor

from ckv_compile.ops.library import (
    register_op,
    require,
    require_at_least,
    require_cache,
    require_first,
    require_length,
    require_sink_logits,
)


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    length: Tensor,
    first: Tensor,
    num_sink_tokens: int,
    kappa: int,
    sink_logits: Tensor | None,
    topk: str,
) -> None:
    require_cache(query, key, value)
    require_length(length)
    require_first(first, query.shape[0])
    require_at_least("num_sink_tokens", num_sink_tokens, 0)
    require_at_least("kappa", kappa, 1)
    require_sink_logits(query, sink_logits)
    require(topk in ("fast", "exact"), "topk", "be 'fast' or 'exact'", repr(topk))


def _attended(query: Tensor, value: Tensor, kappa: int) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, tokens, _ = query.shape
    return (
        query.new_empty((batch, tokens, heads, value.shape[3])).transpose(1, 2),
        query.new_empty((batch, heads, tokens, kappa), dtype=torch.int32),
        query.new_empty((batch, heads, tokens, kappa), dtype=torch.float32),
    )


register_op(
    "topk_prefill(Tensor query, Tensor key, Tensor value, Tensor length, Tensor first, Tensor ticket, float scale, "
    "int num_sink_tokens, int kappa, Tensor? sink_logits, "
    'str topk="fast") -> (Tensor, Tensor, Tensor)',
    _check,
    _attended,
)
