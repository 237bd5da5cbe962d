"""What a cache may go through: growth, crop, fork, reorder, later turns, caches the backend never saw, and its end."""

import copy
import gc

import pytest
import torch
from transformers import DynamicCache, StaticCache

import ckv_compile
from ckv_compile.runtime import slab as slabs
from ckv_compile.runtime.registry import REGISTRY
from ckv_compile.testing import TINY_VOCAB, prompt, tiny_model

EXACT = {"min_context": 0, "workers": 0}


@pytest.fixture
def model():
    return tiny_model("llama")


@pytest.fixture(autouse=True)
def every_slab_is_given_back():
    yield
    gc.collect()
    ckv_compile.free_memory()


def compiled(model, **options):
    return torch.compile(model, backend="communitykv", options={**EXACT, **options})


def step(module, ids, cache, **kwargs):
    """Logits of one call that extends ``cache``."""
    with torch.no_grad():
        return module(input_ids=ids, past_key_values=cache, use_cache=True, **kwargs).logits


def tokens(count, seed=0, batch=1):
    return torch.randint(1, TINY_VOCAB, (batch, count), generator=torch.Generator().manual_seed(seed))


def assert_same_story(model, module, story):
    """``story(module)`` returns logits; the compiled model must tell the same as eager, twice."""
    expected = story(model)
    for _ in range(2):
        for ours, eagers in zip(story(module), expected, strict=True):
            torch.testing.assert_close(ours, eagers, atol=1e-4, rtol=1e-4)


def test_generation_past_the_slab_moves_to_a_larger_one(interpreted, model, monkeypatch):
    monkeypatch.setattr(slabs, "_GRANULE", 16)
    inputs = prompt(tokens=30)
    expected = model.generate(**inputs, max_new_tokens=60, do_sample=False)
    module = compiled(model, append_block=16, block_size=64)
    assert torch.equal(module.generate(**inputs, max_new_tokens=60, do_sample=False), expected)
    assert ckv_compile.explain(module, show=False).sparse_steps == 59


@pytest.mark.parametrize("graph", ["keys", "attention", "mixed"])
def test_later_turns_on_one_cache(interpreted, model, graph):
    def story(module):
        cache = DynamicCache(config=model.config)
        logits = [step(module, tokens(32, 1), cache)]
        logits += [step(module, tokens(1, seed), cache) for seed in range(3)]
        logits.append(step(module, tokens(5, 9), cache))
        logits += [step(module, tokens(1, seed), cache) for seed in range(3, 6)]
        logits.append(step(module, tokens(40, 10), cache))
        logits += [step(module, tokens(1, seed), cache) for seed in range(6, 9)]
        return logits

    module = compiled(model, graph=graph)
    assert_same_story(model, module, story)
    assert ckv_compile.explain(module, show=False).sparse_steps == 18


def test_a_cropped_cache_continues_in_place(interpreted, model):
    def story(module):
        cache = DynamicCache(config=model.config)
        logits = [step(module, tokens(40, 1), cache)]
        logits += [step(module, tokens(1, seed), cache) for seed in range(20)]
        cache.crop(-10)
        logits += [step(module, tokens(1, seed), cache) for seed in range(20, 26)]
        cache.crop(-26)
        logits += [step(module, tokens(1, seed), cache) for seed in range(26, 32)]
        return logits

    module = compiled(model, append_block=16, block_size=64)
    assert_same_story(model, module, story)
    # Garbage of the first compilation may have kept the first cache alive, and its crop a copy.
    gc.collect()
    before = ckv_compile.explain(module, show=False).caches_adopted
    story(module)
    assert ckv_compile.explain(module, show=False).caches_adopted == before


def test_a_cache_forked_by_reference_is_copied_not_overwritten(interpreted, model):
    def story(module):
        cache = DynamicCache(config=model.config)
        logits = [step(module, tokens(20, 1), cache)]
        fork = copy.copy(cache)
        fork.layers = [copy.copy(layer) for layer in cache.layers]
        logits += [step(module, tokens(1, seed), cache) for seed in range(4)]
        logits += [step(module, tokens(1, seed), fork) for seed in range(4, 8)]
        logits += [step(module, tokens(1, seed), cache) for seed in range(8, 12)]
        return logits

    module = compiled(model)
    assert_same_story(model, module, story)
    assert ckv_compile.explain(module, show=False).caches_adopted >= 1


def test_a_deep_copied_prefix_is_indexed_from_its_keys(interpreted, model):
    def story(module):
        prefix = DynamicCache(config=model.config)
        logits = [step(module, tokens(40, 1), prefix)]
        for seed in range(2):
            cache = copy.deepcopy(prefix)
            logits += [step(module, tokens(1, 10 * seed + i), cache) for i in range(4)]
        return logits

    module = compiled(model)
    assert_same_story(model, module, story)
    explanation = ckv_compile.explain(module, show=False)
    assert explanation.sparse_steps == explanation.decode_steps == 16


def test_a_prompt_the_backend_never_saw_is_indexed_from_its_keys(interpreted, model):
    def story(module):
        cache = DynamicCache(config=model.config)
        logits = [step(model, tokens(40, 1), cache)]
        return logits + [step(module, tokens(1, seed), cache) for seed in range(5)]

    module = compiled(model)
    assert_same_story(model, module, story)
    assert ckv_compile.explain(module, show=False).sparse_steps == 10


def test_with_the_attention_graph_an_unseen_prompt_is_dense_and_says_so(interpreted, model):
    def story(module):
        cache = DynamicCache(config=model.config)
        logits = [step(model, tokens(40, 1), cache)]
        return logits + [step(module, tokens(1, seed), cache) for seed in range(5)]

    module = compiled(model, graph="attention")
    assert_same_story(model, module, story)
    explanation = ckv_compile.explain(module, show=False)
    assert explanation.sparse_steps == 0
    assert any("never saw the queries" in reason for reason in explanation.dense_steps)


@pytest.mark.parametrize("kept", [1, 5])
def test_layers_that_hold_different_numbers_of_tokens_are_dense(interpreted, model, kept):
    def story(module):
        cache = DynamicCache(config=model.config)
        step(model, tokens(9, 1), cache)
        layer = cache.layers[1]
        layer.keys, layer.values = layer.keys[:, :, -kept:].clone(), layer.values[:, :, -kept:].clone()
        return [step(module, tokens(1, 2), cache)]

    module = compiled(model)
    assert_same_story(model, module, story)
    explanation = ckv_compile.explain(module, show=False)
    assert explanation.sparse_steps == 0
    # Refused at compile time where the lengths are known then, else at the call.
    assert explanation.refused or any("different numbers" in reason for reason in explanation.dense_steps)


def test_beams_follow_the_reordered_cache(interpreted, model):
    inputs = prompt(tokens=20)
    expected = model.generate(**inputs, max_new_tokens=12, num_beams=3, do_sample=False)
    assert torch.equal(compiled(model).generate(**inputs, max_new_tokens=12, num_beams=3, do_sample=False), expected)


def test_assisted_decoding_crops_and_stays_exact(interpreted, model):
    assistant = tiny_model("llama", seed=5, num_hidden_layers=1)
    inputs = prompt(batch=1, tokens=20)
    expected = model.generate(**inputs, max_new_tokens=20, assistant_model=assistant, do_sample=False)
    out = compiled(model).generate(**inputs, max_new_tokens=20, assistant_model=assistant, do_sample=False)
    assert torch.equal(out, expected)


def test_a_mask_with_holes_is_dense_never_wrong(interpreted, model):
    inputs = prompt(tokens=20)
    inputs["attention_mask"][0, 5:8] = 0
    expected = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    module = compiled(model)
    assert torch.equal(module.generate(**inputs, max_new_tokens=8, do_sample=False), expected)
    reasons = ckv_compile.explain(module, show=False).dense_steps
    assert any("not left padding" in reason for reason in reasons)


def test_a_static_cache_used_again_for_another_prompt_forgets_the_first(interpreted, model):
    cache = StaticCache(config=model.config, max_cache_len=64)

    def story(module):
        logits = []
        for seed, count in ((1, 30), (2, 24)):
            cache.reset()
            logits.append(step(module, tokens(count, seed), cache))
            logits += [step(module, tokens(1, 10 * seed + i), cache) for i in range(4)]
        return logits

    assert_same_story(model, compiled(model), story)


def test_a_static_cache_filled_by_somebody_else_is_not_routed_by_a_stale_index(interpreted, model):
    """Eager prefill into a cache that the backend indexed for an earlier prompt of the same length."""
    cache = StaticCache(config=model.config, max_cache_len=64)

    def story(module):
        logits = []
        for seed in (1, 2):
            cache.reset()
            logits.append(step(model, tokens(40, seed), cache))
            logits += [step(module, tokens(1, 10 * seed + i), cache) for i in range(4)]
        return logits

    module = compiled(model)
    assert_same_story(model, module, story)
    assert ckv_compile.explain(module, show=False).caches_adopted >= 4


def test_static_cache_zeros_behind_the_valid_part_are_never_attended(interpreted, model):
    """The length comes from the cache's counter, not from the size of its buffers."""
    inputs = prompt(tokens=120, batch=1)
    module = compiled(model, budget=90)
    module.generate(**inputs, max_new_tokens=8, do_sample=False, cache_implementation="static")
    explanation = ckv_compile.explain(module, show=False)
    assert explanation.tokens_in_context == sum(120 + i for i in range(1, 8)) * 2 * 2


def test_generating_again_and_again_keeps_memory_flat(interpreted, model):
    module = compiled(model)
    inputs = prompt(tokens=30)
    counts = []
    for _ in range(6):
        module.generate(**inputs, max_new_tokens=4, do_sample=False)
        gc.collect()
        counts.append((len(REGISTRY.pool.slabs()), len(REGISTRY.sequences())))
    assert counts[1:] == [counts[1]] * 5
    ckv_compile.free_memory()
    gc.collect()
    assert REGISTRY.pool.slabs() == []


def test_the_index_of_a_static_cache_dies_with_it(interpreted, model):
    module = compiled(model)
    gc.collect()
    before = len(REGISTRY.sequences())
    cache = StaticCache(config=model.config, max_cache_len=64)
    step(module, tokens(30, 1), cache)
    step(module, tokens(1, 2), cache)
    assert len(REGISTRY.sequences()) == before + 1
    del cache
    gc.collect()
    assert len(REGISTRY.sequences()) == before
