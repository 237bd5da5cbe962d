"""Exact attention of one decode query over sinks, retrieved tokens and tail."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ckv_compile.reference.attended import (
    Span,
    attended_scores,
    attended_spans,
    covers_everything,
    equal_spans,
    gather_rows,
    grouped_sum,
    retrieved_tokens,
)
from ckv_compile.reference.nominal import cache_prefix


def sparse_attention(
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
    layer: int,
    scale: float,
    num_sink_tokens: int,
    recent_window: int,
) -> Tensor:
    """Softmax attention of the query at position ``length`` over the attended set (see ``attended``).

    query: [B, Hq, 1, D]. key, value: nominal views [B, Hkv, NOM, D] that hold the query's own token already.
    tokens: int [B, G, T], count: int [B, G]; head h reads graph h // (Hq // G). Entries beyond ``count``, among the
    sinks, in the tail or negative are ignored, whatever they are; a position must not occur twice below ``count``.
    n_indexed: flat int32 [L, B]. length: int [1]. first: int [B]. sink_logits: [Hq], extra keys without a value.
    Returns [B, Hq, 1, Dv] in query's dtype; scores and sums are float32. A row whose attended set is its whole
    context gives exactly what ``scaled_dot_product_attention`` gives for it alone; a row of pads gives zeros.
    """
    position = int(length)
    spans = attended_spans(n_indexed, position, first, layer, num_sink_tokens, recent_window)
    key, value = cache_prefix(key, position + 1, "key"), cache_prefix(value, position + 1, "value")
    out = query.new_empty((*query.shape[:3], value.shape[3]))
    for rows, span in equal_spans(spans):
        lists = retrieved_tokens(tokens[rows], count[rows], span, key.shape[1])
        if span.first == span.stop:
            out[rows] = 0
        elif sink_logits is None and covers_everything(lists[1], span):
            keys, values = key[rows, :, span.first :], value[rows, :, span.first :]
            out[rows] = F.scaled_dot_product_attention(query[rows], keys, values, scale=scale, enable_gqa=True)
        else:
            out[rows] = _attend(query[rows], key[rows], value[rows], *lists, span, sink_logits, scale)
    return out


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tokens: Tensor,
    valid: Tensor,
    span: Span,
    sink_logits: Tensor | None,
    scale: float,
) -> Tensor:
    scores = attended_scores(query, key, tokens, valid, span, scale)
    probability = torch.softmax(scores, -1)
    sinks, retrieved = span.sink_end - span.first, tokens.shape[2]
    parts = probability.split([sinks, retrieved, span.stop - span.tail_start], -1)
    total = grouped_sum(parts[2], value[:, :, span.tail_start : span.stop])
    if retrieved:
        total += grouped_sum(parts[1], gather_rows(value, tokens))
    if sinks:
        total += grouped_sum(parts[0], value[:, :, span.first : span.sink_end])
    if sink_logits is not None:
        total *= torch.sigmoid(torch.logsumexp(scores, -1) - sink_logits.to(total.dtype))[..., None]
    return total[:, :, None].to(query.dtype)
