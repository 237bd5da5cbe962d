"""Recognizes attention in forms that are not rewritten, so that reports can name it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from ckv_compile.passes.attention_call import is_sdpa
from ckv_compile.passes.eager_attention import is_eager_attention
from ckv_compile.passes.flex_attention import is_flex_attention
from ckv_compile.passes.index_expressions import target_name


def describe_other_attention(node: fx.Node) -> str | None:
    """Why this attention is left alone, or None if ``node`` is no attention."""
    if node.op not in ("call_function", "call_method"):
        return None
    name = target_name(node)
    if node.op == "call_function" and not is_sdpa(node) and not is_flex_attention(node):
        full = (
            str(node.target) if isinstance(node.target, torch._ops.OpOverload | torch._ops.OpOverloadPacket) else name
        )
        for part, what in (
            ("scaled_dot_product", "a backend-specific scaled_dot_product_attention"),
            ("flash_attn", "a FlashAttention kernel"),
            ("flash_attention", "a FlashAttention kernel"),
            ("varlen_attn", "variable-length attention"),
            ("multi_head_attention_forward", "torch.nn.MultiheadAttention"),
        ):
            if part in full.lower():
                return f"{what} ({name}); load the model with attn_implementation='sdpa'"
    return None


def nested_attention(gm: fx.GraphModule, node: fx.Node) -> Iterator[str]:
    """One reason per attention inside the graphs that ``node`` calls (checkpointing, conditions)."""
    if node.op != "call_function" or is_flex_attention(node):
        return
    for argument in node.all_input_nodes:
        if argument.op != "get_attr":
            continue
        nested = gm
        for part in argument.target.split("."):
            nested = getattr(nested, part, None)
        if isinstance(nested, fx.GraphModule):
            for inner in nested.graph.nodes:
                forms = (is_sdpa, is_eager_attention, is_flex_attention, describe_other_attention)
                if any(form(inner) for form in forms):
                    yield f"attention inside a nested graph ({target_name(node)}: checkpointing or a condition)"
                yield from nested_attention(nested, inner)
