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


def _lists(query: Tensor, num_graphs: int, budget: int) -> tuple[Tensor, Tensor]:
    shape = (query.shape[0], num_graphs)
    return query.new_empty((*shape, budget), dtype=torch.int32), query.new_empty(shape, dtype=torch.int32)


register_op(
    "select_tokens(Tensor query, Tensor key, Tensor n_indexed, Tensor capacity, Tensor length, Tensor first, "
    "Tensor(a!) tally, Tensor? importance, Tensor? neighbor, Tensor? page_low, Tensor? page_high, Tensor(b!)? last_query, "
    "str policy, int layer, float scale, int num_graphs, int budget, int num_sink_tokens, int recent_window, "
    "int neighbors) -> (Tensor, Tensor)",
    _check,
    _lists,
    "ckv_compile.policies.select_tokens",
)
