"""What an attention mask means: a causal rule, a causal rule and padding, or something that is left alone.

A mask is judged by the expression of its element ``[b, h, i, j]`` (``index_expressions``), never by its name or by
counting operations. It is understood only if it is a conjunction of

- ``j <= position(i)``: key ``j`` is not later than query ``i``;
- ``padding[b, j]``: a graph input of shape [batch, keys], whose contents are known at run time only;
- conditions that hold for every index.

One more form is understood as far as it can be: the mask as a whole is a graph input, as ``generate`` makes it for
static caches before it calls the model. ``MaskRule.given`` names the input; whoever runs the graph checks its contents.

A floating-point mask is added to the scores. It is judged by the bool mask it is made from (``additive_mask``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

import sympy
import torch
from torch import fx

from ckv_compile.passes.additive_mask import given_mask, seen_condition
from ckv_compile.passes.attention_call import FlexMask
from ckv_compile.passes.flex_attention import mask_element
from ckv_compile.passes.index_expressions import (
    IndexedTensor,
    IndexExpressions,
    Load,
    NotAnExpression,
    as_bool,
    broadcast_at,
    is_tensor,
    mutated_argument,
    scalar,
    shape_of,
)

_BATCH, _HEAD, _QUERY, _KEY = sympy.symbols("b h i j", integer=True, nonnegative=True)


@dataclass(frozen=True)
class MaskRule:
    """Query ``i`` sees key ``j`` if ``j`` is at or before the query's own position and the named inputs allow it.

    from_start: the query's position is ``i``: this call's tokens are the first of their sequence. Otherwise it is
        ``num_keys - num_queries + i``, or the position at which the query's own key is written into a static cache.
    padding: graph input [batch, n], nonzero where a key may be seen. ``n`` is the number of keys; for a static cache it
        may be less, and then keys at ``n`` and after are not seen.
    given: graph input [batch or 1, 1, num_queries, num_keys], bool or additive: the whole mask. Nothing else is known of
        it.
    offset: graph input, an integer that the query's position counts from; what is said here holds if it is the number of
        cached tokens.
    ahead: so many keys after the query's own only ``padding`` hides; what is said here holds if it does, in every row.
    """

    from_start: bool
    padding: fx.Node | None = None
    given: fx.Node | None = None
    offset: fx.Node | None = None
    ahead: int = 0


class UnknownMaskError(Exception):
    """The mask is something else; the message says what, as part of a sentence for users."""


class LocalMaskError(UnknownMaskError):
    """The mask shows keys near the query only: a sliding window, or chunks."""


def judge_mask(
    expressions: IndexExpressions,
    mask: fx.Node,
    *,
    num_rows: sympy.Expr,
    num_queries: sympy.Expr,
    num_keys: sympy.Expr,
    position: IndexedTensor | None,
) -> MaskRule:
    """The meaning of ``mask``, exactly; raises UnknownMaskError if it is not understood.

    position: where the queries' own keys are written in a static cache, [num_queries]; None if they are the last keys.
    """
    value, shape, allows = mask.meta["example_value"], shape_of(mask), True
    if len(shape) > 4 or not shape or (shape[-1] != num_keys):
        raise UnknownMaskError(f"the mask of shape {tuple(value.shape)} does not have one entry per key")
    if value.dtype.is_floating_point:
        is_whole = shape[0] in (num_rows, 1) and shape[1:] == (1, num_queries, num_keys)
        if is_whole and (given := given_mask(mask)) is not None:
            return MaskRule(from_start=False, given=given)
        if (made_from := seen_condition(mask)) is None:
            raise UnknownMaskError(
                f"the mask is an additive {str(value.dtype).removeprefix('torch.')} mask whose entries are not known to "
                f"be zero or the least number of their type ({_made_of(mask)})"
            )
        mask, allows = made_from
    try:
        tensor = expressions.of(mask)
    except NotAnExpression as error:
        raise UnknownMaskError(
            "the mask is computed from something that is not a causal rule and a padding mask "
            f"({error.what}; {_made_of(mask)})"
        ) from None

    row, i, j = _variable(_BATCH, num_rows), _variable(_QUERY, num_queries), _variable(_KEY, num_keys)
    element = as_bool(broadcast_at(tensor, (row, _HEAD, i, j)))
    if not allows:
        element = sympy.Not(element)
    return _judge(expressions, element, (row, i, j), num_queries, num_keys, position, _made_of(mask))


def judge_flex_mask(
    expressions: IndexExpressions,
    mask: FlexMask,
    reader: fx.Node,
    *,
    num_rows: sympy.Expr,
    num_queries: sympy.Expr,
    num_keys: sympy.Expr,
    position: IndexedTensor | None,
) -> MaskRule:
    """The meaning of the mask of flex_attention ``reader``; raises as ``judge_mask`` does.

    The position of the first query may be an integer input of the graph, which torch knows nothing about. Over a static
    cache it may be the cache's counter, which transformers advances before the mask reads it.
    """
    row, i, j = _variable(_BATCH, num_rows), _variable(_QUERY, num_queries), _variable(_KEY, num_keys)
    try:
        element = as_bool(mask_element(expressions, mask, reader, (row, _HEAD, i, j), position is not None))
    except NotAnExpression as error:
        raise UnknownMaskError(
            f"the mask of flex_attention is not a causal rule and a padding mask ({error.what})"
        ) from None
    past = num_keys - num_queries if position is None else position.at((sympy.S.Zero,))
    lengths, offset = num_queries.free_symbols | num_keys.free_symbols, None
    for buffer in mask.buffers:
        symbol = None if is_tensor(buffer) else scalar(buffer)
        if isinstance(symbol, sympy.Symbol) and symbol not in lengths and element.has(symbol):
            if offset is not None or buffer.op != "placeholder":
                raise UnknownMaskError("the mask of flex_attention counts from more than one number")
            offset, element = buffer, element.subs(symbol, past)
    ahead = sympy.S.Zero
    if position is not None:
        element, ahead = _counted_late(element, broadcast_at(position, (i,)), i, j)
    rule = _judge(expressions, element, (row, i, j), num_queries, num_keys, position, "made by create_block_mask")
    if rule.given is not None:
        raise UnknownMaskError(f"the mask of flex_attention is a 4-D tensor given by the caller ({rule.given.name})")
    if ahead != 0 and num_queries != 1:
        raise UnknownMaskError(
            "not causal: the static cache adds the new tokens to its counter before the mask of flex_attention reads it, "
            "so queries see later tokens of the same call"
        )
    if ahead != 0 and (rule.padding is None or not ahead.is_Integer):
        raise UnknownMaskError(
            "the static cache adds the new token to its counter before the mask of flex_attention reads it, so the query "
            "also sees the position after its own, where nothing was written, and no padding mask hides that"
        )
    return dataclasses.replace(rule, offset=offset, ahead=int(ahead))


def _counted_late(
    element: sympy.Basic, own: sympy.Expr, i: sympy.Expr, j: sympy.Expr
) -> tuple[sympy.Basic, sympy.Expr]:
    """(the mask with its causal rule at the query's own position ``own``, by how much the rule was ahead of it)."""
    atoms, ahead = list(sympy.And.make_args(element)), sympy.S.Zero
    for number, atom in enumerate(atoms):
        difference = _Condition(atom).difference
        shift = None if difference is None else sympy.expand(difference - (own - j))
        if shift is None or shift.atoms(Load) or shift.free_symbols & {i, j}:
            continue
        if not shift.is_Integer or shift > 0:
            atoms[number], ahead = sympy.Ge(own, j), sympy.Max(ahead, shift)
    return sympy.And(*atoms), ahead


def _judge(
    expressions: IndexExpressions,
    element: sympy.Basic,
    index: tuple[sympy.Expr, sympy.Expr, sympy.Expr],
    num_queries: sympy.Expr,
    num_keys: sympy.Expr,
    position: IndexedTensor | None,
    made_of: str,
) -> MaskRule:
    """The meaning of the condition under which query ``i`` of ``row`` sees key ``j``; ``index`` is (row, i, j)."""
    row, i, j = index
    own = broadcast_at(position, (i,)) if position is not None else i + num_keys - num_queries
    conditions = [_Condition(atom) for atom in sympy.And.make_args(element) if atom != sympy.true]

    causal, from_start, padding, whole, others = False, False, None, None, []
    for condition in conditions:
        load = condition.loaded
        if condition.is_at_least_zero(own - j):
            causal = True
        elif condition.is_at_least_zero(i - j):
            from_start = True
        elif load is not None and load.index == (row, j) and _is_input(expressions, load):
            if padding not in (None, load.tensor_name):
                raise UnknownMaskError(f"the mask combines two padding masks ({padding}, {load.tensor_name})")
            padding = load.tensor_name
        elif (
            load is not None
            and load.index[1:] == (0, i, j)
            and load.index[0] in (row, 0)
            and len(conditions) == 1
            and _is_input(expressions, load, torch.bool)
        ):
            whole = load.tensor_name
        elif not condition.always_holds(i, num_queries, j, num_keys):
            others.append(condition)
    padding = None if padding is None else expressions.loads[padding]
    if (window := _window_of(others, conditions)) is not None:
        raise LocalMaskError(f"sliding window attention (each query sees only the last {window} tokens)")
    for condition in others:
        # A padding mask shorter than a static cache is extended by zeros: j < n and padding[b, j].
        if padding is None or not condition.is_at_least_zero(shape_of(padding)[-1] - 1 - j):
            _refuse(condition, own, i, j, made_of, causal or from_start or num_queries == 1)
    if whole is not None:
        return MaskRule(from_start=False, given=expressions.loads[whole])
    # One query at the end of its own sequence sees every key there is; a static cache has room after that.
    sees_all = position is None and num_queries == 1
    if not causal and not from_start and not sees_all:
        raise UnknownMaskError("not causal: queries also see keys after their own position")
    return MaskRule(from_start=from_start and not causal, padding=padding)


def mask_nodes(attention: Iterable[fx.Node]) -> list[fx.Node]:
    """Nodes that nothing but the masks of ``attention`` (SDPA calls of one graph) needs, in graph order.

    Once those calls no longer use their masks, erasing these in reverse order leaves no mask computation behind.
    """
    attention = set(attention)
    pending = [mask for node in attention if (mask := attention_mask(node)) is not None]
    if not pending:
        return []
    graph, ancestors = pending[0].graph, set()
    while pending:
        node = pending.pop()
        if node not in ancestors:
            ancestors.add(node)
            pending.extend(node.all_input_nodes)
    only: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        pure = node.op in ("call_function", "call_method", "get_attr") and mutated_argument(node) is None
        if node in ancestors and pure and all(
            user in only or (user in attention and attention_mask(user) is node) for user in node.users
        ):  # fmt: skip
            only.add(node)
    return [node for node in graph.nodes if node in only]


def attention_mask(node: fx.Node) -> fx.Node | None:
    """The mask argument of an SDPA call, positional or by name."""
    mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    return mask if isinstance(mask, fx.Node) else None


def _variable(symbol: sympy.Symbol, size: sympy.Expr) -> sympy.Expr:
    return sympy.S.Zero if size == 1 else symbol


def _is_input(expressions: IndexExpressions, load: Load, dtype: torch.dtype | None = None) -> bool:
    node = expressions.loads[load.tensor_name]
    right_type = dtype is None or node.meta["example_value"].dtype == dtype
    return node.op == "placeholder" and node.name == load.tensor_name and right_type


class _Condition:
    """One condition of a conjunction, brought to a form in which conditions compare."""

    def __init__(self, atom: sympy.Basic):
        self.atom = atom
        self.difference = None  # of integers: the condition is ``difference >= 0``
        self.loaded = None  # the condition is ``load != 0``
        if isinstance(atom, sympy.Ge | sympy.Gt | sympy.Le | sympy.Lt):
            upper, lower = (atom.lhs, atom.rhs) if isinstance(atom, sympy.Ge | sympy.Gt) else (atom.rhs, atom.lhs)
            strict = isinstance(atom, sympy.Gt | sympy.Lt)
            self.difference = sympy.expand(upper - lower - (1 if strict else 0))
        elif isinstance(atom, sympy.Ne) and isinstance(atom.lhs, Load) and atom.rhs == 0:
            self.loaded = atom.lhs

    def is_at_least_zero(self, difference: sympy.Expr) -> bool:
        return self.difference is not None and sympy.expand(self.difference - difference) == 0

    def always_holds(self, i: sympy.Expr, num_queries: sympy.Expr, j: sympy.Expr, num_keys: sympy.Expr) -> bool:
        """True if it holds for every query and key; False if it may fail or is not linear."""
        least = self.difference
        if least is None or least.has(Load):
            return False
        for variable, size in ((i, num_queries), (j, num_keys)):
            if variable == 0 or not least.has(variable):
                continue
            slope = least.diff(variable)
            if slope.has(variable) or slope.is_nonnegative is None:
                return False
            least = least.subs(variable, 0 if slope.is_nonnegative else size - 1)
        return bool(sympy.expand(least).is_nonnegative)


def _window_of(unknown: list[_Condition], conditions: list[_Condition]) -> int | None:
    """The number of keys that a query sees at most, if one of the unknown conditions and another bound them together.

    Whatever they count from, ``a >= 0`` and ``b >= 0`` with ``a + b == n - 1`` leave ``a`` the values 0 ... n - 1. So it is
    for a window that starts at ``max(count - n + 1, 0)``, where dynamo does not know how the count compares with ``n``.
    """
    for one in unknown:
        for other in conditions:
            if one.difference is not None and other.difference is not None:
                last = sympy.expand(one.difference + other.difference)
                if last.is_Integer and last >= 0 and one is not other:
                    return int(last) + 1
    return None


def _refuse(
    condition: _Condition, own: sympy.Expr, i: sympy.Expr, j: sympy.Expr, made_of: str, causal: bool
) -> NoReturn:
    """Raise what a condition is that is neither causal nor padding."""
    atom, difference = condition.atom, condition.difference
    if difference is not None:
        for position in (own, i):
            window = sympy.expand(difference - (j - position)) + 1
            if causal and window.is_Integer and window > 0:
                raise LocalMaskError(f"sliding window attention (each query sees only the last {window} tokens)")
            shift = sympy.expand(difference - (position - j))
            if shift.is_Integer:
                raise UnknownMaskError(
                    f"not causal: the mask is shifted by {shift} against the positions of the queries"
                )
    if condition.loaded is not None:
        load = condition.loaded
        if load.index == (*load.index[:-2], i, j) or len(load.index) == 4:
            raise UnknownMaskError(f"the mask is a {len(load.index)}-D tensor given by the caller ({load.tensor_name})")
        raise UnknownMaskError(f"the mask reads {load.tensor_name} in another way than a padding mask of the keys")
    if atom.has(sympy.floor):
        raise LocalMaskError("chunked attention (each query sees only keys of its own chunk)")
    loads = sorted({load.tensor_name for load in atom.atoms(Load) if load.index})
    if isinstance(atom, sympy.Eq) and loads:
        raise UnknownMaskError(
            f"the mask compares tokens by {', '.join(loads)} (packed sequences, blocks or token types)"
        )
    if isinstance(atom, sympy.Or):
        raise UnknownMaskError(f"the mask allows more than the causal rule ({made_of})")
    raise UnknownMaskError(f"the mask is not a causal rule and a padding mask ({made_of})")


def _made_of(mask: fx.Node) -> str:
    """The graph inputs that a mask is computed from, for messages."""
    seen, pending, inputs = set(), [mask], []
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op in ("placeholder", "get_attr") and is_tensor(node):
            inputs.append(node.name)
        pending.extend(node.all_input_nodes)
    return f"made from {', '.join(sorted(inputs))}" if inputs else "made from lengths only"
