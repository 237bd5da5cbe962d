"""Uses that no tutorial shows: edited caches, masks that change, interruptions, threads, options that alternate."""

import gc
import threading
import warnings

import pytest
import torch
from transformers import DynamicCache, StaticCache

import ckv_compile
from ckv_compile.community.workers import shared_pool
from ckv_compile.runtime import publication
from ckv_compile.runtime import sequence as sequences
from ckv_compile.runtime import slab as slabs
from ckv_compile.runtime.registry import REGISTRY
from ckv_compile.runtime.runner import GraphRunner
from ckv_compile.testing import TINY_VOCAB, prompt, tiny_model

EXACT = {"min_context": 0, "workers": 0}
WINDOW = 64  # recent_window: its tokens may count twice against the budget, once as members of communities


pytestmark = pytest.mark.usefixtures("no_cache_of_another_test")


@pytest.fixture
def model():
    return tiny_model("llama")


def compiled(model, **options):
    return torch.compile(model, backend="communitykv", options={**EXACT, **options})


def greedy(module, inputs, new_tokens=8, **kwargs):
    return module.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, **kwargs)


def step(module, ids, cache, **kwargs):
    """Logits of the last token of one call that extends ``cache``."""
    with torch.no_grad():
        return module(input_ids=ids, past_key_values=cache, use_cache=True, **kwargs).logits[:, -1]


def tokens(count, seed=0, batch=1):
    return torch.randint(1, TINY_VOCAB, (batch, count), generator=torch.Generator().manual_seed(seed))


def decode(module, cache, count, seed=0, batch=1):
    return [step(module, tokens(1, seed + i, batch), cache) for i in range(count)]


def assert_same_story(model, module, story):
    for ours, eagers in zip(story(module), story(model), strict=True):
        torch.testing.assert_close(ours, eagers, atol=1e-4, rtol=1e-4)


def living_sequences():
    gc.collect()
    return sum(type(thing) is sequences.Sequence for thing in gc.get_objects())


def sequence_of_length(length):
    (found,) = (sequence for sequence in REGISTRY.sequences() if sequence.length == length)
    return found


# ---------------------------------------------------------------------- caches and masks that others edit


@pytest.mark.parametrize(
    "edit",
    [
        lambda kv: kv[:1],
        lambda kv: kv[:, :, ::2],
        lambda kv: kv[:, :, :7],
        lambda kv: kv[:1].expand(2, -1, -1, -1),
    ],
    ids=["first row", "every other token", "cropped", "one row twice"],
)
def test_a_view_of_a_cache_is_what_it_shows(interpreted, model, edit):
    def story(module):
        cache = DynamicCache(config=model.config)
        logits = [step(module, tokens(20, 1, 2), cache), *decode(module, cache, 3, batch=2)]
        for layer in cache.layers:
            layer.keys, layer.values = edit(layer.keys), edit(layer.values)
        gc.collect()
        rows = cache.layers[0].keys.shape[0]
        return logits + decode(module, cache, 3, seed=5, batch=rows)

    assert_same_story(model, compiled(model), story)


def _hole(mask):
    mask[0, 12:16] = 0


def _late_padding(mask):
    mask[0, :4] = 0


@pytest.mark.parametrize(("change", "chunk"), [(_hole, 1), (_late_padding, 1), (_late_padding, 5)])
def test_every_step_reads_its_own_mask(interpreted, model, change, chunk):
    def story(module):
        cache, length = DynamicCache(config=model.config), 30
        logits = [step(module, tokens(30, 1), cache, attention_mask=torch.ones(1, 30, dtype=torch.long))]
        for number in range(6):
            length += chunk
            mask = torch.ones(1, length, dtype=torch.long)
            if number in (2, 3):
                change(mask)
            logits.append(step(module, tokens(chunk, number), cache, attention_mask=mask))
        return logits

    assert_same_story(model, compiled(model), story)


@pytest.mark.parametrize("extra", [-3, 3])
def test_a_mask_of_another_length_means_what_it_means_in_eager(interpreted, model, extra):
    def story(module):
        cache = DynamicCache(config=model.config)
        logits = [step(module, tokens(30, 1), cache, attention_mask=torch.ones(1, 30, dtype=torch.long))]
        for number in range(4):
            mask = torch.ones(1, 31 + number + (extra if number >= 2 else 0), dtype=torch.long)
            mask[0, :2] = 0
            logits.append(step(module, tokens(1, number), cache, attention_mask=mask))
        return logits

    assert_same_story(model, compiled(model), story)


@pytest.mark.parametrize("masked", ["prompt", "steps"])
def test_a_mask_may_come_and_go(interpreted, model, masked):
    def story(module):
        cache, logits = DynamicCache(config=model.config), []
        for number, count in enumerate((20, 1, 1, 1, 6, 1)):
            mask = torch.ones(2, cache.get_seq_length() + count, dtype=torch.long)
            mask[0, :3] = 0
            given = {"attention_mask": mask} if (number == 0) == (masked == "prompt") else {}
            logits.append(step(module, tokens(count, number, 2), cache, **given))
        return logits

    assert_same_story(model, compiled(model), story)


def test_a_cache_filled_in_inference_mode_goes_on_outside(interpreted, model):
    def story(module):
        cache = DynamicCache(config=model.config)
        with torch.inference_mode():
            logits = [step(module, tokens(30, 1), cache).clone()]
        return logits + decode(module, cache, 3)

    module = compiled(model)
    # Eager cannot tell this story, so it is told without inference mode.
    cache = DynamicCache(config=model.config)
    expected = [step(model, tokens(30, 1), cache), *decode(model, cache, 3)]
    for ours, eagers in zip(story(module), expected, strict=True):
        torch.testing.assert_close(ours, eagers, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("options", [{}, {"graph": "attention", "refresh_interval": 8}], ids=str)
def test_a_chat_continues_the_cache_that_generate_returned(interpreted, model, options):
    def story(module):
        ids, given, turns = tokens(30, 1), {}, []
        for turn in range(3):
            out = greedy(
                module,
                {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
                return_dict_in_generate=True,
                **given,
            )
            given = {"past_key_values": out["cache"] if "cache" in out else out["past_key_values"]}
            turns.append(out.sequences)
            ids = torch.cat([out.sequences, tokens(6, turn + 5)], 1)
        return turns

    module = compiled(model, **options)
    for ours, eagers in zip(story(module), story(model), strict=True):
        assert torch.equal(ours, eagers)
    explanation = ckv_compile.explain(module, show=False)
    # The first calls of later turns bring a few tokens; where tokens are assigned, these are attended exactly.
    assert (explanation.sparse_steps, explanation.caches_adopted) == (21 if options else 23, 0)


# ---------------------------------------------------------------------- interruptions


@pytest.mark.parametrize(
    ("cache_class", "when", "count"),
    [(DynamicCache, "after", 1), (DynamicCache, "after", 20), (StaticCache, "before", 1)],  # static: written in place
)
def test_an_interrupted_call_never_happened(interpreted, model, monkeypatch, cache_class, when, count):
    """The graph of the call may have run or not; a cache that it did not return is as before."""
    hurt = []
    original = GraphRunner._outputs

    def story(module):
        cache = cache_class(config=model.config, **({"max_cache_len": 96} if cache_class is StaticCache else {}))
        logits = [step(module, tokens(30, 1), cache), *decode(module, cache, 2), step(module, tokens(9, 2), cache)]
        if module is not model:
            hurt.append(when)
            with pytest.raises(KeyboardInterrupt):
                step(module, tokens(count, 7), cache)
            assert not hurt
        return logits + decode(module, cache, 3, seed=8) + [step(module, tokens(9, 9), cache)]

    def interrupted_call(runner, *args):
        if hurt == ["before"]:
            hurt.clear()
            raise KeyboardInterrupt
        return runner.call(args, runner.entry_of(args).statistics)

    def interrupted_outputs(runner, *args):
        if hurt == ["after"]:
            hurt.clear()
            raise KeyboardInterrupt
        return original(runner, *args)

    monkeypatch.setattr(GraphRunner, "__call__", interrupted_call)
    monkeypatch.setattr(GraphRunner, "_outputs", interrupted_outputs)
    assert_same_story(model, compiled(model), story)


@pytest.mark.parametrize("operator", ["add_", "sparse_attention", "submit_partition"])
def test_a_graph_that_fails_half_way_leaves_the_cache_as_it_was(model, monkeypatch, operator):
    from ckv_compile import backend

    hurt = []

    class Interpreter(torch.fx.Interpreter):
        def run_node(self, node):
            result = super().run_node(node)
            if hurt and operator in str(node.target):
                hurt.clear()
                raise KeyboardInterrupt
            return result

    monkeypatch.setattr(backend, "_compile", lambda gm, fakes, patches: Interpreter(gm).run)

    def story(module):
        cache = DynamicCache(config=model.config)
        logits = [step(module, tokens(30, 1), cache), *decode(module, cache, 2), step(module, tokens(9, 2), cache)]
        if module is not model:
            hurt.append(True)
            with pytest.raises(KeyboardInterrupt):
                step(module, tokens(20 if operator == "submit_partition" else 1, 7), cache)
        return logits + decode(module, cache, 3, seed=8) + [step(module, tokens(25, 9), cache)]

    module = compiled(model, append_block=16, block_size=64)
    assert_same_story(model, module, story)
    assert not hurt


def test_an_interrupted_generation_leaves_the_model_as_it_was(interpreted, model):
    from transformers.generation.streamers import BaseStreamer

    class Interrupting(BaseStreamer):
        seen = 0

        def put(self, value):
            self.seen += 1
            if self.seen == 5:
                raise KeyboardInterrupt

        def end(self):
            pass

    inputs = prompt(tokens=20, batch=1)
    expected = greedy(model, inputs)
    module = compiled(model)
    before = set(model.__dict__)
    with pytest.raises(KeyboardInterrupt):
        greedy(module, inputs, streamer=Interrupting())
    assert set(model.__dict__) == before
    assert torch.equal(greedy(module, inputs), expected)


# ---------------------------------------------------------------------- the index keeps up with its cache


@pytest.mark.slow
def test_a_cache_that_outgrew_its_slab_is_indexed_after_the_slab_is_gone(interpreted, model, monkeypatch):
    monkeypatch.setattr(slabs, "_GRANULE", 16)
    module = compiled(model, append_block=16, block_size=64)
    cache, other = DynamicCache(config=model.config), DynamicCache(config=model.config)
    step(module, tokens(30, 1), cache)
    decode(module, cache, 60)
    step(module, tokens(200, 2), other)  # its slab takes the place of the one that was left
    gc.collect()
    step(module, tokens(64, 3), cache)
    decode(module, cache, 1)
    assert [marks[-1][0] >= 140 for marks in sequence_of_length(155).index.marks] == [True, True]  # 78 before


@pytest.mark.usefixtures("layers_at_once")
@pytest.mark.parametrize(("graph", "cache_class"), [("attention", DynamicCache), ("mixed", StaticCache)])
def test_later_turns_enter_the_attention_graph(interpreted, model, graph, cache_class):
    module = compiled(model, graph=graph, refresh_interval=16)
    cache = cache_class(config=model.config, **({"max_cache_len": 256} if cache_class is StaticCache else {}))
    step(module, tokens(60, 1), cache)
    decode(module, cache, 5)
    step(module, tokens(50, 2), cache)
    decode(module, cache, 2)
    assert [marks[-1][0] for marks in sequence_of_length(117).index.marks] == [115, 115]
    decode(module, cache, 20)
    assert [marks[-1][0] for marks in sequence_of_length(137).index.marks] == [131, 131]


def test_with_the_attention_graph_a_padding_that_changes_is_dense_and_says_so(interpreted, model):
    module = compiled(model, graph="attention")
    cache = DynamicCache(config=model.config)
    step(module, tokens(30, 1), cache, attention_mask=torch.ones(1, 30, dtype=torch.long))
    for number in range(3):
        mask = torch.ones(1, 31 + number, dtype=torch.long)
        mask[0, :4] = 0
        step(module, tokens(1, number), cache, attention_mask=mask)
    (reason,) = ckv_compile.explain(module, show=False).dense_steps
    assert "never saw the queries" in reason


@pytest.mark.parametrize(
    "options",
    [
        {"append": "assign"},
        {"append": "assign", "graph_aggregation": "layer", "score": "softmax"},
        {"graph": "attention", "refresh_interval": 8},
    ],
    ids=str,
)
def test_tokens_assigned_and_then_partitioned_count_once_against_the_budget(interpreted, model, options):
    module = compiled(model, append_block=16, block_size=64, budget=160 + WINDOW, **options)
    inputs = prompt(tokens=60, batch=1)
    assert torch.equal(greedy(module, inputs, 100), greedy(model, inputs, 100))
    explanation = ckv_compile.explain(module, show=False)
    assert explanation.tokens_attended == explanation.tokens_in_context


@pytest.mark.parametrize(
    "options",
    [{"append": "assign"}, {"graph": "attention", "refresh_interval": 32}],
    ids=str,
)
def test_a_crop_takes_back_what_decode_steps_assigned(interpreted, model, options):
    def story(module):
        cache = DynamicCache(config=model.config)
        logits = [step(module, tokens(60, 1), cache), *decode(module, cache, 90)]
        cache.crop(-80)
        logits += decode(module, cache, 90, seed=100)
        cache.crop(-110)
        return [*logits, *decode(module, cache, 10), step(module, tokens(40, 3), cache), *decode(module, cache, 40)]

    module = compiled(model, append_block=16, block_size=64, budget=160 + WINDOW, **options)
    assert_same_story(model, module, story)
    explanation = ckv_compile.explain(module, show=False)
    assert explanation.tokens_attended == explanation.tokens_in_context


@pytest.mark.usefixtures("layers_at_once")
def test_a_partition_that_was_overtaken_is_dropped(interpreted, model, monkeypatch):
    finished = []
    original = sequences.Sequence._submit

    def keep(self, layer, start, stop, *args, **kwargs):
        original(self, layer, start, stop, *args, **kwargs)
        finished.append(self.work.inbox[-1])

    monkeypatch.setattr(sequences.Sequence, "_submit", keep)
    module = compiled(model, graph="attention", refresh_interval=8)
    cache = DynamicCache(config=model.config)
    step(module, tokens(40, 1), cache)
    decode(module, cache, 18)
    sequence = sequence_of_length(58)
    assert [marks[-1][0] for marks in sequence.index.marks] == [56, 56]
    late = next(one for one in finished if one.stop == 48)
    sequence.work.inbox.append(late)
    decode(module, cache, 1)
    sequence.work.waiting[late.layer, 0] = late
    publication.publish_layer(sequence, late.layer)
    assert [marks[-1][0] for marks in sequence.index.marks] == [56, 56]


@pytest.mark.parametrize(("graph", "interval"), [("attention", 1), ("mixed", 3)])
def test_refreshing_all_the_time_beside_a_worker_is_exact(interpreted, model, graph, interval):
    module = compiled(model, graph=graph, refresh_interval=interval, workers=1)
    inputs = prompt(tokens=40)
    assert torch.equal(greedy(module, inputs, 40), greedy(model, inputs, 40))


@pytest.mark.parametrize(
    "options",
    [
        {"graph": "attention", "graph_aggregation": "head"},
        {"graph": "mixed", "graph_aggregation": "layer", "num_sink_tokens": 0, "recent_window": 1},
        {"append": "assign", "gamma": 1e6, "max_community_size": 1},
    ],
    ids=str,
)
def test_rows_that_are_almost_all_padding_are_exact(interpreted, model, options):
    inputs = prompt(tokens=150, batch=3)
    for row, pads in ((0, 100), (1, 149)):
        inputs["input_ids"][row, :pads] = inputs["attention_mask"][row, :pads] = 0
    base = {"workers": 1, "append_block": 16, "block_size": 64, "refresh_interval": 8}
    module = compiled(model, **{**base, **options})
    assert torch.equal(greedy(module, inputs, 20), greedy(model, inputs, 20))


# ---------------------------------------------------------------------- nothing stays behind


@pytest.mark.slow
def test_models_of_other_options_in_turn_leave_no_index_behind(interpreted, model):
    modules = [compiled(model, budget=budget) for budget in (4096, 2048)]
    counts = []
    for _ in range(4):
        for module in modules:
            greedy(module, prompt(tokens=30), 3)
        counts.append(living_sequences())
    # Garbage of a first compilation may keep a cache alive for a while, one for each model at most.
    assert counts[-1] <= len(modules)


@pytest.mark.slow
def test_a_static_cache_prefilled_by_somebody_else_again_and_again_has_one_index(interpreted, model):
    module = compiled(model)
    cache = StaticCache(config=model.config, max_cache_len=64)
    counts = []
    for seed in range(4):
        cache.reset()
        step(model, tokens(20, seed), cache)
        decode(module, cache, 2)
        counts.append(living_sequences())
    assert counts == [counts[0]] * 4


@pytest.mark.slow
def test_a_static_cache_that_was_only_prefilled_dies(interpreted, model):
    before = living_sequences()
    module = compiled(model)
    cache = StaticCache(config=model.config, max_cache_len=64)
    for seed in range(3):
        step(module, tokens(12, seed), cache)
    del cache
    gc.collect()
    ckv_compile.explain(module, show=False)  # what it counted is read at a later call
    assert living_sequences() == before


def test_at_most_one_free_slab_waits_for_the_next_cache(interpreted, model):
    module = compiled(model)
    caches = [DynamicCache(config=model.config) for _ in range(4)]
    for cache in caches:
        step(module, tokens(20, 1), cache)
    del caches, cache
    gc.collect()
    last = DynamicCache(config=model.config)
    step(module, tokens(20, 1), last)
    assert [slab.free() for slab in REGISTRY.pool.slabs()] == [False]


def test_partitions_of_tokens_that_are_gone_are_called_off(interpreted, model):
    """Beams move to a new cache every step; what was submitted for the old ones must not pile up."""
    module = compiled(model, workers=1)
    began, release = threading.Event(), threading.Event()
    pool = shared_pool(1, 60.0)
    blocker = pool.submit(lambda stop: (began.set(), release.wait(30)))
    assert began.wait(30)
    try:
        greedy(module, prompt(tokens=30), 10, num_beams=2)
        wanted = [ticket for ticket in pool._queue if not ticket._cancelled]
        assert len(wanted) <= 2 * 2  # of the last step, and of one that came before
    finally:
        release.set()
        pool.wait(blocker)


# ---------------------------------------------------------------------- several at once


def in_threads(*functions):
    results = [None] * len(functions)

    def run(position):
        results[position] = functions[position]()

    threads = [threading.Thread(target=run, args=(position,)) for position in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_threads_generate_with_one_compiled_model(interpreted, model, cache):
    module = compiled(model, workers=1)
    static = {"cache_implementation": "static"} if cache == "static" else {}
    prompts = [prompt(tokens=30, seed=seed) for seed in (0, 1)]
    expected = [greedy(model, inputs, 16) for inputs in prompts]
    greedy(module, prompts[0], 3, **static)
    ran = in_threads(*(lambda inputs=inputs: greedy(module, inputs, 16, **static) for inputs in prompts))
    for ours, eagers in zip(ran, expected, strict=True):
        assert torch.equal(ours, eagers)


def test_each_thread_runs_what_it_called(interpreted, model):
    """Two compiled forms of one model and the model itself, at the same time."""
    from transformers.generation.streamers import BaseStreamer

    together = threading.Barrier(3, timeout=60)

    class InStep(BaseStreamer):
        def put(self, value):
            together.wait()

        def end(self):
            pass

    inputs = prompt(tokens=140, batch=1)
    narrow = compiled(model, policy="streaming", budget=80)
    wide = compiled(model)
    expected = [greedy(module, inputs) for module in (model, narrow, wide)]
    assert not torch.equal(expected[0], expected[1])
    ran = in_threads(
        *(lambda module=module: greedy(module, inputs, streamer=InStep()) for module in (model, narrow, wide))
    )
    assert [torch.equal(ours, own) for ours, own in zip(ran, expected, strict=True)] == [True] * 3
    assert "_compiled_call_impl" not in model.__dict__


# ---------------------------------------------------------------------- the report tells of the right model and call


def test_counts_of_a_cache_that_is_gone_are_kept(interpreted, model):
    module = compiled(model)
    greedy(module, prompt(tokens=30, batch=1), 4)
    gc.collect()
    ckv_compile.free_memory()
    explanation = ckv_compile.explain(module, show=False)
    assert explanation.tokens_in_context == (31 + 32 + 33) * 2 * 2


@pytest.mark.parametrize("cache_class", [DynamicCache, StaticCache])
def test_models_that_share_a_cache_and_graphs_are_counted_apart(interpreted, cache_class):
    models = [tiny_model("llama", seed=seed) for seed in (0, 1)]
    modules = [compiled(model) for model in models]
    arguments = {"max_cache_len": 64} if cache_class is StaticCache else {}
    cache = cache_class(config=models[0].config, **arguments)
    step(modules[0], tokens(30, 1), cache)
    decode(modules[0], cache, 2)
    decode(modules[1], cache, 4)
    for module, lengths in ((modules[0], (31, 32)), (modules[1], (33, 34, 35, 36))):
        explanation = ckv_compile.explain(module, show=False)
        assert explanation.tokens_in_context == sum(lengths) * 2 * 2
        assert sum(calls for graph, calls in explanation.graphs.items() if graph.phase == "decode") == len(lengths)


def test_a_generation_that_bypasses_the_backend_warns_although_an_earlier_one_did_not(interpreted, model):
    module = compiled(model)
    inputs = prompt(tokens=20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        greedy(module, inputs)
    with pytest.warns(UserWarning, match="without any attention rewritten"):
        greedy(module, inputs, use_cache=False)
