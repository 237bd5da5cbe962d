"""Counts and padding masks that layers beside ours read become the device's; tests/end_to_end/test_windows.py: in models."""

import pytest
import torch

from ckv_compile.passes import graph_edit
from ckv_compile.passes.window_layers import let_windows_go, replace_counts, replace_padding
from ckv_compile.testing import capture_call


def test_an_integer_that_nobody_reads_is_no_count():
    gm, inputs, _, device = captured_sums(lambda x, n, device: (x + n, n + 1, device + 0))
    unread = [node for node in inputs if not node.users]
    assert unread, "the size of x"
    assert not set(replace_counts(gm.graph, inputs, [], device)) & set(unread)


def captured_sums(function):
    """The graph of a function of a tensor and a count, and its inputs by kind: the count, and the length to read."""
    length = torch.tensor([7], dtype=torch.int32)
    captured = capture_call(function, torch.arange(3), 7, length, dynamic=True)
    graph = captured.gm.graph
    inputs = graph_edit.placeholders(graph)
    integers = [node for node in inputs if isinstance(node.meta["example_value"], torch.SymInt)]
    count = next(node for node in integers if node.users)
    device = next(node for node in inputs if getattr(node.meta["example_value"], "dtype", None) == torch.int32)
    return captured.gm, inputs, count, device


@pytest.mark.parametrize(
    ("function", "added"),
    [
        (lambda x, n, device: (x + n, n + 1, device + 0), [1]),
        (lambda x, n, device: (x > n - 5, device + 0), []),
        (lambda x, n, device: (x + max(n - 9, 0) + min(n, 5) - (2 * n + 3), n - 1, device + 0), [-1]),
    ],
    ids=["sum", "comparison", "expression"],
)
def test_counts_are_computed_from_the_length(function, added):
    gm, inputs, count, device = captured_sums(function)
    output = graph_edit.output_node(gm.graph)
    outputs = list(output.args[0])
    taken = replace_counts(gm.graph, inputs, outputs, device)
    assert list(taken) == [count]
    assert sorted(taken[count].values()) == added
    output.args = (tuple(node for place, node in enumerate(outputs) if place not in taken[count]),)
    graph_edit.erase_dead(gm.graph)
    gm.recompile()
    assert count not in gm.graph.nodes
    for length in (1, 7, 30):
        x, at = torch.arange(3), torch.tensor([length], dtype=torch.int32)
        expected = [value for value in function(x, length, at) if isinstance(value, torch.Tensor)]
        given = {node: at if node is device else x for node in graph_edit.placeholders(gm.graph)}
        for ours, theirs in zip(gm(*given.values()), expected, strict=True):
            assert torch.equal(ours, theirs)
            assert ours.dtype == theirs.dtype


@pytest.mark.parametrize(
    "function",
    [
        lambda x, n, device: (x.new_zeros(n), device + 0),
        lambda x, n, device: (x.float() + n, device + 0),
        lambda x, n, device: (x + n, n * 2, device + 0),
        lambda x, n, device: (x + n // 3, device + 0),
        lambda x, n, device: (x[0] + n, device + 0),
    ],
    ids=["size", "float", "product", "quotient", "scalar"],
)
def test_what_needs_the_integer_keeps_it(function):
    gm, inputs, count, device = captured_sums(function)
    before = str(gm.graph)
    assert replace_counts(gm.graph, inputs, list(graph_edit.output_node(gm.graph).args[0]), device) == {}
    assert str(gm.graph) == before
    assert count in gm.graph.nodes


def test_a_mask_that_is_looked_up_becomes_a_comparison():
    def looked_up(mask, first, row, position):
        return mask.to(torch.bool)[row, position], first + 0

    mask, first = torch.ones(2, 6, dtype=torch.int64), torch.tensor([4, 0], dtype=torch.int32)
    mask[0, :4] = 0
    row, position = torch.arange(2)[:, None, None], torch.arange(6)[None, None, :]
    gm = capture_call(looked_up, mask, first, row, position).gm
    nodes = graph_edit.placeholders(gm.graph)
    begin = next(node for node in nodes if node.meta["example_value"].dtype == torch.int32)
    assert replace_padding(gm.graph, nodes[0], begin)
    graph_edit.erase_dead(gm.graph)
    gm.recompile()
    assert nodes[0] not in gm.graph.nodes
    expected = mask.bool()[row, position]
    given = {(2,): first, (2, 1, 1): row, (1, 1, 6): position}
    found = gm(*(given[tuple(node.meta["example_value"].shape)] for node in nodes[1:]))[0]
    assert torch.equal(found, expected)
    assert found.dtype == torch.bool


@pytest.mark.parametrize(
    "function",
    [
        lambda mask, first: (mask.sum(1), first + 0),
        lambda mask, first: (mask[:, 1:].bool(), first + 0),
        lambda mask, first: (mask[first.long(), first.long()], first + 0),
    ],
    ids=["sum", "slice", "integers"],
)
def test_a_mask_that_is_read_otherwise_stays(function):
    gm = capture_call(function, torch.ones(2, 6, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)).gm
    nodes = graph_edit.placeholders(gm.graph)
    before = str(gm.graph)
    assert not replace_padding(gm.graph, nodes[0], nodes[1])
    assert str(gm.graph) == before


@pytest.mark.parametrize(
    ("function", "goes"),
    [
        (lambda x: torch.cat([x, x], -2)[:, :, -3:, :], True),
        (lambda x: (x + 1)[:, :, -3:], True),
        (lambda x: x[:, :, -3:, :], False),
        (lambda x: (x + 1)[:, :, 3:, :], False),
        (lambda x: (x + 1)[:, 1:, -3:, :], False),
        (lambda x: (x + 1)[0, :, -3:], False),
    ],
    ids=["joined", "computed", "input", "behind", "heads", "row"],
)
def test_windows_of_what_a_graph_computes_go_alone(function, goes):
    x = torch.arange(2 * 2 * 5 * 4).view(2, 2, 5, 4).float()
    gm = capture_call(function, x).gm
    let_windows_go(gm.graph)
    gm.recompile()
    (found,) = gm(x)
    assert torch.equal(found, function(x))
    assert (found.untyped_storage().nbytes() == found.nbytes) == goes
