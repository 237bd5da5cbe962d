"""Editing a copy of dynamo's graph: copying with its metadata, adding state inputs, erasing what became dead."""

from __future__ import annotations

from collections.abc import Iterable

import sympy
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ckv_compile.passes.index_expressions import mutated_argument, size_expr


def copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy that may be edited. Dynamo re-reads its own ``gm`` after the backend returns, so that one is left alone.

    Keeps what AOTAutograd looks up: ``meta``, ``_param_name_to_source`` and the ``_dynamo_source`` of placeholders
    (without these the parameters are no static inputs to CUDA graphs).
    """
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(gm.graph, env))
    for old, new in env.items():
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    copied = fx.GraphModule(gm, graph)
    copied.meta = dict(gm.meta)
    if hasattr(gm, "_param_name_to_source"):
        copied._param_name_to_source = dict(gm._param_name_to_source)
    return copied


def inline_numbers(graph: fx.Graph) -> None:
    """Put numbers where dynamo read a float of the model's as an input (``dynamic=True``) but has specialised it since."""
    for node in list(graph.nodes):
        value = node.meta.get("example_value")
        if node.op != "placeholder" and isinstance(value, torch.SymFloat) and value.node.expr.is_number:
            node.replace_all_uses_with(float(value.node.expr))
            graph.erase_node(node)


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def output_node(graph: fx.Graph) -> fx.Node:
    return next(node for node in reversed(graph.nodes) if node.op == "output")


def fake_mode_of(graph: fx.Graph) -> FakeTensorMode:
    """The mode that dynamo traced the graph in; the tracing context may already hold another one."""
    for node in placeholders(graph):
        value = node.meta["example_value"]
        if isinstance(value, FakeTensor):
            return value.fake_mode
    raise AssertionError("a graph of dynamo's has fake tensors as inputs")


def add_state_inputs(graph: fx.Graph, fakes: dict[str, torch.Tensor]) -> dict[str, fx.Node]:
    """Append placeholders ``ckv_<name>`` in the order of ``fakes``.

    They are marked as having fixed addresses, so that CUDA-graph capture neither copies nor guards them.
    """
    nodes = {}
    last = placeholders(graph)[-1]
    for name, fake in fakes.items():
        with graph.inserting_after(last):
            last = graph.placeholder(f"ckv_{name}")
        last.meta["example_value"] = fake
        last.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
        last._dynamo_source = None
        nodes[name] = last
    return nodes


def set_example_values(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    """Fake values of new nodes, in order; AOTAutograd's cache is bypassed for users of nodes that lack them.

    Raises what an operator raises for arguments that do not fit together.
    """
    with fake_mode_of(graph):
        for node in nodes:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["example_value"])
            value = node.target(*args, **kwargs)
            if value is not None:
                node.meta["example_value"] = value


def take_place(new: fx.Node, old: fx.Node) -> None:
    """Let ``new`` stand for ``old`` and erase that; users find a contiguous tensor where they found one before.

    Raises ValueError if the two differ in shape or dtype.
    """
    before, after = old.meta["example_value"], new.meta["example_value"]
    if before.dtype != after.dtype or _sizes(before.shape) != _sizes(after.shape):
        raise ValueError(
            f"the attention gives {tuple(before.shape)} {before.dtype} here (autocast?), "
            f"its operators would give {tuple(after.shape)} {after.dtype}"
        )
    new.meta.update({key: value for key, value in old.meta.items() if key != "example_value"})
    graph = old.graph
    if _is_contiguous(before) and not _is_contiguous(after):
        with graph.inserting_before(old):
            new = graph.call_method("contiguous", (new,))
        with fake_mode_of(graph):
            new.meta["example_value"] = after.contiguous()
    old.replace_all_uses_with(new)
    graph.erase_node(old)


def _sizes(sizes: Iterable[int | torch.SymInt]) -> list[sympy.Expr]:
    return [size_expr(size) for size in sizes]


def _is_contiguous(tensor: torch.Tensor) -> bool:
    """As torch sees it, but without guards on symbolic sizes."""
    expected = sympy.S.One
    for size, stride in zip(reversed(_sizes(tensor.shape)), reversed(_sizes(tensor.stride())), strict=True):
        if size != 1 and sympy.expand(stride - expected) != 0:
            return False
        expected *= size
    return True


def erase_dead(graph: fx.Graph, keep_placeholders: frozenset[fx.Node] = frozenset()) -> None:
    """Erase pure nodes without users, then placeholders without users; mutations and side effects stay."""
    for node in reversed(graph.nodes):
        if node.op in ("call_function", "call_method", "get_attr") and not node.users and not has_effect(node):
            graph.erase_node(node)
    for node in placeholders(graph):
        if not node.users and node not in keep_placeholders:
            graph.erase_node(node)


def has_effect(node: fx.Node) -> bool:
    """Whether erasing ``node``, whose value nobody reads, could still be noticed.

    A call without a value is there for its effect: it enters or leaves autocast, asserts, logs, writes somewhere.
    """
    if node.op not in ("call_function", "call_method"):
        return False
    return node.meta.get("example_value") is None or mutated_argument(node) is not None or node.is_impure()


def has_symbol(value: object) -> bool:
    """Whether a size is not known yet; a symbol that was specialised is."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return bool(value.node.expr.free_symbols)
    if isinstance(value, torch.Tensor):
        return any(map(has_symbol, (*value.shape, *value.stride(), value.storage_offset())))
    return isinstance(value, tuple | list) and any(map(has_symbol, value))


def symbolic_nodes(graph: fx.Graph) -> list[str]:
    """Names of nodes whose value still depends on a symbolic size."""
    return [node.name for node in graph.nodes if has_symbol(node.meta.get("example_value"))]
