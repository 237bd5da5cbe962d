"""Layers with a sliding window beside full ones: no number of the host and no mask that grows is read at a step.

A CUDA graph is of one value of an integer and one size of a tensor, so that either would mean another one for each token.
"""

import pytest
import torch
import transformers

import ckv_compile
from ckv_compile import backend, generate
from ckv_compile.passes import graph_edit
from ckv_compile.runtime.runner import OTHER_COUNT
from ckv_compile.testing import prompt, tiny_model

OPTIONS = {"min_context": 0, "workers": 0, "num_sink_tokens": 1, "recent_window": 2, "budget": 128}
FAMILIES = [("gemma3", "sdpa"), ("gpt_oss", "eager")]


@pytest.fixture
def sizes(monkeypatch):
    """Of the inputs of every rewritten graph; a number of the host has none."""
    found = []

    def compile_nothing(gm, *_args, **_kwargs):
        values = [node.meta["example_value"] for node in graph_edit.placeholders(gm.graph)]
        found.append([value.shape if isinstance(value, torch.Tensor) else value for value in values])
        return gm.forward

    monkeypatch.setattr(backend, "_compile", compile_nothing)
    torch._dynamo.reset()
    return found


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize(("family", "implementation"), FAMILIES)
def test_no_number_of_the_host_is_read_at_a_step(sizes, family, implementation, cache, padded):
    model, given = tiny_model(family, implementation), prompt(tokens=40, padded=padded)
    given |= {"max_new_tokens": 24, "do_sample": False}
    given |= {"cache_implementation": "static"} if cache == "static" else {}
    expected = model.generate(**given)
    module = torch.compile(model, backend="communitykv", options=OPTIONS)
    assert torch.equal(module.generate(**given), expected)
    explanation = ckv_compile.explain(model, show=False)
    assert explanation.sparse_steps == explanation.decode_steps == 23
    if cache == "dynamic":
        longer = given | prompt(tokens=50, padded=padded)
        assert torch.equal(module.generate(**longer), model.generate(**longer))
        graphs = [graph.phase for graph in ckv_compile.explain(model, show=False).captured]
        assert graphs.count("decode") == 1, "for all lengths of prompts, and all steps"
    step = sizes[1]  # windows are full
    assert all(isinstance(one, torch.Size) for one in step)
    assert not any(map(graph_edit.has_symbol, step))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("family", "implementation"), FAMILIES)
def test_so_it_is_where_windows_record_what_left_them(sizes, monkeypatch, family, implementation, padded):
    """With a cache of the caller's, ``generate`` on CUDA undoes its last step, so layers keep a token more in the graph."""
    if not hasattr(transformers.cache_utils.DynamicSlidingWindowLayer, "activate_past_recording"):
        pytest.skip("this version of transformers does not record it")
    monkeypatch.setattr(torch, "Event", Done)
    monkeypatch.setattr(generate, "DEFERRING_DEVICES", frozenset({"cpu"}))
    model, given = tiny_model(family, implementation), prompt(tokens=40, padded=padded)
    given |= {"max_new_tokens": 24, "do_sample": False}
    expected = model.generate(**given)
    module = torch.compile(model, backend="communitykv", options=OPTIONS)
    for _ in range(2):
        cache = transformers.DynamicCache(config=model.config)
        assert torch.equal(module.generate(**given, past_key_values=cache), expected)
    explanation = ckv_compile.explain(model, show=False)
    assert explanation.deferred_stops == 2
    assert explanation.sparse_steps == explanation.decode_steps == 46
    step = sizes[-1]
    assert all(isinstance(one, torch.Size) for one in step)
    assert not any(map(graph_edit.has_symbol, step))


class Done:
    """Stands for a device event: on the CPU everything has happened."""

    def __init__(self, *args, **kwargs):
        pass

    def record(self):
        pass

    def synchronize(self):
        pass


@pytest.mark.usefixtures("interpreted")
def test_a_window_does_not_keep_the_whole_prompt_alive():
    model, given = tiny_model("gemma3"), prompt(tokens=30)["input_ids"]
    module = torch.compile(model, backend="communitykv", options=OPTIONS)
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        for ids in (given, given[:, :1].clone()):
            module(input_ids=ids, past_key_values=cache, use_cache=True)
            for tensor in (cache.layers[0].keys, cache.layers[0].values):
                assert tensor.shape[2] == 7
                assert tensor.untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.usefixtures("interpreted")
def test_a_window_that_counts_otherwise_is_a_dense_step():
    """Somebody moved the counter of a sliding layer by hand: the step is what the model makes of it."""
    model, found = tiny_model("gemma3"), []
    given = prompt(tokens=30)
    for module in (model, torch.compile(model, backend="communitykv", options=OPTIONS)):
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            module(input_ids=given["input_ids"], past_key_values=cache, use_cache=True)
            for number in range(4):
                if number == 2:
                    cache.layers[0].cumulative_length += 3
                ids = given["input_ids"][:, number : number + 1].clone()
                found.append(module(input_ids=ids, past_key_values=cache, use_cache=True).logits)
    for theirs, ours in zip(found[:4], found[4:], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert ckv_compile.explain(model, show=False).dense_steps[OTHER_COUNT] >= 1
