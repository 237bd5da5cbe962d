"""H2O (Zhang et al. 2023): heavy hitters, the tokens that gathered most attention."""

from __future__ import annotations

import torch
from torch import Tensor

from ckv_compile.policies.base import group_sum
from ckv_compile.policies.observed import ObservedPolicy
from ckv_compile.reference.causal_blocks import causal_score_blocks


class H2O(ObservedPolicy):
    """Importance of a key: its probability summed over all queries of the prompt and the heads that share the list.

    H2O evicts while it reads and goes on summing while it writes; this is its selection at the end of the prompt.
    """

    def observe(
        self, state: dict[str, Tensor], query: Tensor, key: Tensor, length: int, first: list[int], scale: float
    ) -> None:
        importance = state["importance"]
        batch, heads, queries, _ = query.shape
        group = heads // key.shape[1]
        total = torch.zeros(batch, heads, length + queries, device=query.device)
        for row, begin in enumerate(first):
            pads = min(begin, length + queries)
            skip = max(0, pads - length)  # queries of padding
            arguments = query[row, :, skip:], key[row, :, pads:], key[row, :, pads:], max(0, length - pads), scale
            for head, _, scores, _ in causal_score_blocks(*arguments):
                own = slice(head * group, (head + 1) * group)
                total[row, own, pads : pads + scores.shape[2]] += scores.softmax(-1).sum(1)
        found = group_sum(total, importance.shape[1])
        before = importance[..., :length]
        found[..., :length] += torch.where(torch.isinf(before), 0.0, before)
        importance[..., : length + queries] = found
