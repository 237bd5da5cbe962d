"""Decode steps under a capture of the caller's (``torch.cuda.graph``), with the capture itself pretended."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

import ckv_compile
from ckv_compile.runtime import cuda_graphs, runner
from ckv_compile.runtime.registry import REGISTRY
from ckv_compile.runtime.sequence import Sequence
from ckv_compile.testing import TINY_VOCAB, tiny_model

EXACT = {"min_context": 0, "workers": 0}


@pytest.fixture
def model():
    return tiny_model("llama")


@pytest.fixture
def capture(monkeypatch):
    """Pretends a capture; while it lasts, nothing that would read the device or publish an index may run."""

    def illegal(*args, **kwargs):
        raise AssertionError("not under capture")

    class Capture:
        def __enter__(self):
            self.patch = pytest.MonkeyPatch()
            self.patch.setattr(cuda_graphs, "capturing", lambda: True)
            for name in ("publish", "offer_appended", "offer_all", "audit", "restart"):
                self.patch.setattr(Sequence, name, illegal)
            for name in ("left_padding", "padding_of_given"):
                self.patch.setattr(runner, name, illegal)

        def __exit__(self, *exc):
            self.patch.undo()

    return Capture()


def compiled(model, **options):
    return torch.compile(
        model, backend="communitykv", options={**EXACT, "append_block": 16, "block_size": 64, **options}
    )


def tokens(count, seed=0):
    return torch.randint(1, TINY_VOCAB, (1, count), generator=torch.Generator().manual_seed(seed))


def step(module, ids, cache, **kwargs):
    with torch.no_grad():
        return module(input_ids=ids, past_key_values=cache, use_cache=True, **kwargs).logits[:, -1]


def make(cache_class, model):
    return cache_class(config=model.config, **({"max_cache_len": 96} if cache_class is StaticCache else {}))


@pytest.mark.parametrize("later", [True, False], ids=["as on cuda", "as on cpu"])
@pytest.mark.parametrize("cache_class", [DynamicCache, StaticCache])
def test_a_step_after_a_warm_up_is_launched_without_a_look_at_anything(
    interpreted, model, capture, cache_class, later, monkeypatch
):
    monkeypatch.setattr(runner, "verifies_later", lambda device: later)

    def story(module):
        cache = make(cache_class, model)
        logits = [step(module, tokens(30, 1), cache), step(module, tokens(1, 2), cache)]
        if module is model:
            logits.append(step(module, tokens(1, 3), cache))
        else:
            with capture:
                logits.append(step(module, tokens(1, 3), cache))
        return [*logits, *(step(module, tokens(1, seed), cache) for seed in range(4, 30))]

    module = compiled(model)
    for _ in range(2):
        for ours, eagers in zip(story(module), story(model), strict=True):
            torch.testing.assert_close(ours, eagers, atol=1e-4, rtol=1e-4)
    explanation = ckv_compile.explain(module, show=False)
    assert explanation.sparse_steps == explanation.decode_steps == 56
    assert explanation.broken_steps == []


@pytest.mark.parametrize("cache_class", [DynamicCache, StaticCache])
def test_an_unknown_cache_raises_and_says_to_warm_up(interpreted, model, capture, cache_class):
    module = compiled(model)
    cache = make(cache_class, model)
    step(module, tokens(30, 1), cache)
    step(module, tokens(1, 2), cache)
    unknown = make(cache_class, model)
    step(model, tokens(30, 1), unknown)
    with capture, pytest.raises(RuntimeError, match="run one decode step on the same cache"):
        step(module, tokens(1, 2), unknown)


@pytest.mark.parametrize("cache_class", [DynamicCache, StaticCache])
def test_a_first_call_and_a_prefill_raise_and_say_to_warm_up(interpreted, model, capture, cache_class):
    module = compiled(model)
    with capture, pytest.raises(RuntimeError, match="run one decode step on the same cache"):
        step(module, tokens(30, 1), make(cache_class, model))
    torch._dynamo.reset()
    step(module, tokens(30, 1), make(cache_class, model))
    with capture, pytest.raises(RuntimeError, match="a prefill cannot be captured"):
        step(module, tokens(30, 1), make(cache_class, model))


def test_after_replays_of_a_static_cache_its_length_is_read_and_its_index_kept(interpreted, model, capture):
    """A replay is played by eager: it writes the cache and moves the counter, and no code of ours runs."""
    module = compiled(model)
    cache, expected = make(StaticCache, model), make(StaticCache, model)
    for one, caller in ((cache, module), (expected, model)):
        step(caller, tokens(30, 1), one)
        step(caller, tokens(1, 2), one)
    with capture:
        step(module, tokens(1, 3), cache)
    step(model, tokens(1, 3), expected)
    for seed in (4, 5, 6):
        for layer, other in zip(cache.layers, expected.layers, strict=True):
            at = layer.cumulative_length.item()
            versions = layer.keys._version
            if other is expected.layers[0]:
                step(model, tokens(1, seed), expected)
            with torch.no_grad():
                layer.keys.data[:, :, at] = other.keys[:, :, at]
                layer.values.data[:, :, at] = other.values[:, :, at]
                layer.cumulative_length.data.add_(1)
            assert layer.keys._version == versions
    (sequence,) = (one for one in REGISTRY.sequences() if one.length == 32)
    marks = [list(one) for one in sequence.index.marks]
    torch.testing.assert_close(
        step(module, tokens(1, 7), cache), step(model, tokens(1, 7), expected), atol=1e-4, rtol=1e-4
    )
    assert sequence.length == 36
    assert [one[: len(old)] for one, old in zip(sequence.index.marks, marks, strict=True)] == marks
    assert ckv_compile.explain(module, show=False).caches_adopted == 0


def test_after_replays_a_dynamic_cache_goes_on_where_the_caller_has_it(interpreted, model, capture):
    module = compiled(model)
    cache, expected = make(DynamicCache, model), make(DynamicCache, model)
    for one, caller in ((cache, module), (expected, model)):
        step(caller, tokens(30, 1), one)
        step(caller, tokens(1, 2), one)
    with capture:
        step(module, tokens(1, 3), cache)
    step(model, tokens(1, 3), expected)
    (sequence,) = (one for one in REGISTRY.sequences() if one.length == 32)
    sequence.length_device.add_(5)  # five replays
    torch.testing.assert_close(
        step(module, tokens(1, 7), cache), step(model, tokens(1, 7), expected), atol=1e-4, rtol=1e-4
    )
    assert sequence.length_device.item() == 33
