"""True views behind nominal ones: the part of a cache or of index state that an operator works on.

A nominal view shows a few elements of a larger buffer; its strides and offset are those of the buffer. If a compiler
pass ever replaced the buffer by a copy, the copy would hold only the nominal part. Every view made here is checked
against its storage, so that such a copy raises instead of reading what lies behind it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _view(nominal: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, name: str) -> Tensor:
    needed = offset + 1
    for size, stride in zip(shape, strides, strict=True):
        if size == 0:
            needed = 0
            break
        needed += (size - 1) * stride
    held = nominal.untyped_storage().nbytes() // nominal.element_size()
    if needed > held:
        raise ValueError(
            f"{name} must be a view of a buffer of at least {needed} elements, got a storage of {held}: "
            "the buffer is too small, or a copy of the nominal view took its place"
        )
    return nominal.as_strided(shape, strides, offset)


def cache_prefix(nominal: Tensor, length: int, name: str) -> Tensor:
    """The first ``length`` tokens of a cache: [B, H, NOM, D] -> [B, H, length, D], sharing memory.

    Raises ValueError when the storage is too small.
    """
    batch, heads, _, dim = nominal.shape
    return _view(nominal, (batch, heads, length, dim), nominal.stride(), int(nominal.storage_offset()), name)


def layer_state(nominal: Tensor, layer: int, shape: tuple[int, ...], name: str) -> Tensor:
    """State of one layer, shaped ``shape``, out of a contiguous buffer [L, *shape] seen through a nominal view.

    Shares memory. Raises ValueError when the storage is too small.
    """
    strides, size = [], 1
    for extent in reversed(shape):
        strides.append(size)
        size *= extent
    offset = int(nominal.storage_offset()) + layer * size
    return _view(nominal, shape, tuple(reversed(strides)), offset, name)


def capacities(capacity: Tensor) -> tuple[int, int, int]:
    """(communities, tokens, log entries) that every graph of the index has room for; the layer's number follows."""
    communities, tokens, log_entries = capacity.tolist()[:3]
    return communities, tokens, log_entries


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 for float64 inputs."""
    return torch.promote_types(dtype, torch.float32)
