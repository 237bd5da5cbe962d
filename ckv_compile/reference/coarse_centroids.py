"""Mean and spread of the centroids of every group of communities, in 8 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from ckv_compile.index_layout import GROUP


def coarse_centroids(centroid: Tensor, centroid_scale: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """What ``route_coarse`` scores groups of ``GROUP`` consecutive communities by.

    centroid: int8 [B, G, C, D], centroid_scale: float32 [B, G, C], size: int [B, G, C] tokens, C a multiple of GROUP.
    With x = centroid * centroid_scale, in units of ``channel_scale`` (see ``encode_centroids``), and weights
    w = size / sum of sizes over a group's communities that have members:

        mean = sum w x,  spread = sqrt(sum w (x - mean)^2), by channel.

    Returns code int8 [B, G, C / GROUP, 2, D], mean then spread, and scale float32 [B, G, C / GROUP, 2], so that each is
    about code * scale; scales are the largest magnitude over 127. A group without members has -1 for the spread's scale.
    """
    batch, graphs, communities, dim = centroid.shape
    shape = (batch, graphs, communities // GROUP, GROUP)
    present = size.reshape(shape) > 0
    weight = torch.where(present, size.reshape(shape), 0).float()[..., None]  # [B, G, K, GROUP, 1]
    x = centroid.reshape(*shape, dim).float() * centroid_scale.reshape(shape)[..., None]
    x = torch.where(present[..., None], x, 0.0)
    total = weight.sum(3).clamp(min=1)  # [B, G, K, 1]
    mean = (weight * x).sum(3) / total
    spread = ((weight * (x - mean[:, :, :, None]).square()).sum(3) / total).sqrt()
    both = torch.stack([mean, spread], 3)  # [B, G, K, 2, D]
    scale = both.abs().amax(-1) / 127
    code = (both / torch.where(scale > 0, scale, 1.0)[..., None]).round_().clamp_(-127, 127).to(torch.int8)
    scale[..., 1] = torch.where(present.any(-1), scale[..., 1], -1.0)
    return code, scale
