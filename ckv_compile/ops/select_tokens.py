"""``ckv::select_tokens``: the tokens of a decode step by a policy that scores each of them (``ckv_compile.policies``).

Eager PyTorch on every device; it reads lengths on the host, so a graph that holds it is not recorded as a CUDA graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ckv_compile.ops.library import (
    register_op,
    require,
    require_at_least,
    require_cache,
    require_first,
    require_graphs,
    require_length,
)


def _check(
    query: Tensor,
    key: Tensor,
    length: Tensor,
    first: Tensor,
    policy: str,
    num_graphs: int,
    budget: int,
    num_sink_tokens: int,
    recent_window: int,
) -> None:
    from ckv_compile.config import TOKEN_POLICIES

    require_cache(query, key, None)
    require_length(length)
    require_first(first, query.shape[0])
    require(policy in TOKEN_POLICIES, "policy", f"be one of {', '.join(map(repr, TOKEN_POLICIES))}", repr(policy))
    require_graphs(num_graphs, query.shape[1], key.shape[1])
    require_at_least("budget", budget, 1)
    require_at_least("num_sink_tokens", num_sink_tokens, 0)
    require_at_least("recent_window", recent_window, 1)


def _select_tokens(
    query: Tensor,
    key: Tensor,
    n_indexed: Tensor,
    capacity: Tensor,
    length: Tensor,
    first: Tensor,
    tally: Tensor,
    importance: Tensor | None,
    neighbor: Tensor | None,
    page_low: Tensor | None,
    page_high: Tensor | None,
    last_query: Tensor | None,
    policy: str,
    layer: int,
    scale: float,
    num_graphs: int,
    budget: int,
    num_sink_tokens: int,
    recent_window: int,
    neighbors: int,
) -> tuple[Tensor, Tensor]:
    from ckv_compile.policies.select_tokens import select_tokens

    _check(query, key, length, first, policy, num_graphs, budget, num_sink_tokens, recent_window)
    return select_tokens(
        query, key, n_indexed, capacity, length, first, tally, importance, neighbor, page_low, page_high, last_query,
        policy, layer, scale, num_graphs, budget, num_sink_tokens, recent_window, neighbors,
    )  # fmt: skip


def _select_tokens_fake(
    query: Tensor,
    key: Tensor,
    n_indexed: Tensor,
    capacity: Tensor,
    length: Tensor,
    first: Tensor,
    tally: Tensor,
    importance: Tensor | None,
    neighbor: Tensor | None,
    page_low: Tensor | None,
    page_high: Tensor | None,
    last_query: Tensor | None,
    policy: str,
    layer: int,
    scale: float,
    num_graphs: int,
    budget: int,
    num_sink_tokens: int,
    recent_window: int,
    neighbors: int,
) -> tuple[Tensor, Tensor]:
    _check(query, key, length, first, policy, num_graphs, budget, num_sink_tokens, recent_window)
    batch = query.shape[0]
    return (
        query.new_empty((batch, num_graphs, budget), dtype=torch.int32),
        query.new_empty((batch, num_graphs), dtype=torch.int32),
    )


register_op(
    "select_tokens(Tensor query, Tensor key, Tensor n_indexed, Tensor capacity, Tensor length, Tensor first, "
    "Tensor(a!) tally, Tensor? importance, Tensor? neighbor, Tensor? page_low, Tensor? page_high, Tensor(b!)? last_query, "
    "str policy, int layer, float scale, int num_graphs, int budget, int num_sink_tokens, int recent_window, "
    "int neighbors) -> (Tensor, Tensor)",
    _select_tokens,
    _select_tokens_fake,
)
