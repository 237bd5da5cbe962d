"""The set of positions that a decode query attends to, and reading it without copying the cache.

The Q queries of a row sit at positions ``length`` .. ``length + Q - 1`` with their own keys already stored; a decode step
has one, the verification of drafted tokens several. One set serves them all:
  sinks      first .. first + num_sink_tokens - 1, as far as they lie before the tail
  retrieved  tokens[:count] that lie between sinks and tail; anything else in the list is ignored
  tail       tail_start .. length + Q - 1 with tail_start = max(first, min(n_indexed, length + 1 - recent_window))
and of it query i attends to the positions up to ``length + i``, its own. The recent window is that of the first query, so
sinks and retrieved tokens lie before every query, no position counts twice, and without an index everything is tail.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ckv_compile.reference.nominal import accumulate_dtype, layer_state

ROWS_PER_UPCAST = 4096  # keys of low precision that are widened at a time


class Span(NamedTuple):
    """Positions of one row: sinks are ``first`` .. ``sink_end - 1``, the tail is ``tail_start`` .. ``stop - 1``."""

    first: int
    sink_end: int
    tail_start: int
    stop: int


def attended_spans(
    n_indexed: Tensor,
    length: int,
    first: Tensor,
    layer: int,
    num_sink_tokens: int,
    recent_window: int,
    num_new: int = 1,
) -> list[Span]:
    """The span of every row with ``num_new`` queries; n_indexed is the flat state [L, B], first [B]."""
    stop = length + num_new
    firsts = first.tolist()
    indexed = layer_state(n_indexed, layer, (len(firsts),), "n_indexed").tolist()
    spans = []
    for begin, covered in zip(firsts, indexed, strict=True):
        begin = min(max(begin, 0), stop)
        tail_start = max(begin, min(covered, length + 1 - recent_window))
        spans.append(Span(begin, min(begin + num_sink_tokens, tail_start), tail_start, stop))
    return spans


def equal_spans(spans: list[Span]) -> Iterator[tuple[slice, Span]]:
    """Batch rows that can be computed together: all of them when their spans are equal, else one by one."""
    if len(set(spans)) == 1:
        yield slice(None), spans[0]
    else:
        for row, span in enumerate(spans):
            yield slice(row, row + 1), span


def retrieved_tokens(tokens: Tensor, count: Tensor, span: Span, num_kv_heads: int) -> tuple[Tensor, Tensor]:
    """The usable entries of token lists [B, G, T] with ``count`` [B, G].

    Returns positions int64 and a mask, both [B, P, t] with t <= T and P = max(G, num_kv_heads); masked positions
    point at the last token.
    """
    longest = 0 if span.sink_end == span.tail_start else int(count.amax().clamp(0, tokens.shape[2]))
    tokens = tokens[:, :, :longest].long()
    slots = torch.arange(longest, device=tokens.device)
    valid = (slots < count[:, :, None]) & (tokens >= span.sink_end) & (tokens < span.tail_start)
    tokens = torch.where(valid, tokens, span.stop - 1)
    if tokens.shape[1] < num_kv_heads:
        repeats = num_kv_heads // tokens.shape[1]
        tokens, valid = tokens.repeat_interleave(repeats, 1), valid.repeat_interleave(repeats, 1)
    return tokens, valid


def covers_everything(valid: Tensor, span: Span) -> bool:
    """Whether the retrieved tokens of every graph fill the gap between sinks and tail."""
    gap = span.tail_start - span.sink_end
    return gap == 0 or (valid.shape[2] >= gap and bool((valid.sum(2) == gap).all()))


def gather_rows(cache: Tensor, tokens: Tensor) -> Tensor:
    """Rows of a cache [B, H, n, D] at ``tokens`` int64 [B, P, t], where list p reads head p * H // P: [B, P, t, D]."""
    batch, heads, _, dim = cache.shape
    lists, count = tokens.shape[1:]
    rows = torch.arange(batch, device=tokens.device)[:, None, None]
    head = (torch.arange(lists, device=tokens.device) * heads // lists)[None, :, None]
    row_stride, head_stride, token_stride, dim_stride = cache.stride()
    unit = math.gcd(row_stride, head_stride, token_stride)
    if dim_stride != 1 or unit == 0:
        return cache[rows, head, tokens]
    # One flat table of rows, possibly overlapping, so that a row is one contiguous copy.
    last = sum((size - 1) * stride for size, stride in zip(cache.shape[:3], cache.stride()[:3], strict=True))
    table = cache.as_strided((last // unit + 1, dim), (unit, 1), cache.storage_offset())
    index = tokens * (token_stride // unit) + (rows * (row_stride // unit) + head * (head_stride // unit))
    return table.index_select(0, index.flatten()).view(batch, lists, count, dim)


def grouped_scores(query: Tensor, keys: Tensor) -> Tensor:
    """Products of query heads [B, Hq, D] with keys [B, P, n, D] of their group, in query's dtype: [B, Hq, n]."""
    batch, heads, dim = query.shape
    groups, count = keys.shape[1:3]
    query = query.view(batch, groups, heads // groups, dim)
    if keys.dtype == query.dtype:
        return (query @ keys.transpose(2, 3)).view(batch, heads, count)
    out = query.new_empty(batch, groups, heads // groups, count)
    for start in range(0, count, ROWS_PER_UPCAST):
        part = keys[:, :, start : start + ROWS_PER_UPCAST].to(query.dtype)
        out[..., start : start + ROWS_PER_UPCAST] = query @ part.transpose(2, 3)
    return out.view(batch, heads, count)


def grouped_sum(probability: Tensor, values: Tensor) -> Tensor:
    """Weighted sums of values [B, P, n, Dv] with weights [B, Hq, n], in probability's dtype: [B, Hq, Dv]."""
    batch, heads, count = probability.shape
    groups, dim = values.shape[1], values.shape[3]
    probability = probability.reshape(batch, groups, heads // groups, count)
    if values.dtype == probability.dtype:
        return (probability @ values).view(batch, heads, dim)
    out = probability.new_zeros(batch, groups, heads // groups, dim)
    for start in range(0, count, ROWS_PER_UPCAST):
        part = values[:, :, start : start + ROWS_PER_UPCAST].to(probability.dtype)
        out += probability[..., start : start + ROWS_PER_UPCAST] @ part
    return out.view(batch, heads, dim)


def attended_scores(query: Tensor, key: Tensor, tokens: Tensor, valid: Tensor, span: Span, scale: float) -> Tensor:
    """Scores of Q queries per row over their attended set, in the order sinks, retrieved, tail.

    query [B, Hq, Q, D], key [B, Hkv, stop, D], tokens and valid [B, P, t] of ``retrieved_tokens``.
    Returns [B, Hq * Q, sinks + t + tail] in float32 (float64 for float64), -inf where a retrieved slot is not valid and
    where a position of the tail comes after the query's own.
    """
    queries = query.shape[2]
    query = query.flatten(1, 2).to(accumulate_dtype(query.dtype)) * scale
    parts = [grouped_scores(query, key[:, :, span.tail_start : span.stop])]
    if queries > 1:
        later = torch.ones(queries, queries, dtype=torch.bool, device=query.device).triu_(1)
        parts[0].unflatten(1, (-1, queries))[..., -queries:].masked_fill_(later, -torch.inf)
    if tokens.shape[2]:
        scores = grouped_scores(query, gather_rows(key, tokens))
        heads_per_list = query.shape[1] // tokens.shape[1]
        parts.insert(0, scores.masked_fill_(~valid.repeat_interleave(heads_per_list, 1), -torch.inf))
    if span.sink_end > span.first:
        parts.insert(0, grouped_scores(query, key[:, :, span.first : span.sink_end]))
    return torch.cat(parts, -1) if len(parts) > 1 else parts[0]
