"""Linear layers of decode graphs, grouped: which, into what, and that the graph computes what it did.

Rewrite the expected texts with ``EXPECTTEST_ACCEPT=1 pytest``.
"""

import re

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn

from ckv_compile.config import CommunityConfig
from ckv_compile.passes import graph_edit
from ckv_compile.passes.group_projections import LINEAR, group_projections
from ckv_compile.testing import RewrittenCache, capture_call, captured_turns, rewritten

CONFIG = CommunityConfig(min_context=0, workers=0, num_sink_tokens=1, recent_window=2, budget=64)
PREFILL, DECODE = 0, 1


def graph_of(family, cache="dynamic", turn=DECODE):
    return rewritten(captured_turns(family, cache, False, num_hidden_layers=1)[turn], CONFIG)


def text(gm):
    """Grouped and other linear layers: columns, the names of their modules (with "+" for a bias) and who has which."""

    def name(weight, bias):
        return re.sub(r".*modules_(\w+)_parameters_.*", r"\1", weight.name) + "+" * (bias is not None)

    lines = []
    for node in gm.graph.nodes:
        if node.target is torch.ops.ckv.grouped_linear.default:
            views = [user.args[2:] for user in node.users if user.target is torch.narrow]
            at = "".join(f" {begin}:{begin + size}" for begin, size in views)
            names = " ".join(map(name, *node.args[1:]))
            lines.append(f"grouped {list(node.meta['example_value'].shape)}: {names}{at and ' at' + at}")
        elif node.target in LINEAR:
            lines.append(f"linear {list(node.meta['example_value'].shape)}: {name(*node.args[1:3])}")
    return "\n".join(lines)


def test_inputs_of_qwen3():
    gm = graph_of("qwen3").gm
    assert group_projections(gm, "inputs") == (5, 2)
    assert_expected_inline(
        text(gm),
        """\
grouped [2, 1, 128]: q_proj k_proj v_proj at 0:64 64:96 96:128
linear [2, 1, 64]: o_proj
grouped [2, 1, 192]: gate_proj up_proj at 0:96 96:192
linear [2, 1, 64]: down_proj
linear [2, 1, 128]: lm_head""",
    )


def test_all_of_qwen2_whose_projections_have_biases():
    gm = graph_of("qwen2").gm
    assert group_projections(gm, "all") == (8, 5)
    assert_expected_inline(
        text(gm),
        """\
grouped [2, 1, 128]: q_proj+ k_proj+ v_proj+ at 0:64 64:96 96:128
grouped [2, 1, 64]: o_proj
grouped [2, 1, 192]: gate_proj up_proj at 0:96 96:192
grouped [2, 1, 64]: down_proj
grouped [2, 1, 128]: lm_head""",
    )


def test_a_fused_projection_has_nothing_to_group():
    gm = graph_of("phi3").gm
    assert group_projections(gm, "inputs") == (0, 0)
    assert "grouped" not in text(gm)


def test_off_changes_nothing():
    gm = graph_of("llama").gm
    before = text(gm)
    assert group_projections(gm, "off") == (0, 0)
    assert text(gm) == before


def test_a_prompt_has_too_many_rows():
    assert group_projections(graph_of("llama", turn=PREFILL).gm, "all") == (0, 0)


@pytest.mark.parametrize("grouping", ["inputs", "all"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_decode_step_gives_the_same_logits(family, cache, grouping):
    captured = captured_turns(family, cache, False, num_hidden_layers=1)[DECODE]
    outputs = []
    for kind in ("off", grouping):
        graph = rewritten(captured, CONFIG)
        linears, kernels = group_projections(graph.gm, kind)
        assert (linears, kernels) == {"off": (0, 0), "inputs": (5, 2), "all": (8, 5)}[kind]
        state = RewrittenCache(CONFIG, graph.plan, [0, 0])
        inputs = [value.clone() if isinstance(value, torch.Tensor) else value for value in captured.inputs]
        if cache == "dynamic":
            state.fill([inputs[position] for position in graph.plan.past])
        else:
            state.sequence.length = 40
        outputs.append(state.run(graph, inputs)[0])
        assert not outputs[-1].isnan().any()
    assert torch.equal(*outputs)


# ---------------------------------------------------------------------- graphs that models do not have


class Layers(nn.Module):
    """Four linear layers of one width; ``function`` says what becomes of an input."""

    def __init__(self, function, width=8, number=4):
        super().__init__()
        self.function = function
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(number))

    def forward(self, x):
        return self.function(x, *self.linears)


def grouped_of(function, x=None, grouping="inputs", module=None, dynamic=None):
    x = torch.randn(2, 8) if x is None else x
    module = module or Layers(function)
    captured = capture_call(module, x.clone(), dynamic=dynamic)
    gm = graph_edit.copy_graph(captured.gm)
    found = group_projections(gm, grouping)
    inputs = [value.clone() if isinstance(value, torch.Tensor) else value for value in captured.inputs]
    with torch.no_grad():
        torch.testing.assert_close(gm(*inputs)[0], module(x.clone()), rtol=0, atol=0)
    return found


def test_a_layer_that_reads_another_is_not_of_its_group():
    assert grouped_of(lambda x, a, b, c, d: a(x) + b(x) * c(a(x))) == (3, 1)


def test_a_write_to_the_input_parts_its_readers():
    def function(x, a, b, c, d):
        y = x + 1
        first = a(y) + b(y)
        y[:, :1].mul_(2)
        return first + c(y) + d(y)

    assert grouped_of(function) == (4, 2)
    assert grouped_of(lambda x, a, b, c, d: a(x) + b(x.mul_(2)) + c(x)) == (0, 0)


def test_a_kernel_has_four_matrices_at_most():
    module = Layers(lambda x, *linears: sum(linear(x) for linear in linears), number=6)
    assert grouped_of(None, module=module) == (6, 2)
    module = Layers(lambda x, *linears: sum(linear(x) for linear in linears), number=5)
    assert grouped_of(None, module=module) == (4, 1)


@pytest.mark.parametrize("rows", [16, 17])
def test_rows_are_sixteen_at_most(rows):
    found = grouped_of(lambda x, a, b, c, d: a(x) + b(x), torch.randn(rows, 8))
    assert found == ((2, 1) if rows == 16 else (0, 0))


def test_a_symbolic_number_of_rows_is_left_alone():
    assert grouped_of(lambda x, a, b, c, d: a(x) + b(x), torch.randn(4, 8), dynamic=True) == (0, 0)


def test_matrices_that_are_computed_are_left_alone():
    def function(x, a, b, c, d):
        return F.linear(x, a.weight.t()) + F.linear(x, 2 * b.weight) + F.linear(x, c.weight, 2 * c.bias)

    assert grouped_of(function, grouping="all") == (0, 0)


def test_a_reader_finds_contiguous_rows():
    assert grouped_of(lambda x, a, b, c, d: a(x).view(-1) + b(x).view(-1)) == (2, 1)


def test_autocast_is_left_alone():
    def function(x, a, b, c, d):
        with torch.autocast("cpu", torch.bfloat16):
            return a(x) + b(x)

    assert grouped_of(function, grouping="all") == (0, 0)
