"""Linear layers of decode graphs: those that read the same input become one ``ckv::grouped_linear`` and views of it.

A step reads every weight once for a row or a few, so a kernel that has less to read than the memory wants in flight is
slow: the projections of one input do better together. Their weights stay where they are.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

import ckv_compile.ops  # noqa: F401  (registers the operator)
from ckv_compile.passes import graph_edit
from ckv_compile.passes.index_expressions import memory_owner, mutated_argument

MOST_ROWS, MOST_MATRICES = 16, 4  # of the kernel
LINEAR = (F.linear, torch._C._nn.linear)
_op = torch.ops.ckv.grouped_linear.default


def group_projections(gm: fx.GraphModule, grouping: str) -> tuple[int, int]:
    """Group in place; (linear layers that were replaced, operators that stand for them).

    grouping: "off", "inputs" (two or more that read the same input) or "all" (also those that are alone).
    """
    if grouping == "off":
        return 0, 0
    least = 1 if grouping == "all" else 2
    groups = [group for group in _groups(gm.graph) if len(group) >= least]
    for group in groups:
        _replace(gm.graph, group)
    if groups:
        gm.graph.lint()
        gm.recompile()
    return sum(map(len, groups)), len(groups)


def _groups(graph: fx.Graph) -> list[list[fx.Node]]:
    """Linear layers of one input between two writes to it, in their order.

    None depends on another of its group, since all else that they read are inputs of the graph.
    """
    groups: list[list[fx.Node]] = []
    growing: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if (written := mutated_argument(node)) is not None:
            owner = memory_owner(written)
            growing = {
                source: group
                for source, group in growing.items()
                if all(memory_owner(read) is not owner for linear in group for read in linear.all_input_nodes)
            }
        if not _fits(node):
            continue
        group = growing.get(_parts(node)[0])
        if group is None or len(group) == MOST_MATRICES:
            group = growing[_parts(node)[0]] = []
            groups.append(group)
        group.append(node)
    return groups


def _replace(graph: fx.Graph, group: list[fx.Node]) -> None:
    parts = [_parts(node) for node in group]
    with graph.inserting_before(group[0]):
        arguments = (parts[0][0], [weight for _, weight, _ in parts], [bias for _, _, bias in parts])
        joined = graph.call_function(_op, arguments)
    graph_edit.set_example_values(graph, [joined])
    if len(group) == 1:
        graph_edit.take_place(joined, group[0])
        return
    joined.meta.update({key: value for key, value in group[0].meta.items() if key != "example_value"})
    begin = 0
    for node in group:
        size = node.meta["example_value"].shape[-1]
        with graph.inserting_before(node):
            own = graph.call_function(torch.narrow, (joined, -1, begin, size))
        graph_edit.set_example_values(graph, [own])
        graph_edit.take_place(own, node)
        begin += size


def _parts(node: fx.Node) -> tuple[Any, Any, Any]:
    """Input, weight and bias of a linear layer."""
    given = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | node.kwargs
    return given.get("input"), given.get("weight"), given.get("bias")


def _fits(node: fx.Node) -> bool:
    """Whether the kernel can compute a node: a linear layer of few rows whose matrix is an input of the graph."""
    if node.op != "call_function" or node.target not in LINEAR:
        return False
    source, weight, bias = _parts(node)
    given = [weight] if bias is None else [weight, bias]
    if not isinstance(source, fx.Node) or any(not isinstance(n, fx.Node) or n.op != "placeholder" for n in given):
        return False
    values = [n.meta.get("example_value") for n in (node, source, *given)]
    if not all(isinstance(value, torch.Tensor) for value in values) or any(map(graph_edit.has_symbol, values)):
        return False
    out, entering, matrix = values[:3]
    return (
        matrix.dim() == 2
        and entering.dim() >= 1
        and 1 <= math.prod(entering.shape[:-1]) <= MOST_ROWS
        and all(value.is_contiguous() for value in values[2:])
        and all(value.dtype == out.dtype and value.device == out.device for value in values)
        and out.dtype.is_floating_point
    )
