"""Exact causal attention together with every query's strongest keys."""

from __future__ import annotations

import torch
from torch import Tensor

from ckv_compile.reference.causal_blocks import causal_score_blocks
from ckv_compile.reference.nominal import cache_prefix
from ckv_compile.reference.top_entries import top_entries


def topk_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    length: Tensor,
    first: Tensor,
    scale: float,
    num_sink_tokens: int,
    kappa: int,
    sink_logits: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Causal attention as ``prefill_attention`` plus the edges of CommunityKV, eq. 1 and 2.

    Shapes as in ``prefill_attention``. Query i lists the kappa strongest keys among positions
    ``first + num_sink_tokens`` .. i, itself included, in descending order; ties fall either way, but repeatably.
    Returns out [B, Hq, Q, Dv] in query's dtype (token-major in memory), neighbor int32 [B, Hq, Q, kappa] of absolute
    positions (-1 where a row has fewer) and weight float32 of the same shape: alpha_ij, normalised over the whole
    softmax row, leading sink tokens and ``sink_logits`` included (0 where there is no neighbour).
    Working memory is a few blocks of scores; queries that are pads give zeros and no neighbours.
    """
    batch, num_query_heads, num_queries, _ = query.shape
    past = int(length)
    total = past + num_queries
    key, value = cache_prefix(key, total, "key"), cache_prefix(value, total, "value")
    out = query.new_zeros((batch, num_queries, num_query_heads, value.shape[3])).transpose(1, 2)
    shape = (batch, num_query_heads, num_queries, kappa)
    neighbor = query.new_full(shape, -1, dtype=torch.int32)
    weight = query.new_zeros(shape, dtype=torch.float32)
    group_size = num_query_heads // key.shape[1]

    for row, begin in enumerate(first.tolist()):
        pads = min(max(0, begin), total)
        begin = max(0, pads - past)
        arguments = query[row, :, begin:], key[row, :, pads:], value[row, :, pads:], max(0, past - pads), scale
        for head, start, scores, values in causal_score_blocks(*arguments):
            heads = slice(head * group_size, (head + 1) * group_size)
            rows = slice(begin + start, begin + start + scores.shape[1])
            maximum = scores.amax(-1, keepdim=True)
            best = None
            if scores.shape[2] > num_sink_tokens:
                best = top_entries(scores[:, :, num_sink_tokens:], kappa)
            probability = scores.sub_(maximum).exp_()
            norm = probability.sum(-1, keepdim=True)
            part = (probability @ values).div_(norm)
            log_norm = norm.log() + maximum
            if sink_logits is not None:
                sink = sink_logits[heads, None, None].to(log_norm.dtype)
                part *= torch.sigmoid(log_norm - sink)
                log_norm = torch.logaddexp(log_norm, sink)
            out[row, heads, rows] = part.to(out.dtype)
            if best is not None:
                top_scores, columns = best
                found = top_scores > -torch.inf
                filled = slice(0, columns.shape[-1])
                positions = (columns + (pads + num_sink_tokens)).masked_fill_(~found, -1)
                neighbor[row, heads, rows, filled] = positions.to(torch.int32)
                weight[row, heads, rows, filled] = torch.exp(top_scores - log_norm).masked_fill_(~found, 0).float()
    return out, neighbor, weight
