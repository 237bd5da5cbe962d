"""``ckv::sparse_attention_edges``: sparse attention that stores what may be an edge of its new token (eq. 6) besides.

Edges are a by-product: scores and keys are at hand. They wait in state of all layers, with the new key, until
``ckv::pick_edges`` picks the best at the end of the step. So does the new value, where communities are attended by means.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ckv_compile.ops.library import register_op, require, require_at_least, require_one_query
from ckv_compile.ops.sparse_attention import attended, check_attention, check_summaries

EDGE_SOURCES = ("keys", "attention")


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tokens: Tensor,
    count: Tensor,
    length: Tensor,
    first: Tensor,
    sink_logits: Tensor | None,
    new_key: Tensor,
    num_sink_tokens: int,
    recent_window: int,
    kappa: int,
    source: str,
) -> None:
    check_attention(query, key, value, tokens, count, length, first, sink_logits, num_sink_tokens, recent_window)
    require_one_query(query)
    require_at_least("kappa", kappa, 1)
    require(source in EDGE_SOURCES, "source", f"be one of {EDGE_SOURCES}", source)
    heads, graphs = key.shape[1], tokens.shape[1]
    require(source != "keys" or graphs in (1, heads), "tokens", f"hold 1 list or {heads}, one per KV head", graphs)
    require(new_key.dtype == key.dtype, "new_key", f"have key's dtype {key.dtype}", new_key.dtype)


def check_candidates(
    candidate: Tensor, candidate_score: Tensor, candidate_rest: Tensor, candidate_norm: Tensor
) -> None:
    kinds = (
        ("candidate", candidate, torch.int32), ("candidate_score", candidate_score, torch.float32),
        ("candidate_rest", candidate_rest, torch.int64), ("candidate_norm", candidate_norm, torch.float32),
    )  # fmt: skip
    for name, tensor, dtype in kinds:
        require(tensor.dtype == dtype, name, f"be {str(dtype).removeprefix('torch.')}", tensor.dtype)


def _check_new_value(value: Tensor, summaries: Tensor | None, new_value: Tensor | None) -> None:
    require((new_value is None) == (summaries is None), "new_value", "be given exactly where summaries are", new_value)
    if new_value is not None:
        require(new_value.dtype == value.dtype, "new_value", f"have value's dtype {value.dtype}", new_value.dtype)


register_op(
    "sparse_attention_edges(Tensor query, Tensor key, Tensor value, Tensor tokens, Tensor count, Tensor n_indexed, "
    "Tensor capacity, Tensor length, Tensor first, Tensor? sink_logits, Tensor(a!) candidate, "
    "Tensor(b!) candidate_score, Tensor(e!) candidate_rest, Tensor(f!) candidate_norm, Tensor(c!) new_key, int layer, "
    "float scale, int num_sink_tokens, int recent_window, int kappa, str source, Tensor? summaries=None, "
    "Tensor? centroid=None, Tensor? centroid_scale=None, Tensor? channel_scale=None, Tensor? size=None, "
    "Tensor? mean_value=None, Tensor(d!)? new_value=None) -> Tensor",
    (_check, check_summaries, _check_new_value, check_candidates),
    attended,
)
