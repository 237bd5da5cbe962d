"""SnapKV (Li et al. 2024): the tokens that the end of the prompt looks at."""

from __future__ import annotations

import torch
from torch import Tensor

from ckv_compile.policies.base import group_sum
from ckv_compile.policies.observed import ObservedPolicy, last_probabilities

WINDOW = 32  # queries at the end of the prompt that vote (section 4)
KERNEL = 7  # positions that are pooled


def votes(query: Tensor, key: Tensor, first: list[int], scale: float) -> Tensor:
    """Votes of the observation window, pooled over neighbouring positions: float32 [B, Hq, n].

    query: [B, Hq, Q, D], of which the last 32 vote with their probabilities; key: [B, Hkv, n, D]. Means over 7 positions
    keep what stands around a strong token.
    """
    window = min(WINDOW, query.shape[2])
    total = torch.zeros(*query.shape[:2], key.shape[2], device=query.device)
    for row, begin in enumerate(first):
        found = last_probabilities(query[row, :, -window:], key[row], begin, scale).sum(1)
        total[row, :, begin:] = torch.nn.functional.avg_pool1d(found, KERNEL, 1, KERNEL // 2)
    return total


class SnapKV(ObservedPolicy):
    """Importance: the votes of the prompt's last 32 queries, summed over the heads that share the list.

    A later prefill votes anew, over all that is cached.
    """

    def observe(
        self, state: dict[str, Tensor], query: Tensor, key: Tensor, length: int, first: list[int], scale: float
    ) -> None:
        importance = state["importance"]
        importance[..., : key.shape[2]] = group_sum(votes(query, key, first, scale), importance.shape[1])
