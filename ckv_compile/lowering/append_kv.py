"""``ckv::append_kv`` on CUDA: one small kernel for the keys and the values.

A scatter of Inductor's own would fuse with what computes the new keys, but Inductor times such kernels on copies of what
they write, and a copy of a nominal view has no room for the position.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.lowering import fallback_handler, register_lowering

from ckv_compile.lowering.template_call import Template, fixed, next_power_of_2, static_size

_op = torch.ops.ckv.append_kv.default

template = Template("append_kv", lambda meta: (meta["BATCH"] * meta["HEADS"], meta["TOKENS"], 1))


@register_lowering(_op, type_promotion_kind=None)
def append_kv(key: Any, value: Any, key_new: Any, value_new: Any, length: Any) -> None:
    if key.get_device().type != "cuda" or length.get_device().type != "cuda":  # prefill knows its length on the host
        return fallback_handler(_op)(key, value, key_new, value_new, length)
    batch, heads, tokens, dim = static_size(key_new)
    value_dim = static_size(value_new)[3]
    key, value = fixed(key, value)
    inputs = [*fixed(key_new, value_new, length), key, value]
    constants = constants_of(batch, heads, tokens, dim, value_dim)
    template(
        inputs, ([batch, heads, tokens], torch.int32), [key, value], constants, [{"num_warps": 1, "num_stages": 1}]
    )
    return None


def constants_of(batch: int, heads: int, tokens: int, dim: int, value_dim: int) -> dict[str, Any]:
    return {
        "BATCH": batch,
        "HEADS": heads,
        "TOKENS": tokens,
        "D": dim,
        "DV": value_dim,
        "BLOCK_D": next_power_of_2(max(dim, value_dim)),
    }
