"""``ckv::encode_centroids``: mean keys of communities in 8 bits, as ``route`` reads them."""

from __future__ import annotations

import torch
from torch import Tensor

from ckv_compile.ops.library import register_op, require


def _check(mean: Tensor, channel_scale: Tensor) -> None:
    require(mean.dim() >= 2, "mean", "be [..., communities, dim]", tuple(mean.shape))
    wanted = (*mean.shape[:-2], mean.shape[-1])
    require(channel_scale.shape == wanted, "channel_scale", f"be {wanted}", tuple(channel_scale.shape))
    require(channel_scale.dtype == torch.float32, "channel_scale", "be float32", channel_scale.dtype)


def _codes(mean: Tensor) -> tuple[Tensor, Tensor]:
    return mean.new_empty(mean.shape, dtype=torch.int8), mean.new_empty(mean.shape[:-1], dtype=torch.float32)


register_op(
    "encode_centroids(Tensor mean, Tensor channel_scale) -> (Tensor, Tensor)",
    _check,
    _codes,
)
