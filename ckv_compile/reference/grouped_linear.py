"""Linear layers of one input, side by side."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def grouped_linear(input: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
    """``[..., N1 + N2 + ...]`` for input ``[..., K]``, weights ``[Ni, K]`` and biases ``[Ni]`` or None."""
    return torch.cat([F.linear(input, weight, bias) for weight, bias in zip(weights, biases, strict=True)], -1)
