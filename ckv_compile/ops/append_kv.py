"""``ckv::append_kv``: store the keys and values of new tokens in the cache."""

from __future__ import annotations

from torch import Tensor

from ckv_compile.ops.library import register_op, require, require_length


def _check(key: Tensor, value: Tensor, key_new: Tensor, value_new: Tensor, length: Tensor) -> None:
    require_length(length)
    for name, cache, new in (("key_new", key, key_new), ("value_new", value, value_new)):
        require(
            cache.dim() == 4 and new.dim() == 4 and new.shape[:2] == cache.shape[:2] and new.shape[3] == cache.shape[3],
            name,
            f"match the cache's batch, heads and head_dim {tuple(cache.shape)}",
            tuple(new.shape),
        )
        require(new.dtype == cache.dtype, name, f"have the cache's dtype {cache.dtype}", new.dtype)
    require(key_new.shape[2] == value_new.shape[2], "value_new", f"hold {key_new.shape[2]} tokens", value_new.shape[2])


register_op(
    "append_kv(Tensor(a!) key, Tensor(b!) value, Tensor key_new, Tensor value_new, Tensor length) -> ()",
    _check,
)
