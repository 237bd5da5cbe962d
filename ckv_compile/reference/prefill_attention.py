"""Exact causal attention of new tokens over the cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ckv_compile.reference.causal_blocks import causal_score_blocks
from ckv_compile.reference.nominal import cache_prefix

MASK_BYTES = 32 << 20  # a boolean mask is widened by some kernels, so this stays well below what may be allocated


def prefill_attention(
    query: Tensor, key: Tensor, value: Tensor, length: Tensor, first: Tensor, scale: float, sink_logits: Tensor | None
) -> Tensor:
    """Attend queries at positions ``length`` .. ``length + Q - 1`` to positions ``first`` .. their own.

    query: [B, Hq, Q, D]. key, value: nominal views [B, Hkv, NOM, D]; the new tokens are already stored.
    length: int [1], tokens before this step. first: int [B], first real token of a row; pads give zeros.
    sink_logits: [Hq], the logit of an extra key without a value: -inf means none, +inf gives zero output.
    Returns [B, Hq, Q, Dv] in query's dtype, token-major in memory. Rows of equal ``first`` equal their single run.
    """
    batch, num_query_heads, num_queries, _ = query.shape
    past = int(length)
    total = past + num_queries
    key, value = cache_prefix(key, total, "key"), cache_prefix(value, total, "value")
    out = query.new_empty((batch, num_queries, num_query_heads, value.shape[3])).transpose(1, 2)
    firsts = [min(max(0, row), total) for row in first.tolist()]
    if len(set(firsts)) == 1:
        pieces = [(slice(None), firsts[0])]
    else:
        pieces = [(slice(row, row + 1), firsts[row]) for row in range(batch)]
    for rows, pads in pieces:
        begin = max(0, pads - past)  # queries before it are pads
        out[rows, :, :begin] = 0
        if begin == num_queries:
            continue
        arguments = query[rows, :, begin:], key[rows, :, pads:], value[rows, :, pads:], max(0, past - pads), scale
        if sink_logits is None:
            attend_causally(out[rows, :, begin:], *arguments)
        else:
            _attend_with_sink_logits(out[rows, :, begin:], *arguments, sink_logits)
    return out


def attend_causally(out: Tensor, query: Tensor, key: Tensor, value: Tensor, past: int, scale: float) -> None:
    """Write causal attention of queries at positions ``past`` .. into ``out`` through torch's fused kernels."""
    num_queries = query.shape[2]
    if past == 0 or num_queries == 1:
        causal = num_queries > 1
        out.copy_(F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale, enable_gqa=True))
        return
    rows = max(1, MASK_BYTES // (4 * key.shape[2]))
    positions = torch.arange(key.shape[2], device=query.device)
    for start in range(0, num_queries, rows):
        stop = min(start + rows, num_queries)
        seen = past + stop
        mask = positions[:seen] <= positions[past + start : seen, None]
        part = F.scaled_dot_product_attention(
            query[:, :, start:stop], key[:, :, :seen], value[:, :, :seen], attn_mask=mask, scale=scale, enable_gqa=True
        )
        out[:, :, start:stop] = part


def _attend_with_sink_logits(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, past: int, scale: float, sink_logits: Tensor
) -> None:
    group_size = query.shape[1] // key.shape[1]
    for row in range(query.shape[0]):
        for head, start, scores, values in causal_score_blocks(query[row], key[row], value[row], past, scale):
            heads = slice(head * group_size, (head + 1) * group_size)
            stop = start + scores.shape[1]
            total = torch.logsumexp(scores, -1, keepdim=True)
            part = torch.exp(scores - total) @ values
            part *= torch.sigmoid(total - sink_logits[heads, None, None].to(total.dtype))
            out[row, heads, start:stop] = part.to(out.dtype)
