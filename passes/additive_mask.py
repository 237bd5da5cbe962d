"""Additive masks: floating-point tensors that are zero where a key is seen and the least number of their type elsewhere.

Added to a score, the least number leaves nothing of it, so such a mask says what a bool one says. One that holds
anything else changes scores: it is a bias, and no mask.
"""

from __future__ import annotations

import torch
from torch import fx

from ckv_compile.passes.attention_call import dtype_of
from ckv_compile.passes.index_expressions import is_tensor, mutated_argument, target_name


def seen_condition(mask: fx.Node) -> tuple[fx.Node, bool] | None:
    """The bool tensor that an additive mask is made from, and whether it is true where a key is seen; else where not.

    Known is ``where(condition, 0, least)``, either way round, where ``least`` is at most ``finfo(dtype).min``. None for
    anything else.
    """
    mask = _unconverted(mask)
    if mask.op not in ("call_function", "call_method") or target_name(mask) != "where" or mask.kwargs:
        return None
    if len(mask.args) != 3 or not is_tensor(mask.args[0]) or dtype_of(mask.args[0]) != torch.bool:
        return None
    condition, *values = mask.args
    kinds = [_kind(value, dtype_of(mask)) for value in values]
    return {("zero", "least"): (condition, True), ("least", "zero"): (condition, False)}.get(tuple(kinds))


def given_mask(mask: fx.Node) -> fx.Node | None:
    """The graph input that an additive mask is, contents unknown until run time."""
    mask = _unconverted(mask)
    return mask if mask.op == "placeholder" and not _is_written(mask) else None


def _is_written(tensor: fx.Node) -> bool:
    return any(mutated_argument(user) is tensor for user in tensor.users)


def _unconverted(mask: fx.Node) -> fx.Node:
    """Without copies and conversions that change nothing."""
    while mask.op == "call_method" and mask.target in ("to", "contiguous", "clone", "type", "detach"):
        source = mask.args[0]
        if not is_tensor(source) or dtype_of(source) != dtype_of(mask):
            break
        mask = source
    return mask


def _kind(value: object, dtype: torch.dtype) -> str | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "zero" if value == 0 else "least" if value <= torch.finfo(dtype).min else None
    if not is_tensor(value) or value.op not in ("call_function", "call_method") or _is_written(value):
        return None
    if target_name(value) == "tensor" and len(value.args) == 1 and isinstance(value.args[0], int | float):
        return _kind(value.args[0], dtype_of(value))
    return "zero" if target_name(value) in ("zeros", "new_zeros", "zeros_like") else None
