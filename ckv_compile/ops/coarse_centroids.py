"""``ckv::coarse_centroids``: mean and spread of the centroids of every group of communities."""

from __future__ import annotations

import torch
from torch import Tensor

from ckv_compile.index_layout import GROUP
from ckv_compile.ops.library import INT_DTYPES, register_op, require


def _check(centroid: Tensor, centroid_scale: Tensor, size: Tensor) -> None:
    require(centroid.dtype == torch.int8, "centroid", "be int8", centroid.dtype)
    require(
        centroid.dim() == 4 and centroid.shape[2] % GROUP == 0,
        "centroid",
        f"be [batch, graphs, communities, head_dim] with a multiple of {GROUP} communities",
        tuple(centroid.shape),
    )
    for name, tensor in (("centroid_scale", centroid_scale), ("size", size)):
        require(tensor.shape == centroid.shape[:3], name, f"be {tuple(centroid.shape[:3])}", tuple(tensor.shape))
    require(size.dtype in INT_DTYPES, "size", "be int32 or int64", size.dtype)


def _groups(centroid: Tensor, centroid_scale: Tensor) -> tuple[Tensor, Tensor]:
    batch, graphs, communities, dim = centroid.shape
    return (
        centroid.new_empty((batch, graphs, communities // GROUP, 2, dim)),
        centroid_scale.new_empty((batch, graphs, communities // GROUP, 2)),
    )


register_op(
    "coarse_centroids(Tensor centroid, Tensor centroid_scale, Tensor size) -> (Tensor, Tensor)",
    _check,
    _groups,
)
