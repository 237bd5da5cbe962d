"""Mean keys of communities in 8 bits."""

from __future__ import annotations

import torch
from torch import Tensor


def encode_centroids(mean: Tensor, channel_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Codes in -127 .. 127 such that mean is about code * scale * channel_scale.

    mean: [..., C, D]. channel_scale: float32 [..., D], positive; it evens out channels of very different size, so that
    the largest of them does not set the step of all. scale is the largest |mean / channel_scale| of a row over 127.
    Returns code int8 [..., C, D] and scale float32 [..., C]; a row of zeros has scale 0.
    """
    even = mean.float() / channel_scale[..., None, :]
    scale = even.abs().amax(-1) / 127
    code = (even / torch.where(scale > 0, scale, 1.0)[..., None]).round_().clamp_(-127, 127)
    return code.to(torch.int8), scale


def decode_centroids(code: Tensor, scale: Tensor, channel_scale: Tensor) -> Tensor:
    """The means that ``encode_centroids`` gave codes, in float32: each entry to half a step, scale * channel_scale."""
    return code.float() * scale[..., None] * channel_scale[..., None, :]
