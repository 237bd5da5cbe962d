"""Recognizes attention that is not a scaled_dot_product_attention call, so that reports can name it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import fx

from ckv_compile.passes.index_expressions import is_tensor, target_name

_PRODUCTS = frozenset({"matmul", "bmm", "baddbmm", "einsum", "__matmul__"})
# What eager attention does between the products, apart from softmax.
_BETWEEN = frozenset(
    {
        "mul", "imul", "mul_", "div", "truediv", "itruediv", "div_", "add", "iadd", "add_", "sub", "sub_", "tanh",
        "where", "masked_fill", "masked_fill_", "to", "type", "float", "half", "bfloat16", "type_as", "cat", "concat",
        "getitem", "dropout", "max", "amax", "clamp", "view", "reshape", "expand", "contiguous", "transpose", "softmax",
        "nan_to_num",
    }
)  # fmt: skip


def describe_other_attention(node: fx.Node) -> str | None:
    """Why this attention is left alone, or None if ``node`` is no attention."""
    if node.op not in ("call_function", "call_method"):
        return None
    name = target_name(node)
    if name == "softmax":
        return _describe_eager(node)
    if node.op == "call_function" and node.target is not F.scaled_dot_product_attention:
        full = (
            str(node.target) if isinstance(node.target, torch._ops.OpOverload | torch._ops.OpOverloadPacket) else name
        )
        for part, what in (
            ("flex_attention", "flex_attention"),
            ("scaled_dot_product", "a backend-specific scaled_dot_product_attention"),
            ("flash_attn", "a FlashAttention kernel"),
            ("flash_attention", "a FlashAttention kernel"),
            ("varlen_attn", "variable-length attention"),
            ("multi_head_attention_forward", "torch.nn.MultiheadAttention"),
        ):
            if part in full.lower():
                return f"{what} ({name}); load the model with attn_implementation='sdpa'"
    return None


def _describe_eager(softmax: fx.Node) -> str | None:
    before = _reach(softmax, lambda node: node.all_input_nodes)
    if not any(target_name(node) in _PRODUCTS for node in before):
        return None
    after = _reach(softmax, lambda node: list(node.users))
    if not any(target_name(node) in _PRODUCTS for node in after):
        return None
    between = {target_name(node) for node in before}
    if "cat" in between or "concat" in between:
        return "eager attention with learned sink logits; scaled_dot_product_attention has no argument for them"
    if "tanh" in between:
        return "eager attention with softcap (tanh of the scores), which scaled_dot_product_attention does not have"
    return "eager attention (matmul and softmax); load the model with attn_implementation='sdpa'"


def _reach(start: fx.Node, step) -> set[fx.Node]:
    """Tensor nodes reached from ``start`` through element-wise operations, ending at whatever is not one."""
    seen, pending = set(), step(start)
    while pending:
        node = pending.pop()
        if node in seen or (not is_tensor(node) and node.op != "call_function"):
            continue
        seen.add(node)
        if target_name(node) in _BETWEEN:
            pending.extend(step(node))
    return seen


def nested_attention(gm: fx.GraphModule, node: fx.Node) -> Iterator[str]:
    """One reason per attention inside the graphs that ``node`` calls (checkpointing, conditions)."""
    if node.op != "call_function" or target_name(node) in ("flex_attention",):
        return
    for argument in node.all_input_nodes:
        if argument.op != "get_attr":
            continue
        nested = gm
        for part in argument.target.split("."):
            nested = getattr(nested, part, None)
        if isinstance(nested, fx.GraphModule):
            for inner in nested.graph.nodes:
                is_sdpa = inner.op == "call_function" and inner.target is F.scaled_dot_product_attention
                if is_sdpa or describe_other_attention(inner) is not None:
                    yield f"attention inside a nested graph ({target_name(node)}: checkpointing or a condition)"
                yield from nested_attention(nested, inner)
