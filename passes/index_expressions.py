"""What an element of a computed tensor is, written as an expression of its index.

A mask or a position tensor is a handful of ``arange``, comparisons and look-ups. Written as an expression it can be
compared with a rule exactly, for every length at once and without running anything: the mask of a 131,072-token prefill
has 16 GiB.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from sympy.logic.boolalg import Boolean
from torch import fx

Index = tuple[sympy.Expr, ...]

_IN_PLACE_OPERATORS = frozenset(
    {
        "setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "iand", "ior", "ixor", "ipow", "imod", "ilshift",
        "irshift",
    }
)  # fmt: skip
# Results of these may share memory with their first argument.
_ALIASING = frozenset(
    {
        "contiguous", "detach", "expand", "expand_as", "flatten", "getitem", "movedim", "narrow", "permute", "reshape",
        "select", "squeeze", "swapaxes", "t", "to", "transpose", "type", "unflatten", "unsqueeze", "view", "view_as",
        "bool", "int", "long", "float", "index_copy_", "copy_", "add_", "fill_", "zero_",
    }
)  # fmt: skip


class NotAnExpression(Exception):  # noqa: N818 - an outcome, not a fault
    """The tensor depends on something that has no expression here; ``node`` is where that was met."""

    def __init__(self, node: fx.Node, what: str):
        super().__init__(f"{what} in {node.name}")
        self.node = node
        self.what = what


class Load(sympy.Function):
    """``Load(name, i, j)``: element ``[i, j]`` of a tensor that the graph reads, an integer (bools are 0 or 1)."""

    is_integer = True
    is_real = True
    is_finite = True

    @property
    def tensor_name(self) -> str:
        return self.args[0].name

    @property
    def index(self) -> Index:
        return self.args[1:]


@dataclass(frozen=True)
class IndexedTensor:
    """A tensor by its elements: ``at(index)`` is a sympy Boolean if ``is_bool``, else an integer expression."""

    shape: tuple[sympy.Expr, ...]
    is_bool: bool
    at: Callable[[Index], sympy.Basic]


def target_name(node: fx.Node) -> str:
    """Name of what a node calls, the same for ``torch.add``, ``operator.add`` and ``Tensor.add``."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def size_expr(size: int | torch.SymInt) -> sympy.Expr:
    """A size as sympy sees it. Comparing SymInts themselves would install a guard, and specialize the graph."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def hint_of(size: object) -> int | None:
    """The size in the call that was traced; reading it adds no guard. None if it is no number or not known."""
    if isinstance(size, torch.SymInt):
        return int(size.node.hint) if size.node.has_hint() else None
    return size if isinstance(size, int) else None


def shape_of(node: fx.Node) -> tuple[sympy.Expr, ...]:
    return tuple(size_expr(size) for size in node.meta["example_value"].shape)


def is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("example_value"), torch.Tensor)


def mutated_argument(node: fx.Node) -> fx.Node | None:
    """The tensor that ``node`` writes into, if it writes in place."""
    if node.op not in ("call_function", "call_method"):
        return None
    if isinstance(node.kwargs.get("out"), fx.Node):
        return node.kwargs["out"]
    name = target_name(node)
    in_place = (
        name.endswith("_")
        and not name.endswith("__")
        and node.target not in (operator.and_, operator.or_, operator.not_)
    )
    if (in_place or name in _IN_PLACE_OPERATORS) and node.args and is_tensor(node.args[0]):
        return node.args[0]
    return None


def memory_owner(node: fx.Node) -> fx.Node:
    """The node whose memory ``node`` may be a view of."""
    while (
        node.op in ("call_function", "call_method")
        and target_name(node) in _ALIASING
        and node.args
        and is_tensor(node.args[0])
    ):
        node = node.args[0]
    return node


def layer_independent(name: str) -> str:
    """The name of a counter of one cache layer, the same for all layers of that cache.

    transformers' static caches count tokens per layer and advance all layers alike in one forward; masks are computed
    from one layer's counter and used by all.
    """
    return re.sub(r"\d+", "#", name) if "cumulative_length" in name else name


class IndexExpressions:
    """Writes tensors of one graph as expressions of their index; a node is written once."""

    def __init__(self, graph: fx.Graph, known: Mapping[fx.Node, IndexedTensor] | None = None):
        """known: inputs of the graph that are something else than tensors to load from."""
        self.loads: dict[str, fx.Node] = {}
        self._done: dict[fx.Node, IndexedTensor | NotAnExpression] = dict(known or {})
        self._order = {node: i for i, node in enumerate(graph.nodes)}
        self._first_write: dict[fx.Node, int] = {}
        self._writes: dict[fx.Node, list[fx.Node]] = {}
        for node, i in self._order.items():
            if (written := mutated_argument(node)) is not None:
                self._first_write.setdefault(memory_owner(written), i)
                self._writes.setdefault(memory_owner(written), []).append(node)

    def of(self, node: fx.Node) -> IndexedTensor:
        """Raises NotAnExpression if some part of the tensor cannot be written."""
        if node not in self._done:
            try:
                self._done[node] = self._write(node)
            except NotAnExpression as error:
                self._done[node] = error
        done = self._done[node]
        if isinstance(done, NotAnExpression):
            raise done
        return done

    def is_written(self, node: fx.Node) -> bool:
        """Whether the graph writes into the memory of ``node`` anywhere."""
        return memory_owner(node) in self._first_write

    def when_read(self, node: fx.Node, reader: fx.Node) -> IndexedTensor:
        """``node`` as ``reader`` finds it, in terms of what the graph began with: additions to a counter are known.

        Raises NotAnExpression if something else was written before.
        """
        begin, added = self.of(node), sympy.S.Zero
        for write in self._writes.get(memory_owner(node), ()):
            if self._order[write] > self._order[reader]:
                continue
            number = scalar(write.args[1]) if len(write.args) == 2 and not write.kwargs else None
            counts = node.op == "placeholder" and not begin.is_bool and all(size == 1 for size in begin.shape)
            adds = write.target in ("add_", operator.iadd) and write.args[0] is node
            if not counts or not adds or not isinstance(number, sympy.Expr):
                raise NotAnExpression(node, f"{node.name} after it was written in place")
            added = added + number
        return IndexedTensor(
            begin.shape, begin.is_bool, lambda index: begin.at(index) + added if added else begin.at(index)
        )

    # ------------------------------------------------------------------ pieces

    def _write(self, node: fx.Node) -> IndexedTensor:
        if not is_tensor(node):
            raise NotAnExpression(node, "a value that is not a tensor")
        value = node.meta["example_value"]
        if value.dtype.is_floating_point or value.dtype.is_complex:
            raise NotAnExpression(node, f"a {str(value.dtype).removeprefix('torch.')} tensor")
        if node.op in ("placeholder", "get_attr"):
            name = layer_independent(node.name)
            self.loads.setdefault(name, node)
            symbol, is_bool = sympy.Symbol(name), value.dtype == torch.bool
            return self._tensor(node, lambda index: as_bool(Load(symbol, *index)) if is_bool else Load(symbol, *index))
        if node.op not in ("call_function", "call_method"):
            raise NotAnExpression(node, node.op)
        for argument in node.all_input_nodes:
            written = self._first_write.get(memory_owner(argument)) if is_tensor(argument) else None
            if written is not None and written < self._order[node]:
                raise NotAnExpression(node, f"{argument.name} after it was written in place")
        rule = _RULES.get(target_name(node))
        if rule is None or mutated_argument(node) is not None:
            raise NotAnExpression(node, target_name(node))
        return rule(self, node)

    def _tensor(self, node: fx.Node, at: Callable[[Index], sympy.Basic]) -> IndexedTensor:
        is_bool = node.meta["example_value"].dtype == torch.bool
        convert = as_bool if is_bool else as_integer
        return IndexedTensor(shape_of(node), is_bool, lambda index: convert(at(index)))

    def _operand(self, node: fx.Node, argument: Any) -> IndexedTensor:
        """A tensor or a number, as a tensor that broadcasts."""
        if is_tensor(argument):
            return self.of(argument)
        number = scalar(argument)
        if number is None:
            raise NotAnExpression(node, f"{target_name(node)} of {argument}")
        return IndexedTensor((), isinstance(argument, bool), lambda index: number)

    def _elementwise(self, node: fx.Node, function: Callable[..., sympy.Basic], arguments: tuple) -> IndexedTensor:
        operands = [self._operand(node, argument) for argument in arguments]
        return self._tensor(node, lambda index: function(*(broadcast_at(operand, index) for operand in operands)))


def scalar(argument: Any) -> sympy.Basic | None:
    """A Python number, or a node that holds a length, as sympy sees it; None for anything else."""
    if isinstance(argument, fx.Node):
        argument = argument.meta.get("example_value")
    if isinstance(argument, bool):
        return sympy.true if argument else sympy.false
    if isinstance(argument, int | torch.SymInt):
        return size_expr(argument)
    return None


def is_condition(value: sympy.Basic) -> bool:
    return isinstance(value, Boolean) and not isinstance(value, sympy.Expr)  # a Symbol is both


def as_bool(value: sympy.Basic) -> Boolean:
    if is_condition(value):
        return value
    if isinstance(value, sympy.Piecewise) and value == as_integer(value.args[0][1]):
        return value.args[0][1]
    return sympy.Ne(value, 0)


def as_integer(value: sympy.Basic) -> sympy.Expr:
    return sympy.Piecewise((1, value), (0, True)) if is_condition(value) else value


def broadcast_at(tensor: IndexedTensor, index: Index) -> sympy.Basic:
    """The element that torch's broadcasting puts at ``index`` of a result of the same or higher rank."""
    aligned = index[len(index) - len(tensor.shape) :]
    return tensor.at(tuple(sympy.S.Zero if size == 1 else i for i, size in zip(aligned, tensor.shape, strict=True)))


# ---------------------------------------------------------------------- one rule per operation


def _arguments(node: fx.Node, *names: str) -> dict[str, Any]:
    """Positional and keyword arguments by name; raises if the call has others, for their meaning is not known here."""
    if len(node.args) > len(names) or not set(node.kwargs) <= set(names):
        raise NotAnExpression(node, f"{target_name(node)} with unexpected arguments")
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _binary(function: Callable[..., sympy.Basic], convert: Callable = lambda value: value) -> Callable:
    def rule(self: IndexExpressions, node: fx.Node) -> IndexedTensor:
        call = _arguments(node, "input", "other")
        return self._elementwise(node, lambda *v: function(*map(convert, v)), (call["input"], call["other"]))

    return rule


def _logical(function: Callable[..., Boolean]) -> Callable:
    def rule(self: IndexExpressions, node: fx.Node) -> IndexedTensor:
        arguments = tuple(_arguments(node, "input", "other").values())
        if any(not _is_bool(argument) for argument in arguments) and not target_name(node).startswith("logical"):
            raise NotAnExpression(node, f"bitwise {target_name(node)} of integers")
        return self._elementwise(node, lambda *v: function(*map(as_bool, v)), arguments)

    return rule


def _is_bool(argument: Any) -> bool:
    if is_tensor(argument):
        return argument.meta["example_value"].dtype == torch.bool
    return isinstance(argument, bool)


def _multiply(self: IndexExpressions, node: fx.Node) -> IndexedTensor:
    call = _arguments(node, "input", "other")
    if node.meta["example_value"].dtype == torch.bool:
        return _logical(sympy.And)(self, node) if all(map(_is_bool, call.values())) else _unknown(node)
    return self._elementwise(node, lambda a, b: as_integer(a) * as_integer(b), tuple(call.values()))


def _unknown(node: fx.Node) -> IndexedTensor:
    raise NotAnExpression(node, target_name(node))


def _arange(self: IndexExpressions, node: fx.Node) -> IndexedTensor:
    bounds = [scalar(argument) for argument in node.args]
    start, step = (bounds[0], sympy.S.One) if len(bounds) > 1 else (sympy.S.Zero, sympy.S.One)
    if len(bounds) == 3:
        step = bounds[2]
    if start is None or step is None or not set(node.kwargs) <= {"device", "dtype", "end", "layout", "pin_memory"}:
        raise NotAnExpression(node, "arange with a start or step that is a tensor")
    return self._tensor(node, lambda index: start + step * index[0])


def _constant(number: int | None) -> Callable:
    """ones, zeros (``number``) or full (None: the fill value is the last argument)."""

    def rule(self: IndexExpressions, node: fx.Node) -> IndexedTensor:
        value = number if number is not None else node.kwargs.get("fill_value", node.args[-1] if node.args else None)
        fill = scalar(value)
        if fill is None:
            raise NotAnExpression(node, f"{target_name(node)} of {value}")
        return self._tensor(node, lambda index: fill)

    return rule


def _same(self: IndexExpressions, node: fx.Node) -> IndexedTensor:
    """Conversions and copies, between integers and bool: floating-point results never get here."""
    source = self.of(node.args[0])
    kind = node.meta["example_value"].dtype
    if kind not in (torch.bool, torch.int64, torch.int32):
        raise NotAnExpression(node, f"a conversion to {kind}")
    return self._tensor(node, source.at)


def _expand(self: IndexExpressions, node: fx.Node) -> IndexedTensor:
    source = self.of(node.args[0])
    return self._tensor(node, lambda index: broadcast_at(source, index))


def _reshape(self: IndexExpressions, node: fx.Node) -> IndexedTensor:
    """Only those that add or drop dimensions of size one."""
    source, shape = self.of(node.args[0]), shape_of(node)
    kept = [i for i, size in enumerate(shape) if size != 1]
    wanted = [i for i, size in enumerate(source.shape) if size != 1]
    if [shape[i] for i in kept] != [source.shape[i] for i in wanted]:
        raise NotAnExpression(node, f"a {target_name(node)} that joins or splits dimensions")

    def at(index: Index) -> sympy.Basic:
        moved = [sympy.S.Zero] * len(source.shape)
        for here, there in zip(kept, wanted, strict=True):
            moved[there] = index[here]
        return source.at(tuple(moved))

    return self._tensor(node, at)


def _transpose(self: IndexExpressions, node: fx.Node) -> IndexedTensor:
    source = self.of(node.args[0])
    rank = len(source.shape)
    first, second = (dim % rank for dim in node.args[1:3])
    order = list(range(rank))
    order[first], order[second] = second, first
    return self._tensor(node, lambda index: source.at(tuple(index[i] for i in order)))


def _getitem(self: IndexExpressions, node: fx.Node) -> IndexedTensor:
    source = self.of(node.args[0])
    items = list(node.args[1]) if isinstance(node.args[1], tuple | list) else [node.args[1]]
    if any(is_tensor(item) for item in items):
        return _gather(self, node, source, items)
    used = sum(item is not None and item is not Ellipsis for item in items)
    fill = [slice(None)] * (len(source.shape) - used)
    where = items.index(Ellipsis) if Ellipsis in items else len(items)
    items[where : where + 1] = fill

    steps: list[Callable[[list], sympy.Expr]] = []  # one per source dimension: takes what it needs of the output index
    out, dim = 0, 0
    shape = shape_of(node)
    for item in items:
        if item is None:
            out += 1
            continue
        if isinstance(item, slice):
            offset = _slice_offset(node, item, source.shape[dim], shape[out])
            steps.append(lambda index, out=out, offset=offset: index[out] + offset)
            out += 1
        else:
            number = scalar(item)
            if number is None or is_condition(number):
                raise NotAnExpression(node, f"an index {item}")
            fixed = number + source.shape[dim] if number.is_negative else number
            steps.append(lambda index, fixed=fixed: fixed)
        dim += 1
    return self._tensor(node, lambda index: source.at(tuple(step(index) for step in steps)))


def _slice_offset(node: fx.Node, item: slice, size: sympy.Expr, length: sympy.Expr) -> sympy.Expr:
    if item.step not in (None, 1):
        raise NotAnExpression(node, f"a slice with step {item.step}")
    if item.start is None:
        return sympy.S.Zero
    start = scalar(item.start)
    if start is None:
        raise NotAnExpression(node, f"a slice from {item.start}")
    if start.is_nonnegative:
        return start
    if item.stop is None:
        return size - length  # also right where torch clamps a start before the beginning
    raise NotAnExpression(node, f"a slice from {item.start}")


def _gather(self: IndexExpressions, node: fx.Node, source: IndexedTensor, items: list) -> IndexedTensor:
    """``x[i, j]`` with one integer tensor per dimension, or ``x[:, i]`` with a single one-dimensional tensor."""
    tensors = [item for item in items if is_tensor(item)]
    if any(tensor.meta["example_value"].dtype == torch.bool for tensor in tensors):
        raise NotAnExpression(node, "selection by a bool tensor")
    if len(tensors) == len(items) == len(source.shape):
        parts = [self.of(tensor) for tensor in tensors]
        return self._tensor(node, lambda index: source.at(tuple(broadcast_at(part, index) for part in parts)))
    plain = all(is_tensor(item) or item == slice(None) for item in items)
    if len(tensors) == 1 and plain and len(tensors[0].meta["example_value"].shape) == 1:
        where, part = items.index(tensors[0]), self.of(tensors[0])
        return self._tensor(
            node, lambda index: source.at((*index[:where], part.at((index[where],)), *index[where + 1 :]))
        )
    raise NotAnExpression(node, "an index of tensors and slices")


def _pad(self: IndexExpressions, node: fx.Node) -> IndexedTensor:
    """Zeros after the end of the last dimension."""
    call = _arguments(node, "input", "pad", "mode", "value")
    source, widths = self.of(call["input"]), call["pad"]
    if (
        len(widths) != 2
        or widths[0] != 0
        or call.get("mode", "constant") != "constant"
        or call.get("value") not in (None, 0)
    ):
        raise NotAnExpression(node, f"pad by {widths}")
    end = source.shape[-1]
    return self._tensor(
        node, lambda index: sympy.And(index[-1] < end, as_bool(source.at(index))) if source.is_bool
        else sympy.Piecewise((source.at(index), index[-1] < end), (0, True)),
    )  # fmt: skip


def _where(self: IndexExpressions, node: fx.Node) -> IndexedTensor:
    call = _arguments(node, "condition", "input", "other")
    arguments = (call["condition"], call["input"], call["other"])
    if node.meta["example_value"].dtype != torch.bool:
        raise NotAnExpression(node, "where over numbers")
    return self._elementwise(
        node, lambda c, a, b: sympy.Or(sympy.And(c, as_bool(a)), sympy.And(sympy.Not(c), as_bool(b))), arguments
    )


def _masked_fill(self: IndexExpressions, node: fx.Node) -> IndexedTensor:
    call = _arguments(node, "input", "mask", "value")
    if node.meta["example_value"].dtype != torch.bool or scalar(call["value"]) is None:
        raise NotAnExpression(node, "masked_fill of numbers")
    if as_bool(scalar(call["value"])) == sympy.true:
        return self._elementwise(node, lambda x, m: sympy.Or(x, m), (call["input"], call["mask"]))
    return self._elementwise(node, lambda x, m: sympy.And(x, sympy.Not(m)), (call["input"], call["mask"]))


def _triangle(keep: Callable[[sympy.Expr], Boolean]) -> Callable:
    def rule(self: IndexExpressions, node: fx.Node) -> IndexedTensor:
        call = _arguments(node, "input", "diagonal")
        source, diagonal = self.of(call["input"]), scalar(call.get("diagonal", 0))
        if diagonal is None:
            raise NotAnExpression(node, f"{target_name(node)} with diagonal {call['diagonal']}")
        return self._tensor(
            node, lambda index: sympy.And(as_bool(source.at(index)), keep(diagonal - index[-1] + index[-2]))
            if source.is_bool
            else sympy.Piecewise((source.at(index), keep(diagonal - index[-1] + index[-2])), (0, True)),
        )  # fmt: skip

    return rule


def _rules() -> dict[str, Callable[[IndexExpressions, fx.Node], IndexedTensor]]:
    rules: dict[str, Callable] = {
        "add": _binary(operator.add, as_integer),
        "sub": _binary(operator.sub, as_integer),
        "rsub": _binary(lambda a, b: b - a, as_integer),
        "mul": _multiply,
        "floordiv": _binary(lambda a, b: sympy.floor(a / b), as_integer),
        "le": _binary(sympy.Le, as_integer),
        "lt": _binary(sympy.Lt, as_integer),
        "ge": _binary(sympy.Ge, as_integer),
        "gt": _binary(sympy.Gt, as_integer),
        "eq": _binary(sympy.Eq, as_integer),
        "ne": _binary(sympy.Ne, as_integer),
        "arange": _arange,
        "expand": _expand,
        "reshape": _reshape,
        "transpose": _transpose,
        "getitem": _getitem,
        "pad": _pad,
        "where": _where,
        "masked_fill": _masked_fill,
        "tril": _triangle(lambda distance: distance >= 0),
        "triu": _triangle(lambda distance: distance <= 0),
    }
    for name in ("and", "or", "xor", "not"):
        function = {"and": sympy.And, "or": sympy.Or, "xor": sympy.Xor, "not": sympy.Not}[name]
        for spelling in (f"{name}_", f"__{name}__", f"logical_{name}", f"bitwise_{name}", name):
            rules[spelling] = _logical(function)
    rules["invert"] = rules["__invert__"] = rules["not"]
    for name in ("add", "sub", "mul", "le", "lt", "ge", "gt", "eq", "ne", "getitem", "floordiv"):
        rules[f"__{name}__"] = rules[name]
    rules.update(subtract=rules["sub"], multiply=rules["mul"], floor_divide=rules["floordiv"])
    rules.update(less_equal=rules["le"], less=rules["lt"], greater_equal=rules["ge"], greater=rules["gt"])
    rules.update(dict.fromkeys(("to", "bool", "int", "long", "type", "contiguous", "clone", "detach"), _same))
    rules.update(dict.fromkeys(("view", "unsqueeze", "squeeze", "flatten"), _reshape))
    rules.update(dict.fromkeys(("expand_as", "broadcast_to"), _expand))
    rules.update(dict.fromkeys(("ones", "new_ones", "ones_like"), _constant(1)))
    rules.update(dict.fromkeys(("zeros", "new_zeros", "zeros_like"), _constant(0)))
    rules.update(dict.fromkeys(("full", "new_full", "full_like"), _constant(None)))
    return rules


_RULES = _rules()
