"""Whether the block lists of flex_attention visit what a causal mask with left padding lets queries see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def visits_causal(
    lists: Sequence[Any],
    first: list[int],
    past: int,
    queries: int,
    query_block: int,
    key_block: int,
    keys: int | None = None,
) -> bool:
    """True if every key that a query may see is visited once and none besides. Waits for the device.

    lists: kv_num_blocks [B, 1 or heads, query blocks], kv_indices [B, 1 or heads, query blocks, key blocks] and the same
    of full blocks or None, which are seen without a mask; batches of one stand for all rows. Query ``i`` is at position
    ``past + i`` and may see ``first`` .. its own. Blocks that no query of theirs may see need not be visited. keys: how
    many there are, if more than are written so far: a static cache has room behind them.
    """
    device, total = lists[0].device, keys or past + queries
    begin_query = torch.arange(0, queries, query_block, device=device)[:, None]
    begin_key = torch.arange(0, total, key_block, device=device)
    end_key = (begin_key + key_block).clamp(max=total)
    begin = torch.tensor(first, device=device)[:, None, None, None]
    last_own = past + (begin_query + query_block).clamp(max=queries) - 1
    some = (begin_key <= last_own) & (end_key > begin) & (last_own >= begin)
    every = (begin_key >= begin) & (end_key - 1 <= past + begin_query)
    shape = begin_query.shape[0], begin_key.shape[0]
    partial, in_range = _visits(lists[0], lists[1], shape)
    full = torch.zeros_like(partial)
    if lists[2] is not None and lists[3] is not None:
        full, full_in_range = _visits(lists[2], lists[3], shape)
        in_range = in_range & full_in_range
    visits = partial + full
    right = (visits <= 1) & ((visits == 1) | ~some) & ((full == 0) | every)
    return bool(in_range & right.all())


def _visits(count: Tensor, index: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """How often each key block is listed, [B, heads, query blocks, key blocks], and whether all entries name one."""
    query_blocks, key_blocks = shape
    if index.shape[2] < query_blocks:
        return index.new_zeros(1, 1, *shape), torch.zeros((), dtype=torch.bool, device=index.device)
    count, index = count[:, :, :query_blocks, None], index[:, :, :query_blocks].long()
    listed = torch.arange(index.shape[3], device=index.device) < count
    fits = (index >= 0) & (index < key_blocks)
    visits = torch.zeros(*index.shape[:3], key_blocks, dtype=torch.int32, device=index.device)
    visits.scatter_add_(3, index.where(fits, 0), (listed & fits).to(torch.int32))
    return visits, (fits | ~listed).all() & (count <= index.shape[3]).all()
