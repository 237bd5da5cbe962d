"""Edges like those of text, for models of random weights: theirs make every token attend to the same few.

Every token has a subject of its own kind per list, drawn so that a subject has some ``SUBJECT`` tokens all over the
context. Half of a token's list are the tokens before it in its subject, the nearest first; a quarter, the positions right
before it; a quarter, earlier positions at random. Weights fall geometrically along the list.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ckv_compile.runtime.sequence import Sequence

SUBJECT = 64  # tokens of a subject, on average
DECAY = 0.6


def planted_lists(
    tokens: int, lists: int, kappa: int, device: torch.device | str, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """(neighbor int32, -1 where there is none, weight float32), both ``[lists, tokens, kappa]``; causal, none twice."""
    generator = torch.Generator(device).manual_seed(seed)
    position = torch.arange(tokens, device=device)
    own, near = kappa // 2, kappa // 4
    neighbor = torch.full((lists, tokens, kappa), -1, dtype=torch.int64, device=device)
    for one in neighbor:
        subject = torch.randint(0, max(1, tokens // SUBJECT), (tokens,), device=device, generator=generator)
        order = torch.argsort(subject, stable=True)
        for back in range(1, own + 1):
            same = subject[order[back:]] == subject[order[:-back]]
            one[order[back:][same], back - 1] = order[:-back][same]
        for back in range(1, near + 1):
            one[back:, own + back - 1] = position[:-back]
        for column in range(own + near, kappa):
            share = torch.rand(tokens, device=device, generator=generator)
            one[1:, column] = (share * position).long()[1:]
    ordered, place = neighbor.sort(-1)
    twice = torch.zeros_like(ordered, dtype=torch.bool)
    twice[..., 1:] = ordered[..., 1:] == ordered[..., :-1]
    neighbor.masked_fill_(torch.zeros_like(twice).scatter_(-1, place, twice), -1)
    weight = (DECAY ** torch.arange(kappa, device=device)).expand_as(neighbor) * (neighbor >= 0)
    return neighbor.int(), (weight / weight.sum(-1, keepdim=True).clamp_min(1e-6)).float()


@contextlib.contextmanager
def planted_edges() -> Iterator[None]:
    """Prompts of one row that are prefilled inside get these lists in place of their attention's, computed all the same."""
    original, made = Sequence.offer, {}

    def offer(self: Sequence, layer: int, key: Tensor, length: int, num_new: int, neighbor: Any, weight: Any) -> None:
        if neighbor is not None and length == 0:
            shape = neighbor.shape[1:]
            if shape not in made:
                made.clear()
                made[shape] = planted_lists(shape[1], shape[0], shape[2], neighbor.device)
            neighbor.copy_(made[shape][0].to(neighbor.dtype))
            weight.copy_(made[shape][1].to(weight.dtype))
        original(self, layer, key, length, num_new, neighbor, weight)

    Sequence.offer = offer  # type: ignore[method-assign]
    try:
        yield
    finally:
        Sequence.offer = original  # type: ignore[method-assign]
