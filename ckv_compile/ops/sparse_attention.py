"""``ckv::sparse_attention``: exact attention of a decode step's queries over sinks, retrieved tokens and tail."""

from __future__ import annotations

from torch import Tensor

from ckv_compile.ops.library import (
    register_op,
    require_at_least,
    require_cache,
    require_first,
    require_length,
    require_sink_logits,
    require_tokens,
)


def check_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tokens: Tensor,
    count: Tensor,
    length: Tensor,
    first: Tensor,
    sink_logits: Tensor | None,
    num_sink_tokens: int,
    recent_window: int,
) -> None:
    require_cache(query, key, value)
    require_tokens(query, key, tokens, count)
    require_length(length)
    require_first(first, query.shape[0])
    require_sink_logits(query, sink_logits)
    require_at_least("num_sink_tokens", num_sink_tokens, 0)
    require_at_least("recent_window", recent_window, 1)


def _sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tokens: Tensor,
    count: Tensor,
    n_indexed: Tensor,
    capacity: Tensor,
    length: Tensor,
    first: Tensor,
    sink_logits: Tensor | None,
    layer: int,
    scale: float,
    num_sink_tokens: int,
    recent_window: int,
) -> Tensor:
    from ckv_compile.reference.sparse_attention import sparse_attention

    check_attention(query, key, value, tokens, count, length, first, sink_logits, num_sink_tokens, recent_window)
    return sparse_attention(
        query, key, value, tokens, count, n_indexed, capacity, length, first, sink_logits, layer, scale,
        num_sink_tokens, recent_window,
    )  # fmt: skip


def _sparse_attention_fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tokens: Tensor,
    count: Tensor,
    n_indexed: Tensor,
    capacity: Tensor,
    length: Tensor,
    first: Tensor,
    sink_logits: Tensor | None,
    layer: int,
    scale: float,
    num_sink_tokens: int,
    recent_window: int,
) -> Tensor:
    check_attention(query, key, value, tokens, count, length, first, sink_logits, num_sink_tokens, recent_window)
    return query.new_empty((*query.shape[:3], value.shape[3]))


register_op(
    "sparse_attention(Tensor query, Tensor key, Tensor value, Tensor tokens, Tensor count, Tensor n_indexed, "
    "Tensor capacity, Tensor length, Tensor first, Tensor? sink_logits, int layer, float scale, int num_sink_tokens, "
    "int recent_window) -> Tensor",
    _sparse_attention,
    _sparse_attention_fake,
)
