"""Blocks of causal scores: exact attention that needs more than an output, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ckv_compile.reference.nominal import accumulate_dtype

SCORES_PER_BLOCK = 1 << 21  # elements: 8 MiB of float32, near a core's cache yet with few enough blocks


def causal_score_blocks(query: Tensor, key: Tensor, value: Tensor, past: int, scale: float) -> Iterator[tuple]:
    """Yield (head, first_query, scores, values) over the KV heads and query rows of one sequence.

    query [Hq, Q, D], key and value [Hkv, past + Q, D]: query row i sees keys 0 .. past + i.
    scores: float32 [group_size, rows, keys] with -inf above the diagonal; keys stop at the block's last row.
    values: float32 [keys, Dv]. ``head`` counts KV heads.
    """
    num_query_heads, num_queries, _ = query.shape
    num_kv_heads, num_keys, _ = key.shape
    group_size = num_query_heads // num_kv_heads
    dtype = accumulate_dtype(query.dtype)
    rows = max(1, SCORES_PER_BLOCK // (group_size * max(1, num_keys)))
    for head in range(num_kv_heads):
        keys, values = key[head].to(dtype), value[head].to(dtype)
        queries = query[head * group_size : (head + 1) * group_size]
        for start in range(0, num_queries, rows):
            stop = min(start + rows, num_queries)
            seen = past + stop
            scores = (queries[:, start:stop].to(dtype) * scale) @ keys[:seen].t()
            if stop - start > 1:
                square = torch.ones(stop - start, stop - start, dtype=torch.bool, device=query.device).triu_(1)
                scores[:, :, past + start : seen].masked_fill_(square, -torch.inf)
            yield head, start, scores, values[:seen]
