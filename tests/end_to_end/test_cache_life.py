"""What a cache may go through: growth, crop, fork, reorder, later turns, caches the backend never saw, and its end."""

import copy
import gc

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode, in_kernel_invocation_manager
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import StaticLayer

import ckv_compile
from ckv_compile.reference import sparse_attention as reference
from ckv_compile.reference.nominal import layer_state
from ckv_compile.runtime import slab as slabs
from ckv_compile.runtime.registry import REGISTRY
from ckv_compile.testing import TINY_VOCAB, attended_positions, prompt, tiny_model

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
    # With keys the five tokens are a decode step too.
    assert ckv_compile.explain(module, show=False).sparse_steps == (20 if graph == "keys" else 18)


@pytest.mark.parametrize("cache_class", [DynamicCache, StaticCache])
def test_a_cropped_cache_continues_in_place(interpreted, model, cache_class):
    def crop(cache, count):
        if cache_class is DynamicCache:
            cache.crop(-count)
            return
        for layer in cache.layers:  # as crop does, which not every version has for static caches
            layer.cumulative_length.sub_(count)

    def story(module):
        cache = cache_class(config=model.config, **({"max_cache_len": 96} if cache_class is StaticCache else {}))
        logits = [step(module, tokens(40, 1), cache)]
        logits += [step(module, tokens(1, seed), cache) for seed in range(20)]
        crop(cache, 10)
        logits += [step(module, tokens(1, seed), cache) for seed in range(20, 26)]
        crop(cache, 26)
        logits += [step(module, tokens(1, seed), cache) for seed in range(26, 32)]
        return logits

    module = compiled(model, append_block=16, block_size=64)
    assert_same_story(model, module, story)
    # Garbage of the first compilation may have kept the first cache alive, and its crop a copy.
    gc.collect()
    before = ckv_compile.explain(module, show=False).caches_adopted
    assert cache_class is DynamicCache or before == 0
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


@pytest.mark.parametrize("cache_class", [DynamicCache, StaticCache])
def test_a_deep_copied_prefix_is_indexed_from_its_keys(interpreted, model, cache_class):
    def story(module):
        prefix = cache_class(config=model.config, **({"max_cache_len": 64} if cache_class is StaticCache else {}))
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

    try:
        story(torch.compile(model, backend="eager"))
    except RuntimeError:
        pytest.skip("this version of transformers makes one mask for all layers of a graph")
    module = compiled(model)
    assert_same_story(model, module, story)
    explanation = ckv_compile.explain(module, show=False)
    assert explanation.sparse_steps == 0
    # Refused at compile time where the lengths are known then, else at the call.
    assert explanation.refused or any("different numbers" in reason for reason in explanation.dense_steps)


@pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "left_padded"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_beams_follow_the_reordered_cache(interpreted, model, cache, padded):
    inputs = prompt(tokens=20, padded=padded)
    arguments = {"max_new_tokens": 12, "num_beams": 3, "do_sample": False}
    arguments |= {"cache_implementation": "static"} if cache == "static" else {}
    expected = model.generate(**inputs, **arguments)
    module = compiled(model)
    assert torch.equal(module.generate(**inputs, **arguments), expected)
    explanation = ckv_compile.explain(module, show=False)
    assert explanation.sparse_steps == explanation.decode_steps == explanation.caches_reordered == 11, str(explanation)
    assert explanation.caches_adopted == 0


def test_assisted_decoding_crops_and_stays_exact(interpreted, model):
    """Some versions of transformers have the first drafts in the first call, which ends the last block behind them."""
    assistant = tiny_model("llama", seed=5, num_hidden_layers=1)
    inputs = prompt(batch=1, tokens=80)
    expected = model.generate(**inputs, max_new_tokens=20, assistant_model=assistant, do_sample=False)
    module = compiled(model, block_size=64, append_block=16)
    assert torch.equal(
        module.generate(**inputs, max_new_tokens=20, assistant_model=assistant, do_sample=False), expected
    )
    explanation = ckv_compile.explain(module, show=False)
    # A crop of a cache that a compilation still holds on to is a copy, which is indexed behind its first step.
    assert explanation.decode_steps - explanation.sparse_steps <= explanation.caches_adopted
    assert any(graph.phase == "decode" and graph.queries > 1 for graph in explanation.graphs)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("drafts", ["a smaller model", "the prompt", "fewer layers"])
def test_assisted_decoding_by_any_drafts_is_exact_while_blocks_are_indexed(interpreted, model, drafts, cache):
    if cache == "static" and not hasattr(StaticLayer, "crop"):
        pytest.skip("this version of transformers crops no static cache")
    arguments = {
        "a smaller model": {"assistant_model": tiny_model("llama", seed=5, num_hidden_layers=1)},
        "the prompt": {"prompt_lookup_num_tokens": 3},
        "fewer layers": {"assistant_early_exit": 1},
    }[drafts]
    arguments |= {"cache_implementation": "static"} if cache == "static" else {}
    inputs = {name: tensor.repeat(1, 2) for name, tensor in prompt(batch=1, tokens=40).items()}
    expected = model.generate(**inputs, max_new_tokens=20, do_sample=False, **arguments)
    module = compiled(model, append_block=16, block_size=64)
    assert torch.equal(module.generate(**inputs, max_new_tokens=20, do_sample=False, **arguments), expected)
    explanation = ckv_compile.explain(module, show=False)
    # Drafts that are rejected may take a block of the index with them, and a crop of a cache that a compilation still
    # holds on to is a copy, which is indexed behind its first step.
    assert 0 < explanation.decode_steps <= 1.5 * explanation.sparse_steps, str(explanation)
    assert cache == "dynamic" or explanation.caches_adopted <= 1  # of a static cache none; a draft's may be dynamic
    assert any(graph.phase == "decode" and graph.queries > 1 for graph in explanation.graphs)


@pytest.mark.slow
def test_assisted_decoding_beyond_the_budget_runs(interpreted, model):
    assistant = copy.deepcopy(model)
    inputs = prompt(batch=1, tokens=60)
    module = compiled(model, budget=32, num_sink_tokens=2, recent_window=4)
    out = module.generate(**inputs, max_new_tokens=30, assistant_model=assistant, do_sample=False)
    assert out.shape == (1, 90)
    explanation = ckv_compile.explain(module, show=False)
    assert explanation.sparse_steps > 0
    assert explanation.tokens_attended < 0.7 * explanation.tokens_in_context


def test_several_tokens_attend_what_one_retrieval_for_them_finds(interpreted, model, monkeypatch):
    """One step, with the attention of every layer computed by hand from what was retrieved for it."""
    sinks, window, length, new = 2, 4, 60, 5
    attended = []

    def by_hand(query, key, value, tokens, count, n_indexed, layer, scale, **_):
        covered, graphs = int(layer_state(n_indexed, layer, (1,), "n_indexed")), tokens.shape[1]
        out = torch.zeros_like(query)
        key, value = (t.as_strided((1, t.shape[1], length + new, t.shape[3]), t.stride()) for t in (key, value))
        for head in range(query.shape[1]):
            graph, kv_head = head * graphs // query.shape[1], head * key.shape[1] // query.shape[1]
            retrieved = tokens[0, graph, : count[0, graph]].tolist()
            parts = attended_positions(retrieved, covered, length, 0, sinks, window, new)
            positions = sorted(p for part in parts for p in part)
            attended.append(len(positions))
            for i in range(query.shape[2]):
                seen = [p for p in positions if p <= length + i]
                weights = torch.softmax(key[0, kv_head, seen] @ query[0, head, i] * scale, 0)
                out[0, head, i] = weights @ value[0, kv_head, seen]
        return out

    def story(module):
        cache = DynamicCache(config=model.config)
        step(module, tokens(length, 1), cache)
        return step(module, tokens(new, 2), cache)

    module = compiled(model, budget=32, num_sink_tokens=sinks, recent_window=window)
    got = story(module)
    assert ckv_compile.explain(module, show=False).sparse_steps == 1
    monkeypatch.setattr(reference, "sparse_attention", by_hand)
    torch.testing.assert_close(story(module), got, atol=1e-4, rtol=1e-4)
    assert attended
    assert max(attended) <= 32


def test_rejected_drafts_leave_the_partition_under_way(interpreted, model):
    module, cache = compiled(model), DynamicCache(config=model.config)
    step(module, tokens(40, 1), cache)
    step(module, tokens(4, 2), cache)
    (sequence,) = [one for one in REGISTRY.sequences() if one.length == 44]
    epoch = sequence.work.epoch
    sequence.truncate(42)
    assert (sequence.work.epoch, sequence.submitted, sequence.length) == (epoch, [40, 40], 42)
    sequence.truncate(39)
    assert (sequence.work.epoch, sequence.submitted, sequence.length) == (epoch + 1, [0, 0], 39)


@pytest.mark.slow
def test_many_numbers_of_new_tokens_stay_within_the_compilations_that_dynamo_allows(interpreted, model):
    def story(module):
        cache = DynamicCache(config=model.config)
        logits = [step(module, tokens(32, 1), cache)]
        for count in (1, 2, 3, 4, 5, 9, 11, 3, 5, 1):
            logits.append(step(module, tokens(count, count), cache))
            cache.crop(-count // 2)
        return logits

    module = compiled(model)
    with torch._dynamo.config.patch(recompile_limit=6):
        assert_same_story(model, module, story)
        explanation = ckv_compile.explain(module, show=False)
        assert len(explanation.graphs) <= 6
    assert "recompile_limit leaves no compilation" in str(explanation)


@pytest.mark.parametrize("graph", ["attention", "mixed"])
def test_several_tokens_that_would_be_assigned_are_exact_and_say_so(interpreted, model, graph):
    module = compiled(model, graph=graph)
    cache = DynamicCache(config=model.config)
    for count in (32, 1, 4):
        step(module, tokens(count), cache)
    explanation = ckv_compile.explain(module, show=False)
    assert (explanation.prefills, explanation.decode_steps) == (2, 1)
    assert "is exact: several new tokens at a time are not assigned to communities" in str(explanation)


@pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "left_padded"])
def test_several_tokens_at_a_time_on_a_static_cache(interpreted, model, padded):
    inputs = prompt(tokens=60, padded=padded)

    def story(module):
        cache = StaticCache(config=model.config, max_cache_len=64)
        logits, end = [], 0
        for count in (40, 1, 4, 1, 4, 8):
            begin, end = end, end + count
            mask = inputs["attention_mask"][:, :end].clone()
            logits.append(step(module, inputs["input_ids"][:, begin:end].clone(), cache, attention_mask=mask))
        return [one[:, -1] for one in logits]

    module = compiled(model)
    assert_same_story(model, module, story)
    explanation = ckv_compile.explain(module, show=False)
    assert explanation.sparse_steps == explanation.decode_steps == 10, str(explanation)


def test_a_mask_with_holes_is_dense_never_wrong(interpreted, model):
    inputs = prompt(tokens=20)
    inputs["attention_mask"][0, 5:8] = 0
    expected = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    module = compiled(model)
    assert torch.equal(module.generate(**inputs, max_new_tokens=8, do_sample=False), expected)
    reasons = ckv_compile.explain(module, show=False).dense_steps
    assert any("not left padding" in reason for reason in reasons)


@pytest.mark.parametrize("cache_class", [DynamicCache, StaticCache])
def test_a_cache_that_was_reset_forgets_its_first_prompt(interpreted, model, cache_class):
    def story(module):
        cache = cache_class(config=model.config, **({"max_cache_len": 96} if cache_class is StaticCache else {}))
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.parametrize("cache_class", [DynamicCache, StaticCache])
def test_a_cache_may_die_anywhere(interpreted, model, cache_class):
    """A finalizer runs in the middle of anything: here where tensors cannot be read, or read as something else."""
    module = compiled(model)
    cache = cache_class(config=model.config, **({"max_cache_len": 64} if cache_class is StaticCache else {}))
    step(module, tokens(30, 1), cache)
    for seed in range(3):
        step(module, tokens(1, seed), cache)
    attended = ckv_compile.explain(module, show=False).tokens_attended
    for seed in range(3):
        step(module, tokens(1, seed), cache)
    before = len(REGISTRY.sequences())
    fake = FakeTensorMode()
    with fake, in_kernel_invocation_manager(fake):
        del cache
        gc.collect()
        REGISTRY.pool.free_memory()
    assert len(REGISTRY.sequences()) == before - 1
    again = ckv_compile.explain(module, show=False).tokens_attended
    assert (again - attended) * (31 + 32 + 33) == attended * (34 + 35 + 36)  # every token of six steps
