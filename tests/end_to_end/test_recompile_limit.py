"""Dynamo compiles a function so many times and then runs it eagerly: a backend must not disappear that way."""

import warnings

import pytest
import torch
from torch import nn

import ckv_compile
from ckv_compile import backend, recompile_limit
from ckv_compile.testing import prompt, tiny_model

DEFAULT = recompile_limit.TORCH_DEFAULT


class Layer(nn.Module):
    """Modules of other sizes need graphs of their own, and share the function that dynamo counts them for."""

    def __init__(self, size):
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x):
        return self.linear(x)


@pytest.fixture
def allowed(monkeypatch):
    """The limit during each compilation by our backend."""
    limits = []

    def compile_and_note(gm, fakes, patches):
        limits.append(torch._dynamo.config.recompile_limit)
        return gm.forward

    monkeypatch.setattr(backend, "_compile", compile_and_note)
    return limits


def call(size, compiler="communitykv", **arguments):
    layer = Layer(size)
    x = torch.ones(2, size)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(layer, backend=compiler, **arguments)(x), layer(x))


@pytest.mark.parametrize("fullgraph", [False, True])
def test_more_models_than_the_default_limit_allows_are_compiled(allowed, fullgraph):
    for number in range(DEFAULT + 4):
        call(number + 2, fullgraph=fullgraph, dynamic=False)
    assert allowed == [recompile_limit.ALLOWED] * (DEFAULT + 4)
    assert torch._dynamo.config.recompile_limit == DEFAULT


def test_another_backend_that_used_up_the_default_limit_does_not_keep_ours_out(allowed):
    for number in range(DEFAULT):
        call(number + 2, "eager", dynamic=False)
    call(50)
    assert len(allowed) == 1


def test_a_limit_of_the_users_stays(allowed):
    with torch._dynamo.config.patch(recompile_limit=5):
        call(2)
    assert allowed == [5]
    if "recompile_limit" in torch.compile.__kwdefaults__:
        call(3, recompile_limit=6)
        assert allowed == [5, 6]


def test_the_last_compilation_that_dynamo_allows_warns(allowed):
    with torch._dynamo.config.patch(recompile_limit=2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call(2, dynamic=False)
        with pytest.warns(UserWarning, match=r"as often as recompile_limit \(2\) allows"):
            call(3, dynamic=False)


def test_a_ninth_model_is_sparse_as_the_first(interpreted):
    """They share the function that is their forward, and each needs graphs of its own."""
    for number in range(DEFAULT + 1):
        model = tiny_model("llama", num_hidden_layers=1, intermediate_size=32 + 8 * number)
        module = torch.compile(model, backend="communitykv", options={"min_context": 0, "workers": 0})
        found = module.generate(**prompt(tokens=20), max_new_tokens=4, do_sample=False)
        assert torch.equal(found, model.generate(**prompt(tokens=20), max_new_tokens=4, do_sample=False))
        explanation = ckv_compile.explain(module, show=False)
        assert explanation.sparse_steps == explanation.decode_steps == 3, number
