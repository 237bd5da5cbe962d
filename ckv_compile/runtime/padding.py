"""What a mask says about padding, read on the host."""

from __future__ import annotations

import torch


def left_padding(mask: torch.Tensor) -> list[int] | None:
    """First real token of each row of a padding mask ``[B, n]``, or None if a row is not zeros followed by ones."""
    real = mask != 0
    count = real.sum(-1)
    first = real.int().argmax(-1)
    regular = (count > 0) & (first + count == mask.shape[-1])
    first, regular = torch.stack([first, regular.to(first.dtype)]).tolist()
    return first if all(regular) else None


def padding_of_given(mask: torch.Tensor, length: int, batch: int) -> list[int] | None:
    """The same for a whole mask ``[B or 1, 1, Q, capacity]`` of queries at positions ``length ...``, bool or additive.

    None unless every query that is no padding itself sees exactly the real tokens up to its own position. An additive
    mask may hold nothing but zero, where a key is seen, and the least number of its dtype.
    """
    if mask.dtype.is_floating_point:
        seen = mask == 0
        if not bool((seen | (mask == torch.finfo(mask.dtype).min)).all()):
            return None
        mask = seen
    rows = mask[:, 0].expand(batch, -1, -1)
    queries = rows.shape[1]
    first = left_padding(rows[:, -1, : length + queries])
    if first is None:
        return None
    positions = torch.arange(rows.shape[2], device=mask.device)
    own = torch.arange(length, length + queries, device=mask.device)[:, None]
    begin = torch.tensor(first, device=mask.device)[:, None, None]
    expected = (positions >= begin) & (positions <= own)
    return first if bool(((rows == expected) | (own < begin)).all()) else None
