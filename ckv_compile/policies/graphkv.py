"""GraphKV (Li et al. 2025): SnapKV's tokens, less what resembles the strongest of them."""

from __future__ import annotations

import torch
from torch import Tensor

from ckv_compile.policies.base import graph_keys, group_sum
from ckv_compile.policies.observed import ObservedPolicy
from ckv_compile.policies.snapkv import votes

SOURCES = 16  # prompt tokens over source nodes


class GraphKV(ObservedPolicy):
    """One round of decay-signal propagation on the graph of key similarity: tokens like a strong one lose importance.

    The n / 16 tokens of most votes (SnapKV's) are sources and keep them. Any other token j gets
    votes_j * (1 - max over sources i of max(0, cos(k_i, k_j))): the strength of the decay is the similarity itself, and the
    number of sources a share of the prompt. A list of no more tokens than there are sources is SnapKV's.
    """

    def observe(
        self, state: dict[str, Tensor], query: Tensor, key: Tensor, length: int, first: list[int], scale: float
    ) -> None:
        importance = state["importance"]
        found = group_sum(votes(query, key, first, scale), importance.shape[1])  # [B, G, n]
        unit = torch.nn.functional.normalize(graph_keys(key, importance.shape[1]), dim=-1)
        sources = found.topk(max(1, found.shape[2] // SOURCES), -1).indices
        strong = unit.gather(2, sources[..., None].expand(-1, -1, -1, unit.shape[-1]))
        alike = (unit @ strong.transpose(2, 3)).amax(-1).clamp(0, 1)
        decayed = found * (1 - alike)
        importance[..., : key.shape[2]] = decayed.scatter(2, sources, found.gather(2, sources))
