"""What the eviction policies share: the importance that the prompt's attention gave to its tokens."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ckv_compile.policies.base import Step, TokenPolicy
from ckv_compile.reference.nominal import accumulate_dtype


class ObservedPolicy(TokenPolicy):
    """A static selection: the tokens of most ``importance``, which a prefill sets and decode steps leave alone.

    importance: float32 [B, G, N], infinite where no prefill was seen: tokens generated since are kept, as far as there is
    room, and the newest of them first. What is not chosen could come back with more room; nothing is freed.
    """

    state: ClassVar[tuple[str, ...]] = ("importance",)
    sees_prompt: ClassVar[bool] = True

    def scores(self, step: Step) -> Tensor:
        return step.state["importance"][..., step.gap]


def last_probabilities(query: Tensor, key: Tensor, first: int, scale: float) -> Tensor:
    """alpha (eq. 1) of the last queries of one row over its keys ``first ..``.

    query: [Hq, w, D], of the last w positions; key: [Hkv, n, D]. Returns float32 [Hq, w, n - first], 0 after a query's own
    position; a query of padding gives zeros.
    """
    heads, window, _ = query.shape
    n = key.shape[1]
    dtype = accumulate_dtype(query.dtype)
    keys = key[:, first:].to(dtype).repeat_interleave(heads // key.shape[0], 0)
    scores = (query.to(dtype) * scale) @ keys.transpose(1, 2)
    own = torch.arange(n - window, n, device=key.device)[:, None]
    scores.masked_fill_(torch.arange(first, n, device=key.device) > own, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0)
