"""What layers with a sliding window, which stay as they are, read and leave at every step: so that all steps are alike.

A sliding-window layer makes its mask of a count of tokens, which dynamo hands over as an integer, and of the padding mask,
which has one column more at every step. A CUDA graph is of one value of an integer and of one size of a tensor: with these
inputs every step would be recorded anew. But the count is the length of the cache, which the device has, and what the
runtime checks of the padding mask is that a row is hidden before its first real token, which the device has too.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, cast

import sympy
import torch
from torch import fx

from ckv_compile.passes import graph_edit
from ckv_compile.passes.index_expressions import is_tensor, memory_owner, size_expr, target_name

_ELEMENTWISE = frozenset({"add", "sub", "lt", "le", "gt", "ge", "eq", "ne"})
_CASTS = frozenset({"to", "bool"})
# How torch joins a tensor with a number, and with a tensor, for what sympy calls it.
_JOINS: dict[str, tuple[Callable, Callable]] = {
    "Add": (torch.add, torch.add), "Mul": (torch.mul, torch.mul), "Max": (torch.clamp_min, torch.maximum),
    "Min": (torch.clamp_max, torch.minimum),
}  # fmt: skip


# ---------------------------------------------------------------------- counts


def replace_counts(
    graph: fx.Graph, inputs: list[fx.Node], outputs: list[fx.Node], length: fx.Node
) -> dict[fx.Node, dict[int, int]]:
    """Let tensors be computed from ``length``, where they are from an integer input that counts the cached tokens.

    length: int32 [1], or int64 of one element: the tokens before this step, until the graph itself writes to it.
    outputs: those of the graph. An input is taken where its integer meets int64 tensors in sums and comparisons, or is an
    output, increased by a constant, and nowhere else; others stay. Returns the inputs that were taken, each with what
    the outputs add to it, by their positions. The caller drops these outputs, and vouches for the inputs' values.
    """
    nodes = {size_expr(node.meta["example_value"]): node for node in inputs if _is_count(node)}
    uses: dict[sympy.Expr, list[tuple[fx.Node, fx.Node]]] = {symbol: [] for symbol in nodes}
    added: dict[sympy.Expr, dict[int, int]] = {symbol: {} for symbol in nodes}
    for node in graph.nodes:
        for symbol in _symbols_of(node.meta.get("example_value")) & set(nodes):
            if is_tensor(node):  # a size: then the graph is for one size anyway
                nodes.pop(symbol)
                continue
            for user in node.users:
                if user.op == "output" or isinstance(user.meta.get("example_value"), torch.SymInt):
                    continue
                if _meets_tensor(user, node, length):
                    uses[symbol].append((user, node))
                else:
                    nodes.pop(symbol, None)
    for position, node in enumerate(outputs):
        value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
        if isinstance(value, torch.SymInt):
            for symbol in value.node.expr.free_symbols & set(nodes):
                more = value.node.expr - symbol
                if more.is_Integer:
                    added[symbol][position] = int(more)
                else:
                    nodes.pop(symbol)
    nodes = {symbol: node for symbol, node in nodes.items() if uses[symbol] or added[symbol]}
    made = _Tensors(graph, length)
    for symbol in nodes:
        for user, count in uses[symbol]:
            user.replace_input_with(count, made.of(size_expr(count.meta["example_value"])))
    return {node: added[symbol] for symbol, node in nodes.items()}


def _name(expression: sympy.Expr) -> str:
    return type(expression).__name__


def _is_count(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.SymInt) and value.node.expr.is_Symbol


def _symbols_of(value: object) -> set[sympy.Symbol]:
    if isinstance(value, torch.SymInt):
        return set(value.node.expr.free_symbols)
    if isinstance(value, torch.Tensor):
        sizes = (*value.shape, *value.stride(), value.storage_offset())
        return set().union(*(size_expr(size).free_symbols for size in sizes))
    return set()


def _meets_tensor(user: fx.Node, count: fx.Node, length: fx.Node) -> bool:
    """Whether a tensor of one element may stand for ``count`` in ``user``: no other dtype, no other shape."""
    if target_name(user) not in _ELEMENTWISE or len(user.args) != 2 or user.kwargs:
        return False
    other = next((arg for arg in user.args if arg is not count), None)
    if not is_tensor(other) or not _Tensors.makes(count.meta["example_value"].node.expr):
        return False
    value = other.meta["example_value"]
    return value.dtype == torch.int64 and value.dim() > 0 and value.device == length.meta["example_value"].device


class _Tensors:
    """int64 tensors [1] for expressions of one number, which ``length`` holds; computed before everything else."""

    def __init__(self, graph: fx.Graph, length: fx.Node) -> None:
        self.graph, self.length = graph, length
        self.first = next(node for node in graph.nodes if node.op != "placeholder")
        self.made: dict[sympy.Expr, fx.Node] = {}

    @staticmethod
    def makes(expression: sympy.Expr) -> bool:
        """Whether ``of`` knows everything in it."""
        parts = sympy.preorder_traversal(expression)
        return all(part.is_Integer or part.is_Symbol or _name(part) in _JOINS for part in parts)

    def of(self, expression: sympy.Expr) -> fx.Node | int:
        if expression.is_Integer:
            return int(expression)
        if expression not in self.made:
            self.made[expression] = self._make(expression)
        return self.made[expression]

    def _make(self, expression: sympy.Expr) -> fx.Node:
        if expression.is_Symbol:
            return self._copied()
        parts = sorted((self.of(part) for part in expression.args), key=lambda part: isinstance(part, int))
        with_number, with_tensor = _JOINS[_name(expression)]
        return functools.reduce(
            lambda a, b: self._call(with_number if isinstance(b, int) else with_tensor, a, b), parts
        )

    def _copied(self) -> fx.Node:
        """The length as it is before anything is written to it."""
        value = self.length.meta["example_value"]
        if value.dtype == torch.int64:
            return self._call(torch.clone, self._call(torch.reshape, self.length, (1,)))
        with self.graph.inserting_before(self.first):
            node = self.graph.call_method("to", (self.length, torch.int64))
        with graph_edit.fake_mode_of(self.graph):
            node.meta["example_value"] = value.to(torch.int64)
        return node

    def _call(self, function: Callable, *args: Any) -> fx.Node:
        with self.graph.inserting_before(self.first):
            node = self.graph.call_function(function, args)
        graph_edit.set_example_values(self.graph, [node])
        return node


# ---------------------------------------------------------------------- windows


def let_windows_go(graph: fx.Graph) -> None:
    """Outputs that are the last tokens of a K or V [B, H, n, D] of this graph's become tensors of their own, contiguous.

    As views they keep all n tokens alive, and their strides are those of n: dynamo compiled a step anew for each length of
    a prompt, and once more for the step behind it.
    """
    output = graph_edit.output_node(graph)
    for node in dict.fromkeys(output.args[0]):
        if isinstance(node, fx.Node) and _is_window(node):
            with graph.inserting_before(output):
                own = graph.call_method("contiguous", (node,))
            with graph_edit.fake_mode_of(graph):
                own.meta["example_value"] = node.meta["example_value"].contiguous()
            output.replace_input_with(node, own)


def _is_window(node: fx.Node) -> bool:
    if node.target is not operator.getitem or not is_tensor(node) or not isinstance(node.args[1], tuple):
        return False
    if memory_owner(node).op == "placeholder":
        return False  # whoever writes to the input expects to see it here
    index = node.args[1]
    if node.meta["example_value"].dim() != 4 or len(index) < 3 or not isinstance(index[2], slice):
        return False
    last = isinstance(index[2].start, int) and index[2].start < 0 and index[2].stop is None
    return last and all(one == slice(None) for place, one in enumerate(index) if place != 2)


# ---------------------------------------------------------------------- padding


def replace_padding(graph: fx.Graph, padding: fx.Node, first: fx.Node) -> bool:
    """Let ``first`` say which positions are padding where a mask ``padding`` [B, n] is looked up; whether that was so.

    first: int tensor [B], the first real token of each row. Only where every use of the mask is a look-up of Booleans at
    rows and positions of tokens that the cache holds. The caller vouches for the mask being left padding.
    """
    reads, pending = [], [padding]
    while pending:
        node = pending.pop()
        for user in node.users:
            value = user.meta.get("example_value")
            if target_name(user) in _CASTS and isinstance(value, torch.Tensor) and value.dtype == torch.bool:
                pending.append(user)
            elif _is_look_up(user, node):
                reads.append(user)
            else:
                return False
    for read in reads:
        row, position = cast(tuple, read.args[1])
        with graph.inserting_before(read):
            begin = graph.call_function(operator.getitem, (first, (row,)))
            real = graph.call_function(operator.ge, (position, begin))
        graph_edit.set_example_values(graph, [begin, real])
        graph_edit.take_place(real, read)
    return bool(reads)


def _is_look_up(user: fx.Node, mask: fx.Node) -> bool:
    if user.target is not operator.getitem or user.args[0] is not mask or not isinstance(user.args[1], tuple):
        return False
    index = user.args[1]
    integers = len(index) == 2 and all(
        is_tensor(one) and one.meta["example_value"].dtype == torch.int64 for one in index
    )
    return integers and mask.meta["example_value"].dtype == torch.bool
