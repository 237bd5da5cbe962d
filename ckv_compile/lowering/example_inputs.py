"""Inputs to time configurations on, where ``max_autotune`` asks for it.

Inductor would draw tensors of an input's size; the size of a nominal view is no size to run on, and random lengths and
ids would lead anywhere. So each argument of a template that is a view or an index has a maker here, for one layer of
8,192 communities of 8 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._inductor.virtualized import V

COMMUNITIES, MEMBERS = 8192, 8
TOKENS = COMMUNITIES * MEMBERS
NEW = 8  # tokens of a step, at most


def makers(batch: int, graphs: int, width: int, slots: int, budget: int) -> dict[str, Callable[[Any], Tensor]]:
    """By the template's argument: a function of Inductor's node that makes a tensor on its device.

    width: of a centroid, or of the new keys of a row. slots: of a shortlist. budget: of a list of tokens.
    """
    lists = batch * graphs

    def integers(*values: Any) -> Callable[[Any], Tensor]:
        return lambda node: torch.tensor(values, dtype=torch.int32, device=node.get_device())

    def full(count: int, value: float, dtype: torch.dtype = torch.int32) -> Callable[[Any], Tensor]:
        return lambda node: torch.full((count,), value, dtype=dtype, device=node.get_device())

    def scores(node: Any) -> Tensor:
        return torch.randn(lists * COMMUNITIES, device=node.get_device())

    def shortlist(node: Any) -> Tensor:
        entries = torch.empty(lists, 5, slots, dtype=torch.int32, device=node.get_device())
        entries[:, 0] = torch.randn(lists, slots, device=node.get_device()).add_(2).view(torch.int32)
        entries[:, 1] = torch.arange(slots, device=node.get_device()) * max(1, COMMUNITIES // slots)
        entries[:, 2] = MEMBERS
        entries[:, 3] = entries[:, 1] * MEMBERS
        entries[:, 4] = MEMBERS
        return entries.view(batch, graphs, 5, slots)

    def listed(node: Any) -> Tensor:
        order = torch.randint(TOKENS, (lists, budget), dtype=torch.int32, device=node.get_device())
        return order.view(batch, graphs, budget)

    def positions(node: Any) -> Tensor:
        return torch.arange(TOKENS, dtype=torch.int32, device=node.get_device()).repeat(lists)

    def starts(node: Any) -> Tensor:
        return positions(node).view(lists, TOKENS)[:, ::MEMBERS].contiguous().view(-1)

    return {
        "CENTROID": lambda node: torch.randint(
            -127, 128, (lists * COMMUNITIES * width,), dtype=torch.int8, device=node.get_device()
        ),
        "CENTROID_SCALE": full(lists * COMMUNITIES, 0.01, torch.float32),
        "CHANNEL_SCALE": full(lists * width, 1.0, torch.float32),
        "SIZE": full(lists * COMMUNITIES, MEMBERS),
        "STORED": full(lists * COMMUNITIES, MEMBERS),
        "START": starts,
        "MEMBER": positions,
        "NUMBER": full(lists, COMMUNITIES),
        "SCORES": scores,
        "SHORTLIST": shortlist,
        "LEFT_OUT": lambda node: torch.full(
            [V.graph.sizevars.guard_int(size) for size in node.get_size()], -4.0, device=node.get_device()
        ),
        "LOG": full(lists, 0),
        "LOG_FIRST": full(batch, TOKENS),
        "N_INDEXED": full(batch, TOKENS),
        "CAPACITY": integers(COMMUNITIES, TOKENS, 1, 0),
        "LENGTH": integers(TOKENS),
        "FIRST": full(batch, 0),
        "TALLY": full(2, 0, torch.int64),
        "TOKENS": listed,
        "COUNT": lambda node: torch.full((batch, graphs), budget, dtype=torch.int32, device=node.get_device()),
        "NEW_KEY": lambda node: torch.empty(batch * width, dtype=node.get_dtype(), device=node.get_device()),
        "KEY": _cache,
        "VALUE": _cache,
    }


def _cache(node: Any) -> Tensor:
    """A cache of all the tokens and a step's new ones with the strides of the nominal view, of which that many are shown."""
    guard = V.graph.sizevars.guard_int
    sizes, strides = ([guard(x) for x in part] for part in (node.get_size(), node.get_stride()))
    batch, heads, _, dim = sizes
    last = (
        (batch - 1) * strides[0] + (heads - 1) * strides[1] + (TOKENS + NEW - 1) * strides[2] + (dim - 1) * strides[3]
    )
    memory = torch.randn(last + 1, device=node.get_device()).to(node.get_dtype())
    return memory.as_strided((batch, heads, TOKENS + NEW, dim), strides)
