"""The flex_attention operator: its scores as they are, under a mask whose element is a small graph.

Only masks that this graph gets as inputs occur: dynamo ends a graph where ``create_block_mask`` runs. The element says
what the mask means; which blocks were left out is known at run time only, and checked there (``runtime/block_lists``).

Over transformers' static cache the element reads the cache's counter, which the layer has advanced by then: queries see
positions behind their own. One query is still causal if padding hides the next position, which is checked at run time.
Its output may be renormalised with learned sinks (``learned_sinks``).
"""

from __future__ import annotations

import sympy
import torch
from torch import fx

from ckv_compile.passes.attention_call import AttentionCall, BlockLists, FlexMask, require_unwritten
from ckv_compile.passes.graph_edit import output_node, placeholders
from ckv_compile.passes.index_expressions import IndexedTensor, IndexExpressions, is_tensor, target_name
from ckv_compile.passes.kv_sources import RefusedError
from ckv_compile.passes.learned_sinks import is_used, renormalized

_SCALARS = 4  # of a mask: batch, head, query, key


def is_flex_attention(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is torch.ops.higher_order.flex_attention


def flex_call(gm: fx.GraphModule, node: fx.Node) -> AttentionCall:
    """The arguments of flex_attention; raises RefusedError for scores that are changed and masks that are made here."""
    if len(node.args) != 9 or node.kwargs:
        raise RefusedError("flex_attention has arguments that are not known here")
    query, key, value, score_mod, block_mask, scale, _, _, buffers = node.args
    scores = _graph_of(gm, score_mod)
    if _output_of(scores) is not next(iter(scores.nodes)):
        changes = {target_name(inner) for inner in scores.nodes}
        what = "logit softcapping (tanh of the scores)" if "tanh" in changes else "scores changed by a score_mod"
        raise RefusedError(f"flex_attention with {what}, which the operators do not compute")
    out, logsumexp = _outputs(node)
    if out is None:
        raise RefusedError("flex_attention whose output nobody reads")
    sinks = None
    if logsumexp is not None:
        out, sinks = renormalized(node, out, logsumexp, query)
        require_unwritten(node, out, [query, key, value, sinks])
    return AttentionCall(
        node=out,
        query=query,
        key=key,
        value=value,
        key_reader=node,
        value_reader=node,
        scale=scale,
        enable_gqa=True,  # the operator itself reads KV heads in groups
        sink_logits=sinks,
        flex_mask=FlexMask(_graph_of(gm, block_mask[-1]), tuple(buffers), _block_lists(block_mask)),
    )


def _graph_of(gm: fx.GraphModule, attribute: object) -> fx.Graph:
    module = getattr(gm, str(attribute.target), None) if isinstance(attribute, fx.Node) else None
    if not isinstance(module, fx.GraphModule):
        raise RefusedError("flex_attention has a mask or scores of a form that is not known here")
    return module.graph


def _output_of(graph: fx.Graph) -> object:
    """What a graph returns; a node, if that is one value."""
    value = output_node(graph).args[0]
    return value[0] if isinstance(value, tuple | list) and len(value) == 1 else value


def _outputs(flex: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """(output, logsumexp), each None if nobody reads it."""
    results: dict[object, fx.Node] = {}
    for user in flex.users:
        if not is_used(user):
            continue
        if target_name(user) != "getitem" or user.args[1] not in (0, 1):
            raise RefusedError("more than the output and the logsumexp of flex_attention is read")
        if user.args[1] in results:
            raise RefusedError("the output or the logsumexp of flex_attention is taken more than once")
        results[user.args[1]] = user
    return results.get(0), results.get(1)


def _block_lists(block_mask: tuple) -> BlockLists:
    """Of (lengths of queries and keys, four lists by query, four by key, others, block sizes, mask)."""
    lists, others, sizes = block_mask[2:6], block_mask[10:-3], block_mask[-3:-1]
    if any(other is not None for other in others) or not all(isinstance(size, int) for size in sizes):
        raise RefusedError("flex_attention has a block mask of a form that is not known here")
    given = [entry for entry in lists if entry is not None]
    if any(not is_tensor(entry) or entry.op != "placeholder" for entry in given):
        raise RefusedError("flex_attention without a block mask, or with one that is made in the same graph")
    return BlockLists(*lists, *sizes)


def mask_element(
    expressions: IndexExpressions,
    mask: FlexMask,
    reader: fx.Node,
    index: tuple[sympy.Expr, sympy.Expr, sympy.Expr, sympy.Expr],
    counts: bool,
) -> sympy.Basic:
    """Whether the mask of ``reader`` is true at (row, head, query, key), in terms of what the outer graph began with.

    counts: the mask may read a counter that the outer graph advances. Raises NotAnExpression for masks that have no
    expression and RefusedError for ones that read what the outer graph writes in another way.
    """
    inner, output = placeholders(mask.graph), _output_of(mask.graph)
    if len(inner) != _SCALARS + len(mask.buffers) or not isinstance(output, fx.Node):
        raise RefusedError("flex_attention has a mask of a form that is not known here")
    known = {node: _scalar(symbol) for node, symbol in zip(inner[:_SCALARS], index, strict=True)}
    for node, buffer in zip(inner[_SCALARS:], mask.buffers, strict=True):
        if is_tensor(buffer):
            if not counts and expressions.is_written(buffer):
                raise RefusedError(f"the mask of flex_attention reads {buffer.name}, which this graph changes")
            known[node] = expressions.when_read(buffer, reader)
    return IndexExpressions(mask.graph, known).of(output).at(())


def _scalar(symbol: sympy.Expr) -> IndexedTensor:
    return IndexedTensor((), False, lambda index: symbol)
