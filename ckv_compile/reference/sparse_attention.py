"""Exact attention of the queries of a decode step over sinks, retrieved tokens and tail."""

from __future__ import annotations

import torch
from torch import Tensor

from ckv_compile.reference.attended import (
    Span,
    attended_scores,
    attended_spans,
    covers_everything,
    equal_spans,
    gather_rows,
    grouped_scores,
    grouped_sum,
    retrieved_tokens,
)
from ckv_compile.reference.nominal import cache_prefix
from ckv_compile.reference.prefill_attention import attend_causally
from ckv_compile.reference.summary_entries import SummaryEntries, summary_entries


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
    summaries: Tensor | None = None,
    centroid: Tensor | None = None,
    centroid_scale: Tensor | None = None,
    channel_scale: Tensor | None = None,
    size: Tensor | None = None,
    mean_value: Tensor | None = None,
) -> Tensor:
    """Softmax attention of the queries at positions ``length`` .. ``length + Q - 1`` over their set (see ``attended``).

    query: [B, Hq, Q, D]. key, value: nominal views [B, Hkv, NOM, D] that hold the queries' own tokens already.
    tokens: int [B, G, T], count: int [B, G]; head h reads graph h // (Hq // G). Entries beyond ``count``, among the
    sinks, in the tail or negative are ignored, whatever they are; a position must not occur twice below ``count``.
    n_indexed: flat int32 [L, B]. length: int [1]. first: int [B]. sink_logits: [Hq], extra keys without a value.
    Returns [B, Hq, Q, Dv] in query's dtype; scores and sums are float32. A row whose attended set is its whole
    context gives exactly what ``scaled_dot_product_attention`` gives for it alone; pads give zeros.

    With ``summaries``, int [B, G, b] ids of communities or -1, each of them is one more key of the softmax, for the
    graph's heads: of logit q . mean_key * scale + log(size) and value mean_value, as if it were all of its members with
    their means for keys and values. mean_key is centroid * centroid_scale * channel_scale (see ``route``), size flat int32
    [L, B, G, C] (an empty community is left out) and mean_value flat [L, B, G, C, Dv] in value's dtype, or
    [L, B, 1, C, Hkv * Dv] of one graph over several KV heads. capacity: int32 [3], read only then. Q must be 1.
    """
    position, queries = int(length), query.shape[2]
    stop = position + queries
    spans = attended_spans(n_indexed, position, first, layer, num_sink_tokens, recent_window, queries)
    key, value = cache_prefix(key, stop, "key"), cache_prefix(value, stop, "value")
    out = query.new_empty((*query.shape[:3], value.shape[3]))
    means = None
    if summaries is not None:
        means = summary_entries(
            query, key, value, summaries, centroid, centroid_scale, channel_scale, size, mean_value, capacity, layer
        )
    for rows, span in equal_spans(spans):
        lists = retrieved_tokens(tokens[rows], count[rows], span, key.shape[1])
        pads = max(0, span.first - position)  # queries before a row's first token
        out[rows, :, :pads] = 0
        if pads == queries:
            continue
        query_rows, out_rows = query[rows, :, pads:], out[rows, :, pads:]
        own = None if means is None or not bool((means.bias[rows] > -torch.inf).any()) else means.of(rows)
        if sink_logits is None and own is None and covers_everything(lists[1], span):
            keys, values = key[rows, :, span.first :], value[rows, :, span.first :]
            attend_causally(out_rows, query_rows, keys, values, max(0, position - span.first), scale)
        else:
            out_rows.copy_(_attend(query_rows, key[rows], value[rows], *lists, span, sink_logits, scale, own))
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
    means: SummaryEntries | None,
) -> Tensor:
    scores = attended_scores(query, key, tokens, valid, span, scale)
    sinks, retrieved, summarized = span.sink_end - span.first, tokens.shape[2], 0
    if means is not None:
        summarized = means.bias.shape[2]
        own = grouped_scores(query.flatten(1, 2).to(scores.dtype) * scale, means.key)
        scores = torch.cat([scores, own + means.bias.repeat_interleave(own.shape[1] // means.bias.shape[1], 1)], -1)
    probability = torch.softmax(scores, -1)
    parts = probability.split([sinks, retrieved, span.stop - span.tail_start, summarized], -1)
    total = grouped_sum(parts[2], value[:, :, span.tail_start : span.stop])
    if retrieved:
        total += grouped_sum(parts[1], gather_rows(value, tokens))
    if sinks:
        total += grouped_sum(parts[0], value[:, :, span.first : span.sink_end])
    if means is not None:
        total += grouped_sum(parts[3], means.value)
    if sink_logits is not None:
        sink_logits = sink_logits.to(total.dtype).repeat_interleave(query.shape[2])
        total *= torch.sigmoid(torch.logsumexp(scores, -1) - sink_logits)[..., None]
    return total.unflatten(1, query.shape[1:3]).to(query.dtype)
