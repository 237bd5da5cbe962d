"""``ckv::append_kv`` as a scatter of Inductor's own, which fuses with what computes the new keys and values."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import fallback_handler, register_lowering
from torch._inductor.virtualized import V, ops

_op = torch.ops.ckv.append_kv.default


@register_lowering(_op, type_promotion_kind=None)
def append_kv(key: Any, value: Any, key_new: Any, value_new: Any, length: Any) -> None:
    if key.get_device().type != "cuda" or length.get_device().type != "cuda":  # prefill knows its length on the host
        return fallback_handler(_op)(key, value, key_new, value_new, length)
    for cache, new in ((key, key_new), (value, value_new)):
        _store(cache, new, length)
    return None


def _store(cache: Any, new: Any, length: Any) -> None:
    """cache[:, :, length + t] = new[:, :, t]; in int64, and past the nominal size of the cache."""
    cache.realize()
    source, position = new.make_loader(), length.make_loader()

    def target(index):
        row, head, token, channel = index
        at = ops.add(
            ops.to_dtype(position([0] * len(length.get_size())), torch.int64), ops.index_expr(token, torch.int64)
        )
        return [row, head, ops.indirect_indexing(at, 1 << 40, check=False, wrap_neg=False), channel]

    scatter = ir.Scatter(
        device=cache.get_device(),
        dtype=cache.get_dtype(),
        inner_fn=source,
        ranges=list(new.get_size()),
        output_indexer=target,
        scatter_mode=None,
    )
    buffer = ir.ComputedBuffer(name=None, layout=ir.MutationLayoutSHOULDREMOVE(cache), data=scatter)
    buffer.name = V.graph.register_buffer(buffer)
    V.graph.register_operation(buffer)
