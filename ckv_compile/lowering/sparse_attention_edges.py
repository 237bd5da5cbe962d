"""``ckv::sparse_attention_edges`` on CUDA: the kernels of sparse attention, which keep a new token's edges besides."""

from __future__ import annotations

from typing import Any

import torch

from ckv_compile.lowering.attend_summaries import Summaries
from ckv_compile.lowering.edges import Edges, store_layer_edges
from ckv_compile.lowering.sparse_attention import lower_attention
from ckv_compile.lowering.template_call import lowers, static_size


@lowers(torch.ops.ckv.sparse_attention_edges.default)
def sparse_attention_edges(
    query: Any, key: Any, value: Any, tokens: Any, count: Any, n_indexed: Any, capacity: Any, length: Any,
    first: Any, sink_logits: Any | None, candidate: Any, candidate_score: Any, candidate_rest: Any, candidate_norm: Any,
    new_key: Any, layer: int, scale: float, num_sink_tokens: int, recent_window: int, kappa: int, source: str,
    *described: Any,
) -> Any:  # fmt: skip
    others = [tokens, count, n_indexed, capacity, length, first]
    edges = Edges(source == "keys", kappa, candidate, candidate_score, candidate_rest, candidate_norm, new_key)
    if edges.keys and static_size(tokens)[1] < static_size(key)[1]:
        store_layer_edges(key, others, edges, num_sink_tokens, recent_window)
    summaries = Summaries.of(described)
    return lower_attention(
        query, key, value, others, sink_logits, scale, num_sink_tokens, recent_window, edges, summaries
    )
