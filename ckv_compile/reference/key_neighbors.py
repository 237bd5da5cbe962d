"""Nearest earlier keys by cosine, inside one block of the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from ckv_compile.reference.nominal import accumulate_dtype, cache_prefix
from ckv_compile.reference.top_entries import top_entries

ROWS_PER_BLOCK = 128


def unit_keys(key: Tensor, join_heads: bool) -> Tensor:
    """Keys [B, H, n, D] scaled to length 1 in float32; a zero key stays zero.

    With ``join_heads`` the heads' unit keys lie side by side, so that a product is the sum of their cosines:
    [B, 1, n, H * D].
    """
    key = key.to(accumulate_dtype(key.dtype))
    norm = torch.linalg.vector_norm(key, dim=-1, keepdim=True)
    unit = key / torch.where(norm > 0, norm, 1.0)
    if join_heads:
        unit = unit.transpose(1, 2).flatten(2).unsqueeze(1)
    return unit


def key_neighbors(
    key: Tensor,
    first: Tensor,
    start: int,
    stop: int,
    kappa: int,
    num_sink_tokens: int,
    join_heads: bool,
    block_size: int = 0,
) -> Tensor:
    """For each token of a block, the ``kappa`` earlier tokens of the block with the most similar keys.

    key: nominal view [B, Hkv, NOM, D]; positions ``start`` .. ``stop - 1`` are read. first: int [B].
    block_size: tokens of a block, counted from ``start``, each block for itself; 0 means that there is one.
    Only positions from ``first + num_sink_tokens`` on are nodes; others neither have nor are neighbours.
    Returns int32 [B, G, stop - start, kappa], positions relative to the block's first in order of similarity, -1 where
    there are fewer; G is 1 with ``join_heads`` (sum of the heads' cosines), the number of KV heads without.
    """
    if block_size and stop - start > block_size:
        blocks = [(begin, min(begin + block_size, stop)) for begin in range(start, stop, block_size)]
        parts = [key_neighbors(key, first, *block, kappa, num_sink_tokens, join_heads) for block in blocks]
        return torch.cat(parts, dim=2)
    num_tokens = stop - start
    keys = cache_prefix(key, stop, "key")[:, :, start:]
    graphs = 1 if join_heads else key.shape[1]
    neighbor = torch.full((key.shape[0], graphs, num_tokens, kappa), -1, dtype=torch.int32, device=key.device)
    for row, pads in enumerate(first.tolist()):
        begin = max(0, pads + num_sink_tokens - start)
        if num_tokens - begin < 2:
            continue
        nodes = unit_keys(keys[row : row + 1, :, begin:], join_heads)[0]  # [G, n, D]
        for top in range(0, nodes.shape[1], ROWS_PER_BLOCK):
            end = min(top + ROWS_PER_BLOCK, nodes.shape[1])
            similarity = nodes[:, top:end] @ nodes[:, :end].transpose(1, 2)
            itself = torch.ones(end - top, end - top, dtype=torch.bool, device=key.device).triu_()
            similarity[:, :, top:].masked_fill_(itself, -torch.inf)
            values, columns = top_entries(similarity, kappa)
            columns = (columns + begin).masked_fill_(values == -torch.inf, -1)
            neighbor[row, :, begin + top : begin + end, : columns.shape[-1]] = columns.to(torch.int32)
    return neighbor
