"""Mean key of every community."""

from __future__ import annotations

import torch
from torch import Tensor

from ckv_compile.reference.nominal import accumulate_dtype


def community_centroids(key: Tensor, member: Tensor, start: Tensor, size: Tensor) -> Tensor:
    """Average the keys of each community, accumulating in float32 and in member order (no atomics).

    key: [B, H, n, D] (the real keys, not a nominal view). member: int [B, G, M], positions below n.
    start, size: int [B, G, C]; community c holds ``member[start[c] : start[c] + size[c]]``; an empty one gives zeros.
    Graph g reads key head g * H // G; one graph over several heads averages the heads' keys side by side.
    Returns [B, G, C, D] in key's dtype, or [B, 1, C, H * D] with one graph over H heads.
    """
    batch, graphs, num_communities = start.shape
    heads, dim = key.shape[1], key.shape[3]
    if graphs == 1 and heads > 1:
        key = key.transpose(1, 2).flatten(2).unsqueeze(1)
        heads, dim = 1, heads * dim
    out = key.new_zeros((batch, graphs, num_communities, dim))
    dtype = accumulate_dtype(key.dtype)
    for row in range(batch):
        for graph in range(graphs):
            sizes = size[row, graph].long().clamp(min=0)
            ends = sizes.cumsum(0)
            if num_communities == 0 or int(ends[-1]) == 0:
                continue
            shift = (start[row, graph].long() - ends + sizes).repeat_interleave(sizes)
            order = torch.arange(len(shift), device=key.device) + shift
            tokens = member[row, graph].index_select(0, order)
            keys = key[row, graph * heads // graphs].index_select(0, tokens).to(dtype)
            total = torch.segment_reduce(keys, "sum", lengths=sizes, axis=0, initial=0)
            out[row, graph] = (total / sizes.clamp(min=1)[:, None]).to(key.dtype)
    return out
