"""Masks as expressions of their index, and which nodes belong to masks alone."""

from __future__ import annotations

import itertools

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ckv_compile.passes.index_expressions import IndexExpressions, Load, NotAnExpression, broadcast_at, target_name
from ckv_compile.passes.mask_analysis import mask_nodes
from ckv_compile.passes.match_attention import find_sites
from ckv_compile.testing import capture_call, capture_generate, prompt, tiny_model


def element(expressions: IndexExpressions, node: fx.Node, index: tuple[int, ...], inputs: dict[str, Tensor]) -> object:
    """Value of an element by its expression, with what it loads taken from ``inputs``."""
    value = broadcast_at(expressions.of(node), tuple(map(sympy.Integer, index)))
    loads = {load: int(inputs[load.tensor_name][tuple(map(int, load.index))]) for load in value.atoms(Load)}
    return value.subs(loads) if loads else value


FUNCTIONS = {
    "arange": lambda x: torch.arange(2, 14, 3)[:, None] + x[0, :1],
    "compare": lambda x: (x > x.transpose(0, 1)) | ~(x == 2),
    "arithmetic": lambda x: (x * 3 - 7) // 2 + (5 - x),
    "gather": lambda x: x[torch.arange(3)[:, None], torch.arange(2, -1, -1)[None, :]],
    "gather one dimension": lambda x: x[:, torch.arange(2)],
    "slices": lambda x: x[1:, -2:][None, :, None],
    "an element": lambda x: x[-1][None],
    "ellipsis": lambda x: x[..., None, 1:],
    "expand": lambda x: x[:, None, :].expand(-1, 2, -1),
    "reshape": lambda x: x.reshape(1, 3, 1, 3).squeeze(0),
    "permuted": lambda x: x.unsqueeze(0).transpose(0, 2),
    "pad": lambda x: F.pad(x, (0, 2)),
    "pad of a bool": lambda x: F.pad(x.bool(), (0, 1)),
    "where": lambda x: torch.where(x > 3, x < 5, False),
    "masked_fill": lambda x: (x > 2).masked_fill(x == 4, False),
    "masked_fill with true": lambda x: (x > 2).masked_fill(x == 1, True),
    "tril": lambda x: x.tril(-1),
    "triu": lambda x: (x > 0).triu(1),
    "ones": lambda x: torch.ones(3, 3, dtype=torch.bool).tril() & x.new_ones((), dtype=torch.bool),
    "full": lambda x: torch.full((3, 3), 4) + torch.zeros_like(x),
    "conversions": lambda x: x.bool().to(torch.int64) + x.int().long(),
    "logical": lambda x: torch.logical_and(x, x > 1) ^ (x >= 2) & (x != 3),
    "product of bools": lambda x: (x > 1) * (x < 4),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_every_element_has_the_value_of_its_expression(function):
    x = torch.tensor([[0, 1, 2], [3, 4, 5], [2, 0, 4]])
    captured = capture_call(function, x)
    expressions = IndexExpressions(captured.gm.graph)
    (output,) = next(node for node in captured.gm.graph.nodes if node.op == "output").args[0]
    expected = captured.gm(*captured.inputs)[0]
    for index in itertools.product(*map(range, expected.shape)):
        assert element(expressions, output, index, {"l_x_": x}) == expected[index].item()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.cumsum(0),
        lambda x: x.float() > 0,
        lambda x: x[x > 2],
        lambda x: x.view(9),
        lambda x: x[::2],
        lambda x: x & 3,
        lambda x: x.sort(0).values,
        lambda x: F.pad(x, (1, 0)),
        lambda x: F.pad(x, (0, 1), value=1),
        lambda x: x.clone().add_(1) + x,
    ],
)
def test_what_has_no_expression_is_not_written(function):
    captured = capture_call(function, torch.arange(9).reshape(3, 3))
    (output,) = next(node for node in captured.gm.graph.nodes if node.op == "output").args[0]
    with pytest.raises(NotAnExpression):
        IndexExpressions(captured.gm.graph).of(output)


def test_erasing_the_mask_nodes_leaves_no_mask_and_no_other_node_unused():
    for captured in capture_generate(tiny_model("llama"), prompt(padded=True), new_tokens=2):
        graph = captured.gm.graph
        sites, _ = find_sites(captured.gm)
        nodes = mask_nodes(site.node for site in sites)
        assert nodes
        unused = {node.name for node in graph.nodes if not node.users}
        for site in sites:
            site.node.update_kwarg("attn_mask", None)
        for node in reversed(nodes):
            graph.erase_node(node)
        graph.lint()
        assert not any(target_name(node) in ("le", "and_", "new_ones") for node in graph.nodes)
        left = {node.name for node in graph.nodes if not node.users and node.op != "placeholder"}
        assert left <= unused


def test_a_mask_that_is_also_returned_is_kept():
    def attend(query: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        mask = (torch.arange(5) <= torch.arange(5)[:, None]) & padding[:, None, None, :]
        return F.scaled_dot_product_attention(query, query, query, attn_mask=mask), mask

    captured = capture_call(attend, torch.randn(2, 2, 5, 16), torch.ones(2, 5, dtype=torch.bool))
    sdpa = [node for node in captured.gm.graph.nodes if node.target is F.scaled_dot_product_attention]
    assert mask_nodes(sdpa) == []
