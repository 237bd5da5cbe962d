"""Top-k neighbourhoods of the token graph: the second control of CommunityKV's table 7."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ckv_compile.policies.base import Step, TokenPolicy
from ckv_compile.policies.communities import nearest_keys


def edges_of(config: Any) -> int:
    """Nearest keys of a token that count: half of ``mean_size``, so that a token and its neighbours are about that many."""
    return max(1, min(config.kappa, config.mean_size // 2))


class Neighborhoods(TokenPolicy):
    """The best-scoring tokens one by one, each with everything one hop away, until the budget is full.

    A token's own score is the largest q . k of the graph's heads. The graph is that of nearest keys, with edges both ways.
    State ``neighbor``: int32 [B, G, N, edges], absolute positions, -1 for none.
    """

    state = ("neighbor",)

    def prepare(
        self, state: dict[str, Tensor], key: Tensor, start: int, stop: int, size: int, first: list[int], config: Any
    ) -> None:
        rows = torch.tensor(first, dtype=torch.int32)
        near = nearest_keys(key, rows, start, stop, size, config)[..., : state["neighbor"].shape[-1]]
        block = torch.arange(stop - start, dtype=torch.int32, device=near.device) // size * size + start
        state["neighbor"][:, :, start:stop] = torch.where(near >= 0, near + block[:, None], near)

    def scores(self, step: Step) -> Tensor:
        """Minus the place in line: of the seed that brings a token in, then of the token itself."""
        own = step.by_graph(step.choose(step.logits())).amax(2)  # [b, G, gap]
        gap = own.shape[-1]
        order = own.sort(dim=-1, descending=True, stable=True).indices
        place = torch.empty_like(order).scatter_(2, order, torch.arange(gap, device=own.device).expand_as(order))
        near = step.state["neighbor"][:, :, step.gap] - step.gap.start  # [b, G, gap, edges]
        known = (near >= 0) & (near < gap)
        near = near.clamp(0, gap - 1).long()
        asked = torch.where(known, place.gather(2, near.flatten(2)).view(near.shape), gap)
        seed = torch.minimum(place, asked.amin(3))  # edges from the token
        of_self = torch.where(known, place[..., None], gap).flatten(2)
        seed = seed.scatter_reduce(2, near.flatten(2), of_self, "amin")  # and to it
        return -(seed * (gap + 1) + place)
