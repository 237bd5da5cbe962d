"""SparQ attention (Ribar et al. 2024): products over the largest channels of the query only."""

from __future__ import annotations

import torch
from torch import Tensor

from ckv_compile.policies.base import Step, TokenPolicy
from ckv_compile.reference.attended import grouped_scores

CHANNELS = 4  # head_dim over the channels r that are read


class SparQ(TokenPolicy):
    """Algorithm 1: the tokens of largest s^ = softmax(q_r . K_r / sqrt(d |q_r|_1 / |q|_1)), r the channels of largest |q|.

    There are head_dim / 4 of them. Heads that share keys share the channels, those of largest sum of |q|, and the list, by
    the sum of s^ (the paper's appendix on grouped queries). Its mean-value correction changes attention itself, not the
    list, and is left out. 1 / sqrt(d) is the model's own scale.
    """

    def scores(self, step: Step) -> Tensor:
        batch, heads, queries, dim = step.query.shape
        kv_heads = step.key.shape[1]
        size = step.query.abs().reshape(batch, kv_heads, -1, dim)  # [b, Hkv, heads * Q, D]
        channels = size.sum(2).topk(max(1, dim // CHANNELS), -1).indices  # [b, Hkv, r]
        keys = step.key[:, :, step.span.first :]
        keys = keys.gather(3, channels[:, :, None].expand(-1, -1, keys.shape[2], -1))
        own = step.query.reshape(size.shape).gather(3, channels[:, :, None].expand(-1, -1, size.shape[2], -1))
        covered = own.abs().sum(-1) / size.sum(-1).clamp(min=1e-20)  # |q_r|_1 / |q|_1
        own = own * (step.scale / covered.clamp(min=1e-20).sqrt())[..., None]
        logits = grouped_scores(own.reshape(batch, heads * queries, -1), keys).unflatten(1, (heads, queries))
        if queries > 1:
            later = torch.ones(queries, queries, dtype=torch.bool, device=own.device).triu_(1)
            logits[..., -queries:].masked_fill_(later, -torch.inf)
        return step.by_graph(step.choose(logits.softmax(-1))).sum(2)
