"""How an operator is declared: every function gets the arguments that it names, and a name that is none fails at once."""

import pytest
import torch

from ckv_compile.ops.library import LIBRARY, register_op, require


@pytest.fixture
def scaled():
    """``ckv::scaled_for_a_test(x, factor=2, extra=None)``, and what its check saw."""
    seen = []

    def check(factor: int) -> None:
        require(factor > 0, "factor", "be positive", factor)
        seen.append(factor)

    def fake(x):
        return torch.empty_like(x)

    def run(extra, x, factor):
        return x * factor + (0 if extra is None else extra)

    if not hasattr(torch.ops.ckv, "scaled_for_a_test"):
        schema = "scaled_for_a_test(Tensor x, int factor=2, *, Tensor? extra=None) -> Tensor"
        register_op(schema, check, fake, run)
        scaled.seen = seen
    return torch.ops.ckv.scaled_for_a_test, scaled.seen


def test_arguments_go_by_name_with_the_defaults_of_the_schema(scaled):
    op, seen = scaled
    x = torch.arange(3.0)
    assert torch.equal(op(x), 2 * x)
    assert torch.equal(op(x, 3, extra=torch.ones(3)), 3 * x + 1)
    assert seen[-2:] == [2, 3]
    with pytest.raises(ValueError, match="factor must be positive, got -1"):
        op(x, -1)
    torch.library.opcheck(op.default, (x, 5))


def test_a_function_that_asks_for_something_else_fails_where_it_is_declared():
    with pytest.raises(TypeError, match="asks for budget, which is no argument"):
        register_op("never_for_a_test(Tensor x) -> Tensor", lambda budget: None)
    assert not hasattr(torch.ops.ckv, "never_for_a_test")
    assert LIBRARY.ns == "ckv"
