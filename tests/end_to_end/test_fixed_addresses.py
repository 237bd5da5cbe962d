"""What CUDA-graph capture relies on: every input that a decode graph writes is known to stay where it is."""

import pytest
import torch
from torch._inductor import compile_fx
from transformers import DynamicCache, StaticCache

from ckv_compile import backend
from ckv_compile.passes import graph_edit
from ckv_compile.testing import TINY_VOCAB, tiny_model


@pytest.fixture
def inner(monkeypatch):
    """(graph after AOTAutograd, positions of inputs with fixed addresses, of inputs that are written), in order."""
    compilations = []
    original = compile_fx._compile_fx_inner

    def keep(gm, example_inputs, **kwargs):
        result = original(gm, example_inputs, **kwargs)
        compilations.append((gm, set(kwargs["static_input_idxs"]), set(result.mutated_input_idxs)))
        return result

    monkeypatch.setattr(compile_fx, "_compile_fx_inner", keep)
    compile_graph = backend._compile
    monkeypatch.setattr(
        backend,
        "_compile",
        lambda gm, fakes, patches: compile_graph(gm, fakes, {**patches, "force_disable_caches": True}),
    )
    return compilations


def tokens(count, seed=0):
    return torch.randint(1, TINY_VOCAB, (1, count), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("cache_class", "prefill", "options"),
    [
        (DynamicCache, "compiled", {"append": "assign"}),
        (StaticCache, "compiled", {}),
        (StaticCache, "eager", {}),
    ],
    ids=["dynamic", "static", "static, eager prefill"],
)
def test_only_small_inputs_of_a_decode_graph_move(inner, cache_class, prefill, options):
    model = tiny_model("llama")
    module = torch.compile(model, backend="communitykv", options={"min_context": 0, "workers": 0, **options})
    cache = cache_class(config=model.config, **({"max_cache_len": 64} if cache_class is StaticCache else {}))
    with torch.no_grad():
        (model if prefill == "eager" else module)(tokens(30), past_key_values=cache, use_cache=True)
        for seed in range(2):
            module(tokens(1, seed), past_key_values=cache, use_cache=True)
    gm, fixed, written = inner[-1]
    inputs = graph_edit.placeholders(gm.graph)
    assert written, "K, V, the length and the index are written in place"
    assert written <= fixed, [inputs[position].name for position in written - fixed]
    moving = [inputs[position].meta["val"] for position in range(len(inputs)) if position not in fixed]
    assert sum(value.numel() for value in moving if isinstance(value, torch.Tensor)) <= 8, moving
