"""Decode steps on a GPU: recorded, not waited for, captured by the caller, and always eager's logits."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

import ckv_compile
from ckv_compile.runtime.registry import REGISTRY
from ckv_compile.testing import TINY_VOCAB, prompt, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
EXACT = {"min_context": 0, "workers": 0}
CLOSE = {"atol": 2e-3, "rtol": 2e-3}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def model():
    return tiny_model("llama").cuda()


def compiled(model, mode=None, **options):
    return torch.compile(model, backend="communitykv", mode=mode, options=None if mode else {**EXACT, **options})


def tokens(count, seed=0):
    return torch.randint(1, TINY_VOCAB, (1, count), generator=torch.Generator().manual_seed(seed)).cuda()


def step(module, ids, cache, **kwargs):
    with torch.no_grad():
        return module(input_ids=ids, past_key_values=cache, use_cache=True, **kwargs).logits[:, -1]


def make(cache_class, model):
    return cache_class(config=model.config, **({"max_cache_len": 256} if cache_class is StaticCache else {}))


def verdicts(module, phase="decode"):
    explanation = ckv_compile.explain(module, show=False)
    return [verdict for graph, verdict in explanation.captured.items() if graph.phase == phase]


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_records_its_decode_graph_and_defers_its_stop_check(model, cache, padded):
    inputs = {name: tensor.cuda() for name, tensor in prompt(tokens=40, padded=padded).items()}
    arguments = {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
    expected = model.generate(**inputs, max_new_tokens=24, do_sample=False, **arguments)
    module = compiled(model)
    for _ in range(3):
        assert torch.equal(module.generate(**inputs, max_new_tokens=24, do_sample=False, **arguments), expected)
    assert verdicts(module) == ["captured"] * len(verdicts(module)), verdicts(module)
    assert all("prefill" in verdict for verdict in verdicts(module, "prefill"))
    assert ckv_compile.explain(module, show=False).deferred_stops == 3


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("cache_class", [DynamicCache, StaticCache])
def test_a_decode_step_never_waits_and_its_logits_stay(model, cache_class, masked):
    module, cache, expected = compiled(model), make(cache_class, model), make(cache_class, model)

    def given(length):
        return {"attention_mask": torch.ones(1, length, dtype=torch.long, device="cuda")} if masked else {}

    step(module, tokens(30, 1), cache, **given(30))
    step(model, tokens(30, 1), expected, **given(30))
    ids = [tokens(1, seed) for seed in range(12)]
    logits = [step(module, ids[number], cache, **given(31 + number)) for number in range(4)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        logits += [step(module, ids[number], cache, **given(31 + number)) for number in range(4, 12)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for number, ours in enumerate(logits):
        torch.testing.assert_close(ours, step(model, ids[number], expected, **given(31 + number)), **CLOSE)
    assert ckv_compile.explain(module, show=False).broken_steps == []
    assert verdicts(module) == ["captured"]


def test_a_mask_that_changes_raises(model):
    module, cache = compiled(model), DynamicCache(config=model.config)
    step(module, tokens(30, 1), cache, attention_mask=torch.ones(1, 30, dtype=torch.long, device="cuda"))
    masks = [torch.ones(1, length, dtype=torch.long, device="cuda") for length in range(31, 40)]
    masks[3][0, 5] = 0

    def run():
        for mask in masks:
            step(module, tokens(1, mask.shape[1]), cache, attention_mask=mask)
            torch.cuda.synchronize()

    with pytest.raises(RuntimeError, match="attention_mask must be zero for the first 0"):
        run()


@pytest.mark.timeout(600)  # autotuning compiles dozens of kernels
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes_are_honoured(model, mode):
    inputs = {name: tensor.cuda() for name, tensor in prompt(tokens=40).items()}
    expected = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    module = compiled(model, mode)
    for _ in range(2):
        assert torch.equal(module.generate(**inputs, max_new_tokens=8, do_sample=False), expected)
    assert all((verdict == "captured") == (mode == "reduce-overhead") for verdict in verdicts(module))


def test_the_option_turns_recording_off(model):
    module, cache = compiled(model, cuda_graphs=False), DynamicCache(config=model.config)
    step(module, tokens(30, 1), cache)
    step(module, tokens(1, 2), cache)
    assert verdicts(module) == ["not captured: options['cuda_graphs'] is False"]


@pytest.mark.parametrize("options", [{}, {"cuda_graphs": False}], ids=str)
@pytest.mark.parametrize("cache_class", [DynamicCache, StaticCache])
def test_a_caller_captures_a_step_and_replays_it(model, cache_class, options):
    module, cache, expected = compiled(model, **options), make(cache_class, model), make(cache_class, model)
    step(module, tokens(30, 1), cache)
    step(model, tokens(30, 1), expected)
    ids = tokens(1, 2)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for seed in range(3):
            ids.copy_(tokens(1, seed))
            step(module, ids, cache)
            step(model, ids, expected)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step(module, ids, cache)  # without position_ids: the graph counts on the device
    for seed in range(10, 16):
        ids.copy_(tokens(1, seed))
        graph.replay()
        torch.testing.assert_close(logits, step(model, ids, expected), **CLOSE)
    if cache_class is StaticCache:
        torch.testing.assert_close(step(module, tokens(1, 3), cache), step(model, tokens(1, 3), expected), **CLOSE)
        assert any(sequence.length == 40 for sequence in REGISTRY.sequences())


def test_a_first_call_under_capture_raises_and_says_to_warm_up(model):
    module, cache = compiled(model), DynamicCache(config=model.config)
    step(model, tokens(30, 1), cache)
    ids = tokens(1, 2)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="run one decode step"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        step(module, ids, cache)


def test_addresses_repeat_so_a_second_generation_records_nothing(model):
    from torch._inductor import cudagraph_trees

    inputs = {name: tensor.cuda() for name, tensor in prompt(tokens=40).items()}
    module = compiled(model)
    recorded = []
    for _ in range(4):
        module.generate(**inputs, max_new_tokens=8, do_sample=False)
        manager = cudagraph_trees.get_container(torch.cuda.current_device()).tree_manager
        recorded.append(sum(len(nodes) for nodes in manager.roots.values()))
    assert recorded[-1] == recorded[-2]


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize(("family", "implementation"), [("gemma3", "sdpa"), ("gpt_oss", "eager")])
def test_a_step_beside_sliding_windows_is_recorded_once(family, implementation, padded, given):
    """Whatever their counters and masks say: another number, or another size, would be another graph to record.

    A cache of the caller's (``given``) has layers that record what leaves their window, as the last step is undone.
    """
    from torch._inductor import cudagraph_trees

    model = tiny_model(family, implementation).cuda()
    inputs = {name: tensor.cuda() for name, tensor in prompt(tokens=40, padded=padded).items()}
    module, functions, recorded = compiled(model), [], []
    for count in (8, 8, 40):
        expected = model.generate(**inputs, max_new_tokens=count, do_sample=False)
        more = {"past_key_values": DynamicCache(config=model.config)} if given else {}
        assert torch.equal(module.generate(**inputs, **more, max_new_tokens=count, do_sample=False), expected)
        manager = cudagraph_trees.get_container(torch.cuda.current_device()).tree_manager
        functions.append(len(manager.ids_to_funcs))
        recorded.append(sum(len(nodes) for nodes in manager.roots.values()))
    assert functions[2] == functions[1]
    assert recorded[2] == recorded[1]
    explanation = ckv_compile.explain(module, show=False)
    assert explanation.sparse_steps == explanation.decode_steps == 7 + 7 + 39
    assert set(verdicts(module)) == {"captured"}


@pytest.mark.parametrize(("graph", "workers"), [("keys", 0), ("attention", 0), ("keys", 2)])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_an_index_follows_the_beams(cache, graph, workers):
    model = tiny_model("llama").cuda()
    inputs = {name: tensor.cuda() for name, tensor in prompt(tokens=60, padded=True).items()}
    given = {**inputs, "max_new_tokens": 24, "num_beams": 3, "do_sample": False}
    given |= {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
    expected = model.generate(**given)
    module = compiled(model, graph=graph, workers=workers)
    for _ in range(2):
        assert torch.equal(module.generate(**given), expected)
    explanation = ckv_compile.explain(module, show=False)
    assert explanation.caches_reordered > 10
    assert explanation.caches_adopted <= 2
    if not workers:
        assert explanation.sparse_steps == explanation.decode_steps


@pytest.mark.parametrize("append", ["attend", "assign"])
def test_512_greedy_tokens_within_the_budget_are_those_of_dense_steps(append):
    model = tiny_model("llama", max_position_embeddings=1024).cuda()
    inputs = {name: value.cuda() for name, value in prompt(batch=1, tokens=200).items()}
    budget = {"budget": 1024, "append_block": 32, "block_size": 128, "append": append}
    found = {}
    for name, options in {"dense": {"min_context": 4096}, "sparse": budget}.items():
        torch._dynamo.reset()
        module = compiled(model, **options)
        found[name] = module.generate(**inputs, max_new_tokens=512, min_new_tokens=512, do_sample=False)
        explanation = ckv_compile.explain(model, show=False)
    assert found["sparse"].shape[1] == 712
    assert torch.equal(found["sparse"], found["dense"])
    assert (explanation.sparse_steps, explanation.decode_steps) == (511, 2 * 511), str(explanation)
