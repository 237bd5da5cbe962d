"""``ckv::sparse_attention_edges``: sparse attention that stores what may be an edge of its new token (eq. 6) besides.

Edges are a by-product: scores and keys are at hand. They wait in state of all layers, with the new key, until
``ckv::pick_edges`` picks the best at the end of the step. So does the new value, where communities are attended by means.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ckv_compile.ops.library import register_op, require, require_at_least, require_one_query
from ckv_compile.ops.sparse_attention import check_attention, check_summaries

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


def _sparse_attention_edges(
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
    candidate: Tensor,
    candidate_score: Tensor,
    candidate_rest: Tensor,
    candidate_norm: Tensor,
    new_key: Tensor,
    layer: int,
    scale: float,
    num_sink_tokens: int,
    recent_window: int,
    kappa: int,
    source: str,
    summaries: Tensor | None = None,
    centroid: Tensor | None = None,
    centroid_scale: Tensor | None = None,
    channel_scale: Tensor | None = None,
    size: Tensor | None = None,
    mean_value: Tensor | None = None,
    new_value: Tensor | None = None,
) -> Tensor:
    from ckv_compile.reference.sparse_attention_edges import sparse_attention_edges

    _check(
        query, key, value, tokens, count, length, first, sink_logits, new_key, num_sink_tokens, recent_window, kappa,
        source,
    )  # fmt: skip
    described = (summaries, centroid, centroid_scale, channel_scale, size, mean_value)
    check_summaries(query, value, tokens, *described)
    _check_new_value(value, summaries, new_value)
    check_candidates(candidate, candidate_score, candidate_rest, candidate_norm)
    return sparse_attention_edges(
        query, key, value, tokens, count, n_indexed, capacity, length, first, sink_logits, candidate,
        candidate_score, candidate_rest, candidate_norm, new_key, layer, scale, num_sink_tokens, recent_window, kappa,
        source, *described, new_value,
    )  # fmt: skip


def _sparse_attention_edges_fake(
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
    candidate: Tensor,
    candidate_score: Tensor,
    candidate_rest: Tensor,
    candidate_norm: Tensor,
    new_key: Tensor,
    layer: int,
    scale: float,
    num_sink_tokens: int,
    recent_window: int,
    kappa: int,
    source: str,
    summaries: Tensor | None = None,
    centroid: Tensor | None = None,
    centroid_scale: Tensor | None = None,
    channel_scale: Tensor | None = None,
    size: Tensor | None = None,
    mean_value: Tensor | None = None,
    new_value: Tensor | None = None,
) -> Tensor:
    _check(
        query, key, value, tokens, count, length, first, sink_logits, new_key, num_sink_tokens, recent_window, kappa,
        source,
    )  # fmt: skip
    described = (summaries, centroid, centroid_scale, channel_scale, size, mean_value)
    check_summaries(query, value, tokens, *described)
    _check_new_value(value, summaries, new_value)
    check_candidates(candidate, candidate_score, candidate_rest, candidate_norm)
    return query.new_empty((*query.shape[:3], value.shape[3]))


register_op(
    "sparse_attention_edges(Tensor query, Tensor key, Tensor value, Tensor tokens, Tensor count, Tensor n_indexed, "
    "Tensor capacity, Tensor length, Tensor first, Tensor? sink_logits, Tensor(a!) candidate, "
    "Tensor(b!) candidate_score, Tensor(e!) candidate_rest, Tensor(f!) candidate_norm, Tensor(c!) new_key, int layer, "
    "float scale, int num_sink_tokens, int recent_window, int kappa, str source, Tensor? summaries=None, "
    "Tensor? centroid=None, Tensor? centroid_scale=None, Tensor? channel_scale=None, Tensor? size=None, "
    "Tensor? mean_value=None, Tensor(d!)? new_value=None) -> Tensor",
    _sparse_attention_edges,
    _sparse_attention_edges_fake,
)
