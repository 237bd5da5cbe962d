"""``ckv::sparse_attention``: exact attention of a decode step's queries over sinks, retrieved tokens and tail."""

from __future__ import annotations

import torch
from torch import Tensor

from ckv_compile.ops.library import (
    register_op,
    require,
    require_at_least,
    require_cache,
    require_first,
    require_length,
    require_one_query,
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


def check_summaries(
    query: Tensor,
    value: Tensor,
    tokens: Tensor,
    summaries: Tensor | None,
    centroid: Tensor | None,
    centroid_scale: Tensor | None,
    channel_scale: Tensor | None,
    size: Tensor | None,
    mean_value: Tensor | None,
) -> None:
    """summaries int32 [B, G, b] like tokens, of one query per row; then everything that describes them is given."""
    needed = {
        "centroid": centroid, "centroid_scale": centroid_scale, "channel_scale": channel_scale, "size": size,
        "mean_value": mean_value,
    }  # fmt: skip
    for name, tensor in needed.items():
        require((tensor is None) == (summaries is None), name, "be given exactly where summaries are", tensor)
    if summaries is None:
        return
    require_one_query(query)
    require(
        summaries.dim() == 3 and summaries.shape[:2] == tokens.shape[:2],
        "summaries",
        f"be [{tokens.shape[0]}, {tokens.shape[1]}, any] as tokens are",
        tuple(summaries.shape),
    )
    require(summaries.dtype == torch.int32, "summaries", "be int32", summaries.dtype)
    assert centroid is not None
    assert mean_value is not None
    require(centroid.dtype == torch.int8, "centroid", "be int8", centroid.dtype)
    require(mean_value.dtype == value.dtype, "mean_value", f"have value's dtype {value.dtype}", mean_value.dtype)


def attended(query: Tensor, value: Tensor) -> Tensor:
    return query.new_empty((*query.shape[:3], value.shape[3]))


register_op(
    "sparse_attention(Tensor query, Tensor key, Tensor value, Tensor tokens, Tensor count, Tensor n_indexed, "
    "Tensor capacity, Tensor length, Tensor first, Tensor? sink_logits, int layer, float scale, int num_sink_tokens, "
    "int recent_window, Tensor? summaries=None, Tensor? centroid=None, Tensor? centroid_scale=None, "
    "Tensor? channel_scale=None, Tensor? size=None, Tensor? mean_value=None) -> Tensor",
    (check_attention, check_summaries),
    attended,
)
