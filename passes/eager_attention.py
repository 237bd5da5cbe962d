"""Attention that a model writes out itself: two products with a softmax in between, with or without learned sinks.

What transformers' ``attn_implementation="eager"`` leaves in a graph, in this order:

    scores = query @ key.transpose(2, 3) * scale + mask             [batch, num_query_heads, num_queries, num_keys]
    scores = cat([scores, sinks], -1); scores -= max(scores, -1)    learned sinks only; sinks are one logit per head
    weights = softmax(scores, -1)[..., :-1]                         the slice with sinks only
    output = dropout(weights, 0) @ value

Each step is optional but for the products and the softmax. Anything else between the products is another attention, and
so is this one if somebody else reads a tensor on the way: its reason is then given.

The softmax may be computed in float32 or in the dtype of the scores, as gpt-oss does: the operators that take its place
accumulate in float32 either way, and round once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import fx

from ckv_compile.passes.attention_call import AttentionCall, dtype_of, named_arguments, require_unwritten
from ckv_compile.passes.index_expressions import is_tensor, shape_of, target_name
from ckv_compile.passes.kv_sources import RefusedError
from ckv_compile.passes.learned_sinks import sink_vector

_PRODUCTS = frozenset({"matmul", "__matmul__", "bmm", "baddbmm", "einsum"})
# What eager attention does between the products, apart from softmax.
_BETWEEN = frozenset(
    {
        "mul", "imul", "mul_", "div", "truediv", "itruediv", "div_", "add", "iadd", "add_", "sub", "sub_", "tanh",
        "where", "masked_fill", "masked_fill_", "to", "type", "float", "half", "bfloat16", "type_as", "cat", "concat",
        "getitem", "dropout", "max", "amax", "clamp", "view", "reshape", "expand", "contiguous", "transpose", "softmax",
        "nan_to_num",
    }
)  # fmt: skip
_CONVERSIONS = frozenset({"to", "type", "type_as", "float", "half", "bfloat16"})
_OTHER_SINKS = "eager attention whose scores are joined with something else than one logit per head"
_LAST_COLUMN_DROPPED = ((Ellipsis, slice(None, -1, None)), (*(slice(None),) * 3, slice(None, -1, None)))


def is_eager_attention(node: fx.Node) -> bool:
    """Whether ``node`` is a softmax between two products."""
    if node.op not in ("call_function", "call_method") or target_name(node) != "softmax":
        return False
    return all(
        any(target_name(reached) in _PRODUCTS for reached in _reach(node, step))
        for step in (lambda n: n.all_input_nodes, lambda n: list(n.users))
    )


def eager_call(softmax: fx.Node) -> AttentionCall:
    """The attention around a softmax; raises RefusedError with the first thing that is not of the form above."""
    scores, sinks = _before(softmax)
    node, dropout_p = _after(softmax, sinks is not None)
    scores, mask = _unmasked(scores)
    product, scale = _unscaled(scores)
    query, key = _product(product)
    call = AttentionCall(
        node=node,
        query=query,
        key=key,
        value=_operands(node)[1],
        key_reader=product,
        value_reader=node,
        mask=mask,
        dropout_p=dropout_p,
        scale=scale,
        sink_logits=None if sinks is None else sink_vector(sinks, query, _OTHER_SINKS),
    )
    require_unwritten(product, node, [query, key] if sinks is None else [query, key, sinks])
    return call


# ---------------------------------------------------------------------- from the softmax back to the scores


def _before(softmax: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """(masked scores, column of sinks) that a softmax over the last dimension reads."""
    names = ("input", "dim", "_stacklevel", "dtype") if softmax.target is F.softmax else ("input", "dim", "dtype")
    call = named_arguments(softmax, *names)
    scores, dtype = call.get("input"), call.get("dtype")
    if not is_tensor(scores) or len(shape_of(scores)) != 4:
        raise RefusedError("eager attention whose scores are not [batch, heads, queries, keys]")
    if call.get("dim") not in (-1, 3):
        raise RefusedError(f"softmax over dimension {call.get('dim')}, not over the keys")
    if dtype not in (None, torch.float32, dtype_of(scores)):
        raise RefusedError(f"softmax in {str(dtype).removeprefix('torch.')}; supported are float32 and the scores' own")
    reader = softmax
    if target_name(scores) in _CONVERSIONS and dtype_of(scores) == torch.float32:
        _only_read_by(scores, reader)
        reader, scores = scores, scores.args[0]
    readers = {reader}
    if (shifted := _maximum_subtracted(scores)) is not None:
        _only_read_by(scores, reader)
        scores, readers = shifted
    elif target_name(scores) == "sub":
        raise RefusedError("eager attention that subtracts something else than each row's maximum from the scores")
    _only_read_by(scores, *readers)
    if target_name(scores) not in ("cat", "concat"):
        return scores, None
    call = named_arguments(scores, "tensors", "dim")
    if len(call["tensors"]) != 2 or call.get("dim") not in (-1, 3):
        raise RefusedError("eager attention whose scores are joined with something else than one column of sinks")
    masked, sinks = call["tensors"]
    _only_read_by(masked, scores)
    return masked, sinks


def _maximum_subtracted(scores: fx.Node) -> tuple[fx.Node, set[fx.Node]] | None:
    """(x, its readers) if ``scores`` is ``x - max(x, -1, keepdim=True)``, which no softmax notices."""
    if target_name(scores) != "sub" or len(scores.args) != 2 or scores.kwargs or not is_tensor(scores.args[1]):
        return None
    source, maximum = scores.args
    reader = maximum
    _only_read_by(maximum, scores)
    if target_name(maximum) == "getitem" and maximum.args[1] == 0:
        reader = maximum.args[0]
        if target_name(reader) != "max" or set(reader.users) != {maximum}:
            return None
    elif target_name(maximum) != "amax":
        return None
    call = named_arguments(reader, "input", "dim", "keepdim")
    if call["input"] is not source or call.get("dim") not in (-1, 3, [-1], (-1,)) or call.get("keepdim") is not True:
        return None
    return source, {scores, reader}


def _unmasked(scores: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """(scores, what is added to them)."""
    if target_name(scores) not in ("add", "__add__"):
        return scores, None
    terms = named_arguments(scores, "input", "other")
    left, right = terms["input"], terms["other"]
    if not is_tensor(left) or not is_tensor(right):
        raise RefusedError("eager attention with a number added to the scores")
    inner, mask = (right, left) if _is_score(right) and not _is_score(left) else (left, right)
    if not dtype_of(mask).is_floating_point:
        raise RefusedError(f"eager attention that adds {dtype_of(mask)} numbers to the scores".replace("torch.", ""))
    if shape_of(inner) != shape_of(scores):
        raise RefusedError("eager attention whose mask has more dimensions or rows than the scores")
    _only_read_by(inner, scores)
    return inner, mask


def _is_score(node: fx.Node) -> bool:
    return any(target_name(source) in _PRODUCTS for source in (node, *node.all_input_nodes))


def _unscaled(scores: fx.Node) -> tuple[fx.Node, float]:
    """(product of query and key, the number it is multiplied by)."""
    name = target_name(scores)
    if name in ("matmul", "__matmul__"):
        return scores, 1.0
    if name not in ("mul", "__mul__", "multiply", "div", "truediv", "__truediv__", "divide"):
        raise RefusedError(_other_scores(scores))
    call = named_arguments(scores, "input", "other")
    product, factor = call["input"], call["other"]
    divided = "div" in name
    if not divided and not is_tensor(product):
        product, factor = factor, product
    if not is_tensor(product) or isinstance(factor, bool) or not isinstance(factor, int | float):
        raise RefusedError(f"eager attention whose scores are scaled by a tensor or a number not known ({factor})")
    if target_name(product) not in ("matmul", "__matmul__"):
        raise RefusedError(_other_scores(product))
    _only_read_by(product, scores)
    return product, 1.0 / factor if divided else float(factor)


def _other_scores(scores: fx.Node) -> str:
    """What changes the scores that is no scale and no mask."""
    if "tanh" in {target_name(node) for node in (scores, *_reach(scores, lambda n: n.all_input_nodes))}:
        return "logit softcapping (tanh of the scores), which the operators do not compute"
    return f"eager attention whose scores are changed by something else than a scale and a mask ({target_name(scores)})"


def _product(product: fx.Node) -> tuple[fx.Node, fx.Node]:
    """(query, key) of ``query @ key.transpose(2, 3)``."""
    query, transposed = _operands(product)
    if target_name(transposed) != "transpose":
        raise RefusedError(f"eager attention whose keys are transposed in another way ({target_name(transposed)})")
    call = named_arguments(transposed, "input", "dim0", "dim1")
    key = call["input"]
    if not is_tensor(key) or len(shape_of(key)) != 4 or {call.get("dim0"), call.get("dim1")} not in ({2, 3}, {-1, -2}):
        raise RefusedError("eager attention whose keys are transposed along other dimensions")
    return query, key


def _operands(product: fx.Node) -> tuple[fx.Node, fx.Node]:
    call = named_arguments(product, "input", "other")
    return call["input"], call["other"]


# ---------------------------------------------------------------------- from the softmax on to the output


def _after(softmax: fx.Node, has_sinks: bool) -> tuple[fx.Node, float]:
    """(product of the weights with the values, dropout probability)."""
    weights, dropped, dropout_p, converted = softmax, False, 0.0, []
    while True:
        reader = _only_reader(weights)
        name = target_name(reader)
        if name == "matmul" or name == "__matmul__":
            break
        if name == "getitem" and has_sinks and not dropped and reader.args[1] in _LAST_COLUMN_DROPPED:
            dropped = True
        elif name == "dropout":
            dropout_p = max(dropout_p, _dropout_probability(reader))
        elif name in _CONVERSIONS:
            converted.append(dtype_of(reader))
        else:
            raise RefusedError(f"eager attention whose weights are changed by {name}")
        weights = reader
    if _operands(reader)[0] is not weights or _operands(reader)[1] is weights:
        raise RefusedError("eager attention whose weights do not multiply values from the left")
    if not set(converted) <= {torch.float32, dtype_of(reader)}:
        raise RefusedError(f"eager attention whose weights are rounded to another dtype ({converted[0]})")
    if has_sinks and not dropped:
        raise RefusedError("eager attention that keeps the weights of its learned sinks")
    return reader, dropout_p


def _only_reader(weights: fx.Node) -> fx.Node:
    if len(weights.users) == 1:
        (reader,) = weights.users
        if reader.op in ("call_function", "call_method"):
            return reader
    if any(user.op == "output" for user in weights.users):
        raise RefusedError("the attention weights are returned too (output_attentions)")
    raise RefusedError(f"the attention weights are read by {len(weights.users)} nodes, not by the output alone")


def _dropout_probability(node: fx.Node) -> float:
    call = named_arguments(node, "input", "p", "training", "inplace")
    probability, training = call.get("p", 0.5), call.get("training", True)
    if not isinstance(probability, int | float) or not isinstance(training, bool):
        raise RefusedError("dropout_p is not known at compile time")
    return float(probability) if training else 0.0


# ---------------------------------------------------------------------- who else reads and writes


def _only_read_by(node: fx.Node, *readers: fx.Node) -> None:
    for user in node.users:
        if user.op == "output":
            raise RefusedError(f"the scores of the attention are returned too ({node.name})")
        if user not in readers:
            raise RefusedError(f"the scores of the attention are also read by something else ({user.name})")


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
