"""Editing a copy of dynamo's graph: copying with its metadata, adding state inputs, erasing what became dead."""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# Calls that matter although nobody reads their value.
_EFFECTS = frozenset({torch._C._log_api_usage_once})


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


def erase_dead(graph: fx.Graph, keep_placeholders: frozenset[fx.Node] = frozenset()) -> None:
    """Erase pure nodes without users, then placeholders without users; mutations and side effects stay."""
    for node in reversed(graph.nodes):
        if node.op in ("call_function", "call_method", "get_attr") and not node.users and not has_effect(node):
            graph.erase_node(node)
    for node in placeholders(graph):
        if not node.users and node not in keep_placeholders:
            graph.erase_node(node)


def has_effect(node: fx.Node) -> bool:
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") and not name.endswith("__")
    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    if node.target in _EFFECTS or node.target is operator.setitem:
        return True
    name = getattr(node.target, "__name__", "")
    return name.endswith("_") and not name.endswith("__") and name not in ("and_", "or_", "not_", "is_")


def has_symbol(value: object) -> bool:
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return True
    if isinstance(value, torch.Tensor):
        return any(isinstance(x, torch.SymInt) for x in (*value.shape, *value.stride(), value.storage_offset()))
    return isinstance(value, tuple | list) and any(map(has_symbol, value))


def symbolic_nodes(graph: fx.Graph) -> list[str]:
    """Names of nodes whose value still depends on a symbolic size."""
    return [node.name for node in graph.nodes if has_symbol(node.meta.get("example_value"))]
