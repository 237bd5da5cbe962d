"""Decode steps that are verified on the device instead of read, as on CUDA: the same tests run on CPU tensors."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

import ckv_compile
from ckv_compile.runtime import runner
from ckv_compile.runtime.step_check import StepCheck
from ckv_compile.testing import TINY_VOCAB, prompt, tiny_model

EXACT = {"min_context": 0, "workers": 0}


@pytest.fixture(autouse=True)
def later(monkeypatch):
    monkeypatch.setattr(runner, "verifies_later", lambda device: True)


@pytest.fixture
def read(monkeypatch):
    """How often a mask or a counter was read on the host."""
    counts = []
    for name in ("left_padding", "padding_of_given"):
        original = getattr(runner, name)
        monkeypatch.setattr(runner, name, lambda *args, original=original: (counts.append(1), original(*args))[1])
    return counts


@pytest.fixture
def model():
    return tiny_model("llama")


def compiled(model, **options):
    return torch.compile(model, backend="communitykv", options={**EXACT, **options})


def tokens(count, seed=0, batch=1):
    return torch.randint(1, TINY_VOCAB, (batch, count), generator=torch.Generator().manual_seed(seed))


def step(module, ids, cache, **kwargs):
    with torch.no_grad():
        return module(input_ids=ids, past_key_values=cache, use_cache=True, **kwargs).logits[:, -1]


def ones(length):
    return torch.ones(1, length, dtype=torch.long)


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_generation_reads_its_mask_once_after_the_prefill(interpreted, model, read, cache, padded):
    inputs = prompt(tokens=30, padded=padded)
    arguments = {"cache_implementation": "static"} if cache == "static" else {}
    expected = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    module = compiled(model)
    for _ in range(2):
        read.clear()
        assert torch.equal(module.generate(**inputs, max_new_tokens=16, do_sample=False, **arguments), expected)
        assert len(read) <= 2  # the prefill's, and the first step's
    explanation = ckv_compile.explain(module, show=False)
    assert explanation.sparse_steps == explanation.decode_steps == 30
    assert explanation.broken_steps == []


@pytest.mark.parametrize("change", ["hole", "padding"])
def test_a_mask_that_changes_raises_a_step_later_and_is_read_again_after_that(interpreted, model, change):
    module = compiled(model)
    cache = DynamicCache(config=model.config)
    step(module, tokens(30, 1), cache, attention_mask=ones(30))
    for length in (31, 32, 33):
        step(module, tokens(1, length), cache, attention_mask=ones(length))
    bad = ones(34)
    bad[0, slice(5, 8) if change == "hole" else slice(0, 4)] = 0
    step(module, tokens(1, 34), cache, attention_mask=bad)
    with pytest.raises(RuntimeError, match=r"attention_mask must be zero for the first 0 .* behind token 30 "):
        step(module, tokens(1, 35), cache, attention_mask=ones(35))
    assert "NOT TO BE TRUSTED" in str(ckv_compile.explain(module, show=False))
    step(module, tokens(1, 35), cache, attention_mask=ones(35))
    assert cache.get_seq_length() == 35


def test_a_mask_that_changes_at_the_last_step_is_told_by_the_report(interpreted, model):
    module = compiled(model)
    cache = DynamicCache(config=model.config)
    step(module, tokens(30, 1), cache, attention_mask=ones(30))
    step(module, tokens(1, 31), cache, attention_mask=ones(31))
    bad = ones(32)
    bad[0, 9] = 0
    step(module, tokens(1, 32), cache, attention_mask=bad)
    with pytest.warns(RuntimeWarning, match="attention_mask must"):
        explanation = ckv_compile.explain(module, show=False)
    assert len(explanation.broken_steps) == 1


def test_generate_raises_before_it_returns_what_cannot_be_trusted(interpreted, model, monkeypatch):
    module = compiled(model)
    inputs = prompt(tokens=30, padded=True)
    module.generate(**inputs, max_new_tokens=4, do_sample=False)
    monkeypatch.setattr(StepCheck, "concluded", lambda self: True)
    with pytest.warns(RuntimeWarning), pytest.raises(RuntimeError, match="no logits behind token"):
        module.generate(**inputs, max_new_tokens=4, do_sample=False)


def test_a_shorter_mask_is_judged_by_its_size(interpreted, model):
    def story(module):
        cache = DynamicCache(config=model.config)
        logits = [step(module, tokens(30, 1), cache, attention_mask=ones(30))]
        for number in range(4):
            mask = torch.ones(1, 31 + number - (3 if number >= 2 else 0), dtype=torch.long)
            logits.append(step(module, tokens(1, number), cache, attention_mask=mask))
        return logits

    for ours, eagers in zip(story(compiled(model)), story(model), strict=True):
        torch.testing.assert_close(ours, eagers, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("cache_class", [DynamicCache, StaticCache])
def test_a_cropped_cache_is_read_again(interpreted, model, cache_class):
    def story(module):
        cache = cache_class(config=model.config, **({"max_cache_len": 96} if cache_class is StaticCache else {}))
        mask = torch.ones(2, 90, dtype=torch.long)
        mask[0, :3] = 0

        def call(count, seed, length):
            return step(module, tokens(count, seed, 2), cache, attention_mask=mask[:, : length + count])

        logits = [call(30, 1, 0)]
        logits += [call(1, length, length) for length in range(30, 40)]
        if hasattr(cache.layers[0], "crop"):
            cache.crop(-6)
        else:  # transformers 5.17 has no crop for static caches
            for layer in cache.layers:
                layer.cumulative_length.sub_(6)
        return logits + [call(1, length + 50, length) for length in range(34, 44)]

    module = compiled(model, append_block=16, block_size=64)
    for _ in range(2):
        for ours, eagers in zip(story(module), story(model), strict=True):
            torch.testing.assert_close(ours, eagers, atol=1e-4, rtol=1e-4)
    assert ckv_compile.explain(module, show=False).broken_steps == []


def test_the_counter_of_a_static_cache_is_read_only_where_somebody_wrote_to_it(interpreted, model, monkeypatch):
    looked = []
    original = runner.GraphRunner._static_padding

    def look(self, *args):
        looked.append(args[-1])
        return original(self, *args)

    monkeypatch.setattr(runner.GraphRunner, "_static_padding", look)
    module = compiled(model)
    cache = StaticCache(config=model.config, max_cache_len=96)
    step(module, tokens(30, 1), cache)
    for number in range(4):
        step(module, tokens(1, number), cache)
    assert looked == [30, 1]
    for layer in cache.layers:
        layer.cumulative_length.sub_(2)
    expected = StaticCache(config=model.config, max_cache_len=96)
    step(model, tokens(30, 1), expected)
    for number in (0, 1, 7):
        logits = step(model, tokens(1, number), expected)
    torch.testing.assert_close(step(module, tokens(1, 7), cache), logits, atol=1e-4, rtol=1e-4)
    assert looked == [30, 1, 1]
