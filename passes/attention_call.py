"""One attention as a graph spells it: operands, mask, scale. Nothing of it is judged yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from ckv_compile.passes.index_expressions import is_tensor, memory_owner, mutated_argument
from ckv_compile.passes.kv_sources import RefusedError


@dataclass(frozen=True)
class BlockLists:
    """The blocks of keys that flex_attention visits; what they leave out is not seen, whatever the mask says.

    kv_num_blocks [batch, 1 or heads, query blocks], kv_indices [batch, 1 or heads, query blocks, key blocks]: graph
    inputs, int32. In these blocks the mask applies; the ``full`` ones, if there are any, are seen without it.
    """

    kv_num_blocks: fx.Node
    kv_indices: fx.Node
    full_kv_num_blocks: fx.Node | None
    full_kv_indices: fx.Node | None
    query_block: int
    key_block: int


@dataclass(frozen=True)
class FlexMask:
    """The mask of flex_attention: a graph of one element, called with (batch, head, query, key, *buffers)."""

    graph: fx.Graph
    buffers: tuple[Any, ...]
    blocks: BlockLists


@dataclass(frozen=True)
class AttentionCall:
    """``softmax(query @ key.T * scale + mask) @ value``, however many nodes it takes.

    node: gives the output [batch, num_query_heads, num_queries, head_dim]; what stands for the attention replaces it.
    query, key, value: 4-D as the attention reads them, repeated to the query heads or not.
    key_reader, value_reader: the nodes that read key and value; both are ``node`` if it is one call.
    mask: bool, true where a key is seen, or floating point and added to the scores.
    scale: of the scores; None is ``head_dim ** -0.5``.
    sink_logits: [num_query_heads], one more logit per head in the softmax, without a value.
    flex_mask: in place of ``mask``.

    What a caller of torch may pass as anything (``dropout_p``, ``is_causal``, ``scale``, ``enable_gqa``) is as it stands
    in the graph.
    """

    node: fx.Node
    query: fx.Node
    key: fx.Node
    value: fx.Node
    key_reader: fx.Node
    value_reader: fx.Node
    mask: fx.Node | None = None
    dropout_p: Any = 0.0
    is_causal: Any = False
    scale: Any = None
    enable_gqa: Any = False
    sink_logits: fx.Node | None = None
    flex_mask: FlexMask | None = None


def is_sdpa(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is F.scaled_dot_product_attention


def sdpa_call(node: fx.Node) -> AttentionCall:
    """The arguments of scaled_dot_product_attention; raises RefusedError for ones that are not known here."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    call = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    unknown = set(call) - set(names)
    if unknown or any(not is_tensor(call.get(name)) for name in names[:3]):
        raise RefusedError(
            f"scaled_dot_product_attention has arguments that are not known here ({', '.join(sorted(unknown))})"
        )
    mask = call.pop("attn_mask", None)
    return AttentionCall(
        node=node, key_reader=node, value_reader=node, mask=mask if isinstance(mask, fx.Node) else None, **call
    )


def named_arguments(node: fx.Node, *names: str) -> dict[str, Any]:
    """Positional and keyword arguments by name; raises RefusedError if the call has others."""
    if len(node.args) > len(names) or not set(node.kwargs) <= set(names):
        raise RefusedError(f"{node.name} has arguments that are not known here")
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def dtype_of(node: fx.Node) -> torch.dtype:
    return node.meta["example_value"].dtype


def require_unwritten(first: fx.Node, last: fx.Node, operands: list[fx.Node]) -> None:
    """The operators read all operands where the output is computed: none may be written from the first product on."""
    owners = {memory_owner(operand) for operand in operands}
    node = first
    while node is not last:
        written = mutated_argument(node)
        if written is not None and memory_owner(written) in owners:
            raise RefusedError(f"an operand is written in place in the middle of the attention ({node.name})")
        node = node.next
