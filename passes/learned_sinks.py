"""Learned sinks: one more logit per query head in the softmax, without a value.

Written out, a softmax has them as a column of its scores (``eager_attention``). flex_attention cannot: transformers
computes it without sinks and gives each row of its output the share that the sinks leave, in this order:

    lse = (logsumexp * ln 2).to(dtype of the values)            flex_attention counts in powers of two
    sinks = sinks.view(1, -1, 1, 1).expand(batch, num_query_heads, num_queries, 1)
    joined = logsumexp(cat([lse.unsqueeze(-1), sinks], -1), -1, keepdim=True)
    output = (output * exp(lse.unsqueeze(-1) - joined)).to(dtype of the query)

The operators that take its place have the sinks in their softmax, accumulate in float32 and round once.
"""

from __future__ import annotations

import math
from typing import NoReturn

import torch
from torch import fx

from ckv_compile.passes.attention_call import dtype_of, named_arguments
from ckv_compile.passes.graph_edit import has_effect
from ckv_compile.passes.index_expressions import is_tensor, shape_of, target_name
from ckv_compile.passes.kv_sources import RefusedError

_MULTIPLY = ("mul", "__mul__", "multiply")


def is_used(node: fx.Node) -> bool:
    """Whether the graph needs a node: dynamo leaves unused outputs and what was made of them where they are."""
    seen, pending = {node}, [node]
    while pending:
        current = pending.pop()
        if current.op == "output" or has_effect(current):
            return True
        pending.extend(user for user in current.users if user not in seen)
        seen.update(current.users)
    return False


def sink_vector(column: fx.Node, query: fx.Node, otherwise: str) -> fx.Node:
    """The vector of one logit per query head that a column ``[batch, num_query_heads, num_queries, 1]`` repeats.

    Raises RefusedError with the reason ``otherwise`` for anything else.
    """
    batch, heads, num_queries, _ = shape_of(query)
    repeated = column.args[0] if target_name(column) == "expand" else column
    vector = repeated.args[0] if is_tensor(repeated) and target_name(repeated) in ("reshape", "view") else None
    if (
        shape_of(column) != (batch, heads, num_queries, 1)
        or not is_tensor(repeated)
        or shape_of(repeated) != (1, heads, 1, 1)
        or not is_tensor(vector)
        or shape_of(vector) != (heads,)
        or not dtype_of(vector).is_floating_point
    ):
        raise RefusedError(otherwise)
    return vector


def renormalized(flex: fx.Node, output: fx.Node, logsumexp: fx.Node, query: fx.Node) -> tuple[fx.Node, fx.Node]:
    """(the output with learned sinks, their vector) of a flex_attention whose logsumexp serves nothing else.

    output, logsumexp: the two results of ``flex``. Raises RefusedError with the first thing that is not as above.
    """
    product = _only_user(output)
    if target_name(product) not in _MULTIPLY:
        _refuse(f"its output is read by {target_name(product)}, not scaled")
    terms = named_arguments(product, "input", "other")
    if terms.get("input") is not output:
        _refuse("its output is not what is scaled")
    factor = _result_of(terms.get("other"), ("exp",), product)
    difference = _result_of(named_arguments(factor, "input")["input"], ("sub", "__sub__", "subtract"), factor)
    terms = named_arguments(difference, "input", "other")
    own, joined = terms["input"], _result_of(terms.get("other"), ("logsumexp",), difference)
    call = named_arguments(joined, "input", "dim", "keepdim")
    if call.get("dim") not in (-1, 3, [-1], (-1,), [3], (3,)) or call.get("keepdim") is not True:
        _refuse("the logsumexp with the sinks is not one of each row")
    joint = _result_of(call["input"], ("cat", "concat", "concatenate"), joined)
    call = named_arguments(joint, "tensors", "dim")
    if call.get("dim") not in (-1, 3) or len(call["tensors"]) != 2 or call["tensors"][0] is not own:
        _refuse("the logsumexp that is scaled with is not the one that the sinks are joined to")
    if not is_tensor(own) or {user for user in own.users if is_used(user)} != {difference, joint}:
        _refuse("its logsumexp is read by something else too")
    _require_own(flex, own, logsumexp)
    sinks = call["tensors"][1]
    if not is_tensor(sinks):
        _refuse("what is joined to it is no tensor")
    vector = sink_vector(sinks, query, _reason("what is joined to it is not one logit per head"))
    return _converted_back(product, query), vector


def _require_own(flex: fx.Node, column: fx.Node, logsumexp: fx.Node) -> None:
    """Refuse a column that is not the logsumexp of ``flex``, with one more dimension."""
    call = named_arguments(column, "input", "dim") if target_name(column) == "unsqueeze" else {}
    if call.get("dim") not in (-1, 3):
        _refuse("the logsumexp that is scaled with is not a column of its own")
    reader, scaled = column, call["input"]
    kinds = (torch.float32, dtype_of(flex.args[2]))
    while is_tensor(scaled) and target_name(scaled) in ("to", "type", "float"):
        if dtype_of(scaled) not in kinds:
            _refuse(f"its logsumexp is rounded to {dtype_of(scaled)}".replace("torch.", ""))
        reader, scaled = scaled, _result_of(scaled, ("to", "type", "float"), reader).args[0]
    if flex.args[6].get("BACKEND") != "FLASH":  # which alone counts in powers of e
        scaled = _result_of(scaled, _MULTIPLY, reader)
        terms = named_arguments(scaled, "input", "other")
        if terms.get("other") != math.log(2.0):
            _refuse(f"its logsumexp is multiplied by {terms.get('other')}, not by ln 2")
        reader, scaled = scaled, terms["input"]
    if scaled is not logsumexp:
        _refuse("the logsumexp that is scaled with is not its own as it is")
    if _only_user(logsumexp) is not reader:
        _refuse("its logsumexp is read by something else too")


def _converted_back(product: fx.Node, query: fx.Node) -> fx.Node:
    """The node that has the dtype of the query: the product or its only reader, a conversion."""
    if dtype_of(product) == dtype_of(query):
        return product
    converted = _only_user(product)
    if target_name(converted) not in ("to", "type") or dtype_of(converted) != dtype_of(query):
        _refuse("its scaled output has another dtype")
    return converted


def _result_of(node: object, names: tuple[str, ...], reader: fx.Node) -> fx.Node:
    """``node``, if it calls one of these and is read by ``reader`` alone."""
    if not isinstance(node, fx.Node) or not is_tensor(node) or target_name(node) not in names:
        made = target_name(node) if isinstance(node, fx.Node) else str(node)
        _refuse(f"{made} stands where {names[0]} is expected")
    if _only_user(node) is not reader:
        _refuse(f"{node.name} is read by something else too")
    return node


def _only_user(node: fx.Node) -> fx.Node:
    users = list(node.users)
    if len(users) > 1:
        users = [user for user in users if is_used(user)]
    if len(users) != 1 or users[0].op == "output":
        _refuse(f"{node.name} is returned or read more than once")
    return users[0]


def _refuse(what: str) -> NoReturn:
    raise RefusedError(_reason(what))


def _reason(what: str) -> str:
    return f"the logsumexp of flex_attention is read, and not as learned sinks do ({what})"
