"""``ckv::approximate_edges``: the strongest attended keys of a new token (eq. 6)."""

from __future__ import annotations

import torch
from torch import Tensor

from ckv_compile.ops.library import (
    register_op,
    require_at_least,
    require_cache,
    require_first,
    require_length,
    require_one_query,
    require_tokens,
)


def _check(
    query: Tensor,
    key: Tensor,
    tokens: Tensor,
    count: Tensor,
    length: Tensor,
    first: Tensor,
    num_sink_tokens: int,
    recent_window: int,
    kappa: int,
) -> None:
    require_cache(query, key, None)
    require_one_query(query)
    require_tokens(query, key, tokens, count)
    require_length(length)
    require_first(first, query.shape[0])
    require_at_least("num_sink_tokens", num_sink_tokens, 0)
    require_at_least("recent_window", recent_window, 1)
    require_at_least("kappa", kappa, 1)


def _approximate_edges(
    query: Tensor,
    key: Tensor,
    tokens: Tensor,
    count: Tensor,
    n_indexed: Tensor,
    capacity: Tensor,
    length: Tensor,
    first: Tensor,
    layer: int,
    scale: float,
    num_sink_tokens: int,
    recent_window: int,
    kappa: int,
) -> tuple[Tensor, Tensor]:
    from ckv_compile.reference.approximate_edges import approximate_edges

    _check(query, key, tokens, count, length, first, num_sink_tokens, recent_window, kappa)
    return approximate_edges(
        query, key, tokens, count, n_indexed, capacity, length, first, layer, scale, num_sink_tokens, recent_window,
        kappa,
    )  # fmt: skip


def _approximate_edges_fake(
    query: Tensor,
    key: Tensor,
    tokens: Tensor,
    count: Tensor,
    n_indexed: Tensor,
    capacity: Tensor,
    length: Tensor,
    first: Tensor,
    layer: int,
    scale: float,
    num_sink_tokens: int,
    recent_window: int,
    kappa: int,
) -> tuple[Tensor, Tensor]:
    _check(query, key, tokens, count, length, first, num_sink_tokens, recent_window, kappa)
    shape = (query.shape[0], query.shape[1], kappa)
    return query.new_empty(shape, dtype=torch.int32), query.new_empty(shape, dtype=torch.float32)


register_op(
    "approximate_edges(Tensor query, Tensor key, Tensor tokens, Tensor count, Tensor n_indexed, Tensor capacity, "
    "Tensor length, Tensor first, int layer, float scale, int num_sink_tokens, int recent_window, int kappa) "
    "-> (Tensor, Tensor)",
    _approximate_edges,
    _approximate_edges_fake,
)
