"""``ckv::key_edges``: the attended keys most similar to a new token's key."""

from __future__ import annotations

import torch
from torch import Tensor

from ckv_compile.ops.library import (
    INT_DTYPES,
    register_op,
    require,
    require_at_least,
    require_first,
    require_length,
)


def _check(
    key: Tensor,
    tokens: Tensor,
    count: Tensor,
    length: Tensor,
    first: Tensor,
    num_sink_tokens: int,
    recent_window: int,
    kappa: int,
    num_graphs: int,
) -> None:
    require(key.dim() == 4, "key", "have 4 dimensions [batch, heads, any, head_dim]", tuple(key.shape))
    require(num_graphs in (1, key.shape[1]), "num_graphs", f"be 1 or the {key.shape[1]} KV heads", num_graphs)
    require(
        tokens.dim() == 3 and tokens.shape[:2] == (key.shape[0], num_graphs),
        "tokens",
        f"be [{key.shape[0]}, {num_graphs}, any]",
        tuple(tokens.shape),
    )
    require(tokens.dtype in INT_DTYPES, "tokens", "be int32 or int64", tokens.dtype)
    require(count.shape == tokens.shape[:2], "count", f"be {tuple(tokens.shape[:2])}", tuple(count.shape))
    require_length(length)
    require_first(first, key.shape[0])
    require_at_least("num_sink_tokens", num_sink_tokens, 0)
    require_at_least("recent_window", recent_window, 1)
    require_at_least("kappa", kappa, 1)


def _key_edges(
    key: Tensor,
    tokens: Tensor,
    count: Tensor,
    n_indexed: Tensor,
    capacity: Tensor,
    length: Tensor,
    first: Tensor,
    layer: int,
    num_sink_tokens: int,
    recent_window: int,
    kappa: int,
    num_graphs: int,
) -> tuple[Tensor, Tensor]:
    from ckv_compile.reference.key_edges import key_edges

    _check(key, tokens, count, length, first, num_sink_tokens, recent_window, kappa, num_graphs)
    return key_edges(
        key, tokens, count, n_indexed, capacity, length, first, layer, num_sink_tokens, recent_window, kappa, num_graphs
    )


def _key_edges_fake(
    key: Tensor,
    tokens: Tensor,
    count: Tensor,
    n_indexed: Tensor,
    capacity: Tensor,
    length: Tensor,
    first: Tensor,
    layer: int,
    num_sink_tokens: int,
    recent_window: int,
    kappa: int,
    num_graphs: int,
) -> tuple[Tensor, Tensor]:
    _check(key, tokens, count, length, first, num_sink_tokens, recent_window, kappa, num_graphs)
    shape = (key.shape[0], num_graphs, kappa)
    return key.new_empty(shape, dtype=torch.int32), key.new_empty(shape, dtype=torch.float32)


register_op(
    "key_edges(Tensor key, Tensor tokens, Tensor count, Tensor n_indexed, Tensor capacity, Tensor length, Tensor first, "
    "int layer, int num_sink_tokens, int recent_window, int kappa, int num_graphs) -> (Tensor, Tensor)",
    _key_edges,
    _key_edges_fake,
)
