"""Editing copies of dynamo's graphs: what a copy keeps, what state inputs are, and what may be erased."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd import frontend_utils

from ckv_compile.config import CommunityConfig
from ckv_compile.passes import graph_edit
from ckv_compile.passes.index_expressions import size_expr
from ckv_compile.passes.match_attention import find_sites
from ckv_compile.testing import Captured, capture_call, captured_turns, rewritten

GRAPHS = [(cache, turn) for cache in ("dynamic", "static") for turn in (0, 1, 2)]
NAMES = [f"{cache} {kind}" for cache in ("dynamic", "static") for kind in ("prefill", "decode", "later prefill")]
CONFIG = CommunityConfig(graph="attention", min_context=0, workers=0)


def llama(cache: str, turn: int) -> Captured:
    return captured_turns("llama", cache, True)[turn]


# ---------------------------------------------------------------------- copies


@pytest.mark.parametrize(("cache", "turn"), GRAPHS, ids=NAMES)
def test_rewriting_a_copy_leaves_the_graph_of_dynamo_alone(cache, turn):
    gm = llama(cache, turn).gm

    def state() -> tuple:
        nodes = [(n.name, n.op, str(n.target), sorted(n.meta), len(n.users)) for n in gm.graph.nodes]
        return gm.code, gm.graph.python_code("self").src, nodes, sorted(gm.meta), graph_edit.placeholders(gm.graph)

    before = state()
    rewritten(llama(cache, turn), CONFIG)
    assert state() == before


def test_a_copy_keeps_what_is_looked_up_later():
    gm = llama("dynamic", 1).gm
    copied = graph_edit.copy_graph(gm)
    assert copied.code == gm.code
    assert copied.meta == gm.meta
    assert copied.meta is not gm.meta
    assert copied._param_name_to_source == gm._param_name_to_source
    for old, new in zip(gm.graph.nodes, copied.graph.nodes, strict=True):
        assert new is not old
        assert new.name == old.name
        assert new.meta == old.meta or new.op == "output"
        assert getattr(new, "_dynamo_source", None) is getattr(old, "_dynamo_source", None)


def test_a_copy_runs_like_the_original():
    captured = llama("dynamic", 0)
    copied = graph_edit.copy_graph(captured.gm)
    got, expected = copied.forward(*captured.inputs), captured.gm.forward(*captured.inputs)
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.equal(theirs)


# ---------------------------------------------------------------------- what AOTAutograd looks up


def static_inputs(gm: fx.GraphModule) -> set[str]:
    """Names of the placeholders that CUDA graphs take to stay at their addresses."""
    nodes = graph_edit.placeholders(gm.graph)
    sources, positions = frontend_utils._try_get_metadata_from_dynamo(gm, {}.keys(), len(nodes), [])
    assert len(sources) == len(nodes)
    return {nodes[i].name for i in positions}


@pytest.mark.parametrize(("cache", "turn"), GRAPHS, ids=NAMES)
def test_parameters_and_state_are_static_inputs(cache, turn):
    captured = llama(cache, turn)
    gm = rewritten(captured, CONFIG).gm
    parameters = {
        node.name
        for node in graph_edit.placeholders(captured.gm.graph)
        if isinstance(node.meta["example_value"], nn.Parameter)
    }
    assert len(parameters) == 21
    assert parameters <= static_inputs(captured.gm)
    state = {node.name for node in graph_edit.placeholders(gm.graph) if node.name.startswith("ckv_")}
    assert state
    assert static_inputs(gm) - state == static_inputs(captured.gm) & {n.name for n in graph_edit.placeholders(gm.graph)}
    assert parameters | state <= static_inputs(gm)


@pytest.mark.parametrize(("cache", "turn"), GRAPHS, ids=NAMES)
def test_state_inputs_are_unguarded_fakes_behind_all_others(cache, turn):
    captured = llama(cache, turn)
    result = rewritten(captured, CONFIG)
    inputs = graph_edit.placeholders(result.gm.graph)
    mode = graph_edit.fake_mode_of(captured.gm.graph)
    assert [node.name for node in inputs[len(result.plan.keep) :]] == [f"ckv_{name}" for name in result.plan.state]
    for node in inputs[len(result.plan.keep) :]:
        assert node.meta["tensor_dict"] == {"_dynamo_static_input_type": "unguarded"}
        assert node._dynamo_source is None
        assert node.meta["example_value"].fake_mode is mode
        assert not graph_edit.has_symbol(node.meta["example_value"])
    for node in inputs[: len(result.plan.keep)]:
        assert hasattr(node, "_dynamo_source")


@pytest.mark.parametrize(("cache", "turn"), GRAPHS, ids=NAMES)
@pytest.mark.parametrize("options", [{"graph": "keys"}, {"graph": "mixed"}, {"append": "assign"}], ids=str)
def test_every_new_value_has_a_fake(cache, turn, options):
    captured = llama(cache, turn)
    gm = rewritten(captured, CommunityConfig(min_context=0, workers=0, **options)).gm
    mode = graph_edit.fake_mode_of(captured.gm.graph)
    known = {node.name for node in captured.gm.graph.nodes}
    new = [node for node in gm.graph.nodes if node.name not in known]
    assert len(new) > 6
    for node in new:
        value = node.meta.get("example_value")
        returns = getattr(getattr(node.target, "_schema", None), "returns", [None])
        assert (value is not None) == bool(returns), node
        tensors = value if isinstance(value, tuple) else [value] if isinstance(value, Tensor) else []
        assert all(tensor.fake_mode is mode for tensor in tensors), node


@pytest.mark.parametrize(("cache", "turn"), GRAPHS, ids=NAMES)
def test_the_output_is_what_its_users_expect(cache, turn):
    """Shape, dtype and strides of the SDPA call, strides of single elements aside; and the metadata of its node."""
    captured = llama(cache, turn)
    before, _ = find_sites(captured.gm)
    gm = rewritten(captured, CONFIG).gm
    by_name = {node.name: node for node in gm.graph.nodes}
    for site in before:
        (user,) = site.node.users
        (out,) = [
            n for n in by_name[user.name].all_input_nodes if n.name not in {m.name for m in captured.gm.graph.nodes}
        ]
        old, new = site.node.meta["example_value"], out.meta["example_value"]
        assert (new.dtype, new.device) == (old.dtype, old.device)
        assert [size_expr(n) for n in new.shape] == [size_expr(n) for n in old.shape]
        for size, mine, theirs in zip(old.shape, new.stride(), old.stride(), strict=True):
            assert size_expr(size) == 1 or (size_expr(mine) - size_expr(theirs)).expand() == 0
        assert out.meta["nn_module_stack"] == site.node.meta["nn_module_stack"]
        assert out.meta["stack_trace"] == site.node.meta["stack_trace"]


def test_rewriting_installs_no_guard():
    for cache, turn in GRAPHS:
        captured = llama(cache, turn)
        values = [node.meta.get("example_value") for node in captured.gm.graph.nodes]
        environments = {value.node.shape_env for value in values if isinstance(value, torch.SymInt)}
        before = [len(environment.guards) for environment in environments]
        rewritten(captured, CONFIG)
        assert [len(environment.guards) for environment in environments] == before


# ---------------------------------------------------------------------- erasing


torch.library.define("ckv_graph_edit_test::note", "(Tensor x) -> ()")
torch.library.define("ckv_graph_edit_test::bump", "(Tensor(a!) x) -> ()")
for _name in ("note", "bump"):
    torch.library.impl(f"ckv_graph_edit_test::{_name}", "CompositeExplicitAutograd", lambda x: None)
    torch.library.register_fake(f"ckv_graph_edit_test::{_name}", lambda x: None)


def erased(function, *args) -> fx.Graph:
    gm = graph_edit.copy_graph(capture_call(function, *args).gm)
    graph_edit.erase_dead(gm.graph)
    gm.graph.lint()
    return gm.graph


def autocast(x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.linear(x, x)


def in_place_operator(x: Tensor, y: Tensor) -> Tensor:
    view = y[1:]
    view += 1
    return x * 2


def item(x: Tensor, y: Tensor) -> Tensor:
    y[0] = 1
    return x * 2


def method(x: Tensor, y: Tensor) -> Tensor:
    y.view(-1).mul_(2)
    return x * 2


def out_argument(x: Tensor, y: Tensor) -> Tensor:
    torch.add(x, 1, out=y)
    return x * 2


def operator_without_value(x: Tensor, y: Tensor) -> Tensor:
    torch.ops.ckv_graph_edit_test.note(y)
    return x * 2


def mutable_operator(x: Tensor, y: Tensor) -> Tensor:
    torch.ops.ckv_graph_edit_test.bump(y)
    return x * 2


def assertion(x: Tensor, y: Tensor) -> Tensor:
    torch._assert_async((y < 1e9).all())
    return x * 2


@pytest.mark.parametrize(
    ("function", "kept"),
    [
        (autocast, ["_enter_autocast", "_exit_autocast"]),
        (in_place_operator, ["getitem", "iadd"]),
        (item, ["setitem"]),
        (method, ["view", "mul_"]),
        (out_argument, ["add"]),
        (operator_without_value, ["note"]),
        (mutable_operator, ["bump"]),
        (assertion, ["_assert_async"]),
    ],
)
def test_what_has_an_effect_stays(function, kept):
    graph = erased(function, torch.randn(4, 4), torch.randn(4, 4))
    names = [getattr(node.target, "__name__", node.target) for node in graph.nodes]
    assert [name for name in names if name in kept] == kept
    if function is not autocast:
        assert len(graph_edit.placeholders(graph)) == 2


def test_pure_nodes_and_inputs_that_nobody_reads_are_erased():
    def function(x: Tensor, y: Tensor) -> Tensor:
        (y.sin() + 1).view(-1)
        return x * 2

    gm = graph_edit.copy_graph(capture_call(function, torch.randn(3), torch.randn(3)).gm)
    graph_edit.erase_dead(gm.graph, frozenset(graph_edit.placeholders(gm.graph)))
    assert [node.name for node in gm.graph.nodes] == ["l_y_", "l_x_", "mul", "output"]
    graph_edit.erase_dead(gm.graph)
    assert [node.name for node in gm.graph.nodes] == ["l_x_", "mul", "output"]


def test_the_effects_of_a_model_survive_rewriting():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, hidden, keys, values):
            self.calls.add_(1)
            torch.ops.ckv_graph_edit_test.note(hidden)
            new = hidden.unflatten(2, (4, 16)).transpose(1, 2)
            keys, values = (torch.cat([past, new], dim=2) for past in (keys, values))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                extra = hidden @ hidden.transpose(1, 2)
            out = F.scaled_dot_product_attention(new, keys, values).transpose(1, 2).flatten(2)
            return out, keys, values, extra

    captured = capture_call(Counting(), torch.randn(2, 1, 64), *(torch.randn(2, 4, 6, 16) for _ in range(2)))
    gm = rewritten(captured, CONFIG).gm
    names = [getattr(node.target, "__name__", node.target) for node in gm.graph.nodes]
    for name in ("add_", "note", "_enter_autocast", "_exit_autocast"):
        assert name in names
    assert names.index("_enter_autocast") < names.index("matmul") < names.index("_exit_autocast")


# ---------------------------------------------------------------------- symbols


def test_symbols_are_seen_in_sizes_strides_offsets_and_tuples():
    gm = capture_of_dynamic_length()
    (size,) = [
        node for node in graph_edit.placeholders(gm.graph) if isinstance(node.meta["example_value"], torch.SymInt)
    ]
    (tensor,) = [node for node in graph_edit.placeholders(gm.graph) if node is not size]
    symbol, value = size.meta["example_value"], tensor.meta["example_value"]
    assert graph_edit.has_symbol(symbol)
    assert graph_edit.has_symbol(value)
    assert graph_edit.has_symbol(value[0])  # a stride goes, the size stays
    assert graph_edit.has_symbol(value.t()[:1])
    assert graph_edit.has_symbol((1, [symbol]))
    assert not graph_edit.has_symbol(value[:, 0].sum())
    assert not graph_edit.has_symbol((1, 2.0, None))
    assert {size.name, tensor.name} <= set(graph_edit.symbolic_nodes(gm.graph))


def capture_of_dynamic_length() -> fx.GraphModule:
    x = torch.randn(3, 5)
    torch._dynamo.mark_dynamic(x, 1)
    return capture_call(lambda x: x * x.shape[1], x).gm
