"""Store new tokens in the cache."""

from __future__ import annotations

from torch import Tensor

from ckv_compile.reference.nominal import cache_prefix


def append_kv(key: Tensor, value: Tensor, key_new: Tensor, value_new: Tensor, length: Tensor) -> None:
    """Write ``key_new`` and ``value_new`` at positions ``length`` .. ``length + Q - 1``.

    key, value: nominal views [B, Hkv, NOM, D] of the cache, mutated. key_new, value_new: [B, Hkv, Q, D].
    length: int [1], tokens in the cache before; it is not advanced here.
    Raises ValueError when the cache has no room.
    """
    start = int(length)
    if start < 0:
        raise ValueError(f"length must be at least 0, got {start}")
    stop = start + key_new.shape[2]
    cache_prefix(key, stop, "key")[:, :, start:].copy_(key_new)
    cache_prefix(value, stop, "value")[:, :, start:].copy_(value_new)
