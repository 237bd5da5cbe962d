"""Beam search, and rows of a cache that a caller moves: the index follows them, and no other cache takes it."""

import copy
import gc

import pytest
import torch
from transformers import DynamicCache, StaticCache

import ckv_compile
from ckv_compile.runtime.registry import REGISTRY
from ckv_compile.testing import TINY_VOCAB, prompt, tiny_model

ROWS = 3
SMALL = {"budget": 48, "num_sink_tokens": 4, "recent_window": 8, "append_block": 16, "block_size": 64, "gamma": 1.0}
GRAPHS = {
    "keys": {},
    "assigned": {"append": "assign"},
    "attention": {"graph": "attention", "refresh_interval": 16, "repair_interval": 4},
}


pytestmark = pytest.mark.usefixtures("no_cache_of_another_test")


@pytest.fixture
def model():
    return tiny_model("llama")


def compiled(model, **options):
    return torch.compile(model, backend="communitykv", options={"min_context": 0, "workers": 0, **options})


def new_cache(model, cache_class):
    return cache_class(config=model.config, **({"max_cache_len": 128} if cache_class is StaticCache else {}))


def step(module, ids, cache):
    """Logits of the last token of one call that extends ``cache``."""
    with torch.no_grad():
        return module(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, -1]


def tokens(count, seed=0, batch=ROWS):
    return torch.randint(1, TINY_VOCAB, (batch, count), generator=torch.Generator().manual_seed(seed))


def moves(count, seed=0):
    """Random row maps."""
    return list(torch.randint(0, ROWS, (count, ROWS), generator=torch.Generator().manual_seed(seed)))


def explain(module):
    return ckv_compile.explain(module, show=False)


def the_sequence():
    """The one whose cache is the longest."""
    return max(REGISTRY.sequences(), key=lambda one: one.length)


def beams(module, inputs, cache, count=24):
    static = {"cache_implementation": "static"} if cache == "static" else {}
    return module.generate(**inputs, max_new_tokens=count, num_beams=ROWS, do_sample=False, **static)


# ---------------------------------------------------------------------- beam search


@pytest.mark.parametrize("workers", [{"deterministic": True, "workers": 1}, {"workers": 1}], ids=["waits", "beside"])
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_every_step_of_a_beam_search_is_sparse_and_exact_where_all_fits(interpreted, model, cache, graph, workers):
    inputs, module = prompt(tokens=40, padded=True), compiled(model, append_block=16, **GRAPHS[graph], **workers)
    assert torch.equal(beams(module, inputs, cache), beams(model, inputs, cache))
    explanation = explain(module)
    assert (explanation.caches_reordered, explanation.caches_adopted) == (23, 0), str(explanation)
    late = explanation.dense_steps.pop("the partition was not ready yet", 0)
    assert not explanation.dense_steps
    assert late == 0 or "deterministic" not in workers
    assert explanation.sparse_steps == 23 - late > 0
    assert any("rows had moved" in line for line in explanation.lines())


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_beams_attend_what_the_budget_allows(interpreted, model, cache, graph):
    inputs, module = prompt(tokens=100), compiled(model, **SMALL, **GRAPHS[graph])
    beams(module, inputs, cache)
    explanation = explain(module)
    assert explanation.sparse_steps == explanation.decode_steps == explanation.caches_reordered == 23
    assert explanation.tokens_attended < 0.6 * explanation.tokens_in_context
    assert not explanation.fallbacks


def test_two_searches_in_turn_each_keep_their_own_cache(interpreted, model):
    inputs, module = prompt(tokens=40), compiled(model)
    expected = beams(model, inputs, "dynamic"), beams(model, inputs, "static")
    for _ in range(2):
        found = beams(module, inputs, "dynamic"), beams(module, inputs, "static")
        assert all(map(torch.equal, found, expected))
    assert explain(module).caches_adopted == 0


# ---------------------------------------------------------------------- rows that a caller moves


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("cache_class", [DynamicCache, StaticCache])
def test_logits_of_moved_rows_are_those_of_rows_that_run_alone(interpreted, model, cache_class, graph):
    """Beyond the budget, so that they depend on what is retrieved, and so on the index."""
    module = compiled(model, **SMALL, **GRAPHS[graph])
    story, cache = tokens(90, 1), new_cache(model, cache_class)
    logits = step(module, story, cache)
    for seed, rows in enumerate(moves(22), 2):
        cache.reorder_cache(rows)
        story = torch.cat([story[rows], tokens(1, seed)], 1)
        logits = step(module, story[:, -1:], cache)
    explanation = explain(module)
    assert explanation.sparse_steps == explanation.decode_steps == explanation.caches_reordered == 22
    assert explanation.caches_adopted == 0
    attended = explanation.tokens_attended / explanation.tokens_in_context
    assert attended < 0.6
    for row in range(ROWS):
        alone = new_cache(model, cache_class)
        step(module, story[row : row + 1, :90], alone)
        for at in range(90, 112):
            own = step(module, story[row : row + 1, at : at + 1], alone)
        torch.testing.assert_close(logits[row : row + 1], own, atol=1e-4, rtol=1e-4)
    assert explain(module).caches_reordered == 22


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("cache_class", [DynamicCache, StaticCache])
def test_a_cache_whose_rows_moved_goes_on_like_any_other(interpreted, model, cache_class, graph):
    """Steps of one token and of several, later turns, and steps in between before which nothing moves."""

    def story(module):
        cache = new_cache(model, cache_class)
        logits = [step(module, tokens(40, 1), cache)]
        for seed, rows in enumerate(moves(12), 2):
            if seed % 3:
                cache.reorder_cache(rows)
            logits.append(step(module, tokens({5: 4, 10: 20}.get(seed, 1), seed), cache))
        return logits

    module, expected = compiled(model, **GRAPHS[graph]), story(model)
    for _ in range(2):
        for ours, eagers in zip(story(module), expected, strict=True):
            torch.testing.assert_close(ours, eagers, atol=1e-4, rtol=1e-4)
    explanation = explain(module)
    assert (explanation.caches_reordered, explanation.caches_adopted) == (16, 0), str(explanation)
    assert explanation.sparse_steps == explanation.decode_steps


@pytest.mark.parametrize("cache_class", [DynamicCache, StaticCache])
def test_nothing_of_ours_is_made_anew_when_rows_move(interpreted, model, cache_class):
    """So recorded CUDA graphs of a dynamic cache meet the addresses that they know."""
    module, cache = compiled(model), new_cache(model, cache_class)
    step(module, tokens(40, 1), cache)
    for seed in range(3):  # a compilation may hold what it was given
        step(module, tokens(1, seed), cache)
        cache.reorder_cache(torch.tensor([1, 0, 2]))
    step(module, tokens(1, 2), cache)
    gc.collect()

    def addresses():
        sequence = the_sequence()
        buffers = *sequence.index.buffers.values(), sequence.length_device, sequence.first_device
        slabs = [slab.pointers for slab in REGISTRY.pool.slabs() if not slab.free()]
        return [id(sequence), slabs, *(buffer.data_ptr() for buffer in buffers)]

    before = addresses()
    for seed, rows in enumerate(moves(4), 3):
        cache.reorder_cache(rows)
        step(module, tokens(1, seed), cache)
        assert addresses() == before


def test_other_numbers_of_rows_are_other_caches(interpreted, model):
    def story(module):
        cache = DynamicCache(config=model.config)
        logits = [step(module, tokens(40, 1), cache), step(module, tokens(1, 2), cache)]
        cache.batch_repeat_interleave(2)
        logits.append(step(module, tokens(1, 3, 2 * ROWS), cache))
        cache.batch_select_indices(torch.tensor([4, 0]))
        logits += [step(module, tokens(1, seed, 2), cache) for seed in (4, 5)]
        return logits

    module = compiled(model)
    for ours, eagers in zip(story(module), story(model), strict=True):
        torch.testing.assert_close(ours, eagers, atol=1e-4, rtol=1e-4)
    explanation = explain(module)
    assert (explanation.caches_reordered, explanation.caches_adopted) == (0, 2)


@pytest.mark.parametrize("changed", ["prompt", "generated", "nothing"])
@pytest.mark.parametrize("cache_class", [DynamicCache, StaticCache])
def test_a_cache_that_differs_in_one_token_of_one_row_is_another_one(interpreted, model, cache_class, changed):
    """It is filled by the same graphs, so that equal tokens have equal bits, and then copied out of their sight."""
    module, story = compiled(model), tokens(44, 1)

    def filled(ids):
        cache = new_cache(model, cache_class)
        step(module, ids[:, :40], cache)
        for at in range(40, 44):
            step(module, ids[:, at : at + 1], cache)
        return cache

    other = story.clone()
    if changed != "nothing":
        place = 17 if changed == "prompt" else 41
        other[1, place] = other[1, place] % (TINY_VOCAB - 1) + 1
    cache = copy.deepcopy(filled(other))
    gc.collect()
    ckv_compile.free_memory()
    known = filled(story)
    expected = step(model, tokens(1, 9), copy.deepcopy(cache))
    torch.testing.assert_close(step(module, tokens(1, 9), cache), expected, atol=1e-4, rtol=1e-4)
    explanation = explain(module)
    followed = changed == "nothing"
    assert (explanation.caches_reordered, explanation.caches_adopted) == (int(followed), int(not followed))
    assert known.get_seq_length() == 44


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("cache_class", [DynamicCache, StaticCache])
def test_a_cache_that_somebody_holds_goes_on_beside_the_one_with_its_rows(interpreted, model, cache_class, graph):
    def story(module):
        cache = new_cache(model, cache_class)
        logits = [step(module, tokens(90, 1), cache), step(module, tokens(1, 2), cache)]
        moved = copy.deepcopy(cache)
        moved.reorder_cache(torch.tensor([2, 2, 0]))
        for seed in range(3, 30):
            logits.append(step(module, tokens(1, seed), moved))
            logits.append(step(module, tokens(1, seed + 50), cache))
            if seed % 4:
                moved.reorder_cache(torch.tensor([1, 0, 2]))
        return logits

    module = compiled(model, append_block=16, block_size=64, **GRAPHS[graph])
    for ours, eagers in zip(story(module), story(model), strict=True):
        torch.testing.assert_close(ours, eagers, atol=1e-4, rtol=1e-4)
    explanation = explain(module)
    assert explanation.caches_adopted == 0
    assert explanation.sparse_steps == explanation.decode_steps == 55


@pytest.mark.parametrize("cache_class", [DynamicCache, StaticCache])
@pytest.mark.parametrize("graph", GRAPHS)
def test_a_twin_has_its_own_index_even_of_a_prompt_that_is_under_way(interpreted, model, cache_class, graph):
    module = compiled(model, **{"workers": 1, "deterministic": True, **GRAPHS[graph]})
    prefix = new_cache(model, cache_class)
    step(module, tokens(90, 1), prefix)
    for seed in (2, 3):
        cache = copy.deepcopy(prefix)
        ours, eagers = step(module, tokens(1, seed), cache), new_cache(model, cache_class)
        step(model, tokens(90, 1), eagers)
        torch.testing.assert_close(ours, step(model, tokens(1, seed), eagers), atol=1e-4, rtol=1e-4)
    explanation = explain(module)
    assert (explanation.caches_reordered, explanation.caches_adopted) == (2, 0)
    assert explanation.sparse_steps == 2


@pytest.mark.parametrize("cache_class", [DynamicCache, StaticCache])
def test_a_copy_of_one_row_keeps_its_prompts_edges(interpreted, model, cache_class):
    module, cache = compiled(model, graph="attention"), new_cache(model, cache_class)
    step(module, tokens(40, 1, 1), cache)
    step(module, tokens(1, 2, 1), copy.deepcopy(cache))
    explanation = explain(module)
    assert (explanation.caches_reordered, explanation.caches_adopted, explanation.sparse_steps) == (1, 0, 1)


def test_rows_outgrow_their_slab_while_they_move(interpreted, model, monkeypatch):
    from ckv_compile.runtime import slab

    monkeypatch.setattr(slab, "_GRANULE", 16)
    inputs, module = prompt(tokens=30), compiled(model, append_block=16, block_size=64)
    assert torch.equal(beams(module, inputs, "dynamic", 60), beams(model, inputs, "dynamic", 60))
    explanation = explain(module)
    assert (explanation.sparse_steps, explanation.caches_reordered, explanation.caches_adopted) == (59, 59, 0)
    gc.collect()
    ckv_compile.free_memory()
    assert REGISTRY.pool.slabs() == []


# ---------------------------------------------------------------------- what is left of a static cache


def living(module, batch):
    cache = StaticCache(config=module.config, max_cache_len=64)
    step(module, tokens(30, 1, batch), cache)
    step(module, tokens(1, 2, batch), cache)
    return cache


def test_an_index_waits_for_the_rows_of_its_static_cache_until_another_cache_begins(interpreted, model):
    module = compiled(model)
    for end in (ckv_compile.free_memory, lambda: living(module, 1), lambda: step(module, tokens(9), DynamicCache())):
        living(module, ROWS)
        gc.collect()
        assert REGISTRY.sequences() == []
        assert REGISTRY.orphan is not None
        end()
        gc.collect()
        assert REGISTRY.orphan is None
        ckv_compile.free_memory()


def test_of_a_static_cache_of_one_row_nothing_is_left(interpreted, model):
    living(compiled(model), 1)
    gc.collect()
    assert REGISTRY.orphan is None


def test_a_static_cache_that_was_written_to_before_its_rows_moved_is_met_anew(interpreted, model):
    module, cache = compiled(model), StaticCache(config=model.config, max_cache_len=64)
    step(module, tokens(30, 1), cache)
    with torch.no_grad():
        cache.layers[-1].keys[:, :, 3] *= 2
    cache.reorder_cache(torch.tensor([1, 1, 0]))
    step(module, tokens(1, 2), cache)
    explanation = explain(module)
    assert (explanation.caches_reordered, explanation.caches_adopted) == (0, 1)
