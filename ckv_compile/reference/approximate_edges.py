"""The strongest attended keys of a new token."""

from __future__ import annotations

import torch
from torch import Tensor

from ckv_compile.reference.attended import (
    Span,
    attended_scores,
    attended_spans,
    equal_spans,
    retrieved_tokens,
)
from ckv_compile.reference.nominal import cache_prefix
from ckv_compile.reference.top_entries import top_entries


def listed_positions(columns: Tensor, tokens: Tensor, span: Span) -> Tensor:
    """Positions behind columns [B, H, k] that count the retrieved slots [B, P, t] first and the tail after them."""
    count = tokens.shape[2]
    positions = columns + (span.tail_start - count)
    if count:
        tokens = tokens.repeat_interleave(columns.shape[1] // tokens.shape[1], 1)
        positions = torch.where(columns < count, tokens.gather(2, columns.clamp(max=count - 1)), positions)
    return positions


def approximate_edges(
    query: Tensor,
    key: Tensor,
    tokens: Tensor,
    count: Tensor,
    n_indexed: Tensor,
    capacity: Tensor,
    length: Tensor,
    first: Tensor,
    layer: int,
    scale: float,
    num_sink_tokens: int,
    recent_window: int,
    kappa: int,
) -> tuple[Tensor, Tensor]:
    """Approximate scores and top-kappa keys of the token at position ``length`` (CommunityKV, eq. 6).

    Arguments as in ``sparse_attention``. Candidates are the attended positions without the leading sinks, the token
    itself included. Weights are normalised over the whole attended set; eq. 6 leaves the sinks out of the
    denominator too, but the rows of eq. 1 do not, and both kinds of weight meet in one graph.
    Returns neighbor int32 [B, Hq, kappa] (positions in order of weight, -1 where there are fewer) and weight float32
    of the same shape (0 where there is no neighbour). Ties fall either way, but repeatably.
    """
    batch, num_query_heads = query.shape[:2]
    position = int(length)
    spans = attended_spans(n_indexed, position, first, layer, num_sink_tokens, recent_window)
    key = cache_prefix(key, position + 1, "key")
    neighbor = query.new_full((batch, num_query_heads, kappa), -1, dtype=torch.int32)
    weight = query.new_zeros((batch, num_query_heads, kappa), dtype=torch.float32)
    for rows, span in equal_spans(spans):
        begin = max(span.tail_start, min(span.first + num_sink_tokens, span.stop))  # sinks inside the tail
        lists, valid = retrieved_tokens(tokens[rows], count[rows], span, key.shape[1])
        scores = attended_scores(query[rows], key[rows], lists, valid, span, scale)
        if scores.shape[-1] == 0:
            continue
        norm = torch.logsumexp(scores, -1, keepdim=True)
        scores = scores[:, :, span.sink_end - span.first :]
        if begin > span.tail_start:
            tail = lists.shape[2]
            scores[:, :, tail : tail + begin - span.tail_start] = -torch.inf
        best, columns = top_entries(scores, kappa)
        found = best > -torch.inf
        filled = slice(0, columns.shape[-1])
        neighbor[rows, :, filled] = listed_positions(columns, lists, span).masked_fill(~found, -1).to(torch.int32)
        weight[rows, :, filled] = torch.exp(best - norm).masked_fill(~found, 0).float()
    return neighbor, weight
