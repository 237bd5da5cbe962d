"""``ckv::approximate_edges`` on CUDA: the edge kernels with attention scores."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.lowering import fallback_handler, register_lowering

from ckv_compile.lowering.edges import lower_edges, split_constants
from ckv_compile.lowering.template_call import static_size

_op = torch.ops.ckv.approximate_edges.default


@register_lowering(_op, type_promotion_kind=None)
def approximate_edges(
    query: Any, key: Any, tokens: Any, count: Any, n_indexed: Any, capacity: Any, length: Any, first: Any,
    layer: int, scale: float, num_sink_tokens: int, recent_window: int, kappa: int,
) -> list[Any]:  # fmt: skip
    if query.get_device().type != "cuda":
        return fallback_handler(_op)(
            query, key, tokens, count, n_indexed, capacity, length, first, layer, scale, num_sink_tokens,
            recent_window, kappa,
        )  # fmt: skip
    batch, heads, _, dim = static_size(query)
    _, graphs, budget = static_size(tokens)
    constants = split_constants(
        batch, heads, static_size(key)[1], dim, graphs, budget, num_sink_tokens, recent_window, kappa, scale
    )
    return lower_edges(query, key, [tokens, count, n_indexed, capacity, length, first], constants, kappa)
