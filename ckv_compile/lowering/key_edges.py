"""``ckv::key_edges`` on CUDA: the edge kernels with cosines of keys."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.lowering import fallback_handler, register_lowering

from ckv_compile.lowering.edges import lower_edges, split_constants
from ckv_compile.lowering.template_call import static_size

_op = torch.ops.ckv.key_edges.default


@register_lowering(_op, type_promotion_kind=None)
def key_edges(
    key: Any, tokens: Any, count: Any, n_indexed: Any, capacity: Any, length: Any, first: Any, layer: int,
    num_sink_tokens: int, recent_window: int, kappa: int, num_graphs: int,
) -> list[Any]:  # fmt: skip
    if key.get_device().type != "cuda":
        return fallback_handler(_op)(
            key, tokens, count, n_indexed, capacity, length, first, layer, num_sink_tokens, recent_window, kappa,
            num_graphs,
        )  # fmt: skip
    batch, kv_heads, _, dim = static_size(key)
    constants = split_constants(
        batch, kv_heads, kv_heads, dim, num_graphs, static_size(tokens)[2], num_sink_tokens, recent_window, kappa, None
    )
    return lower_edges(None, key, [tokens, count, n_indexed, capacity, length, first], constants, kappa)
