"""An unmodified generate script: greedy tokens equal eager's while every decode step runs the sparse operators."""

import copy
import warnings

import pytest
import torch

import ckv_compile
from ckv_compile.testing import prompt, tiny_model

# The whole context fits the budget and nothing is too short for an index, so every step retrieves, and loses nothing.
EXACT = {"min_context": 0, "workers": 0}


def compiled(model, **options):
    return torch.compile(model, backend="communitykv", options={**EXACT, **options})


def greedy(model, inputs, new_tokens=12, **kwargs):
    return model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, **kwargs)


def assert_every_step_was_sparse(model, steps):
    explanation = ckv_compile.explain(model, show=False)
    assert explanation.decode_steps == explanation.sparse_steps == steps, str(explanation)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "left_padded"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_greedy_tokens_equal_eager(interpreted, family, padded, cache):
    model = tiny_model(family)
    static = {"cache_implementation": "static"} if cache == "static" else {}
    inputs = prompt(tokens=30, padded=padded)
    expected = greedy(model, inputs, **static)
    module = compiled(model)
    assert torch.equal(greedy(module, inputs, **static), expected)
    assert_every_step_was_sparse(module, 11)


@pytest.mark.parametrize("graph", ["attention", "mixed"])
@pytest.mark.parametrize("aggregation", ["group", "head", "layer"])
def test_greedy_tokens_equal_eager_for_every_graph_source(interpreted, graph, aggregation):
    if graph == "mixed" and aggregation == "head":
        pytest.skip("keys are shared by the query heads of a group")
    model = tiny_model("llama")
    inputs = prompt(tokens=40, padded=True)
    expected = greedy(model, inputs, new_tokens=24)
    module = compiled(model, graph=graph, graph_aggregation=aggregation, refresh_interval=8)
    assert torch.equal(greedy(module, inputs, new_tokens=24), expected)
    assert_every_step_was_sparse(module, 23)


@pytest.mark.parametrize("options", [{"append": "assign"}, {"graph_aggregation": "layer"}, {"score": "softmax"},
                                     {"policy": "streaming"}, {"policy": "random"}], ids=str)  # fmt: skip
def test_greedy_tokens_equal_eager_for_every_key_option(interpreted, options):
    model = tiny_model("llama")
    inputs = prompt(tokens=40)
    expected = greedy(model, inputs, new_tokens=40)
    module = compiled(model, append_block=16, **options)
    assert torch.equal(greedy(module, inputs, new_tokens=40), expected)
    assert_every_step_was_sparse(module, 39)


@pytest.mark.parametrize("form", ["module", "model.compile", "model.forward", "optimized module call"])
def test_every_call_form_reaches_the_backend(interpreted, compilations, form):
    model = tiny_model("llama")
    inputs = prompt(tokens=20)
    expected = greedy(model, inputs)
    if form == "module":
        out = greedy(compiled(model), inputs)
    elif form == "model.compile":
        model.compile(backend="communitykv", options=EXACT)
        out = greedy(model, inputs)
    elif form == "model.forward":
        model.forward = torch.compile(model.forward, backend="communitykv", options=EXACT)
        out = greedy(model, inputs)
    else:
        out = hand_written_loop(compiled(model), inputs, 12)
    assert torch.equal(out, expected)
    assert {plan.phase for plan in compilations} == {"prefill", "decode"}
    assert ckv_compile.explain(model, show=False).sparse_steps == 11


def hand_written_loop(module, inputs, new_tokens):
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    with torch.no_grad():
        out = module(input_ids=ids, attention_mask=mask, use_cache=True)
        name = "cache" if "cache" in out else "past_key_values"
        for step in range(new_tokens):
            token = out.logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, token], 1)
            if step + 1 < new_tokens:
                out = module(input_ids=token, use_cache=True, **{name: out[name]})
    return ids


def test_sampling_draws_the_same_tokens(interpreted):
    model = tiny_model("llama")
    inputs = prompt(tokens=25)

    def sample(module):
        torch.manual_seed(3)
        return module.generate(**inputs, max_new_tokens=20, do_sample=True, temperature=1.3, top_k=20)

    assert torch.equal(sample(compiled(model)), sample(model))


def test_later_prompts_on_one_compiled_model_are_indexed_too(interpreted):
    model = tiny_model("llama")
    module = compiled(model, budget=80)
    for number, tokens in enumerate((120, 140, 131), start=1):
        inputs = prompt(tokens=tokens, seed=tokens)
        before = ckv_compile.explain(module, show=False)
        greedy(module, inputs)
        after = ckv_compile.explain(module, show=False)
        assert after.prefills == number
        assert after.sparse_steps - before.sparse_steps == 11
        read = after.tokens_attended - before.tokens_attended
        assert 0 < read < after.tokens_in_context - before.tokens_in_context


def test_two_models_of_one_shape_keep_apart(interpreted):
    models = [tiny_model("llama", seed=seed) for seed in (0, 1)]
    inputs = prompt(tokens=30)
    expected = [greedy(model, inputs) for model in models]
    modules = [compiled(model) for model in models]
    for _ in range(2):
        for module, tokens in zip(modules, expected, strict=True):
            assert torch.equal(greedy(module, inputs), tokens)
    for module in modules:
        assert_every_step_was_sparse(module, 22)


def test_two_caches_in_turn_keep_apart(interpreted):
    model = tiny_model("llama")
    module = compiled(model)
    prompts = [prompt(tokens=30, seed=seed) for seed in (0, 1)]
    expected = [greedy(model, inputs, new_tokens=8) for inputs in prompts]
    with torch.no_grad():
        outs = [module(**inputs, use_cache=True) for inputs in prompts]
        name = "cache" if "cache" in outs[0] else "past_key_values"
        caches = [out[name] for out in outs]
        ids = [inputs["input_ids"] for inputs in prompts]
        for step in range(8):
            for i in range(2):
                token = outs[i].logits[:, -1:].argmax(-1)
                ids[i] = torch.cat([ids[i], token], 1)
                if step < 7:
                    outs[i] = module(input_ids=token, use_cache=True, **{name: caches[i]})
    assert torch.equal(ids[0], expected[0])
    assert torch.equal(ids[1], expected[1])
    assert_every_step_was_sparse(module, 14)


@pytest.mark.parametrize(("cache", "padding"), [("dynamic", (29, 17, 0)), ("static", (3, 0)), ("static", (29, 17, 0))])
def test_rows_of_a_padded_batch_equal_their_single_runs(interpreted, cache, padding):
    model = tiny_model("llama", num_hidden_layers=1)
    module, static = compiled(model), {"cache_implementation": "static"} if cache == "static" else {}
    batch = prompt(tokens=30, batch=len(padding))
    for row, pads in enumerate(padding):
        batch["input_ids"][row, :pads] = batch["attention_mask"][row, :pads] = 0
    together = greedy(module, batch, **static)
    for row, pads in enumerate(padding):
        single = {name: tensor[row : row + 1, pads:] for name, tensor in batch.items()}
        assert torch.equal(greedy(module, single, **static)[0], together[row, pads:])
        assert torch.equal(greedy(model, single)[0], together[row, pads:])
    assert_every_step_was_sparse(module, 11 * (1 + len(padding)))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_sliding_layers_stay_beside_full_ones_that_are_rewritten(interpreted, family, cache):
    model = tiny_model(family, "eager" if family == "gpt_oss" else "sdpa")
    arguments = {"cache_implementation": "static"} if cache == "static" else {}
    inputs = prompt(tokens=30, padded=True)
    expected = greedy(model, inputs, **arguments)
    module = compiled(model)
    assert torch.equal(greedy(module, inputs, **arguments), expected)
    explanation = ckv_compile.explain(module, show=False)
    assert explanation.sparse_steps == explanation.decode_steps == 11
    assert list(explanation.rewritten) == ["model.layers.1.self_attn"]
    assert [*explanation.refused] == ["model.layers.0.self_attn"]
    assert explanation.refused["model.layers.0.self_attn"][0].startswith("sliding window attention")


@pytest.mark.parametrize("family", ["mistral_window", "phi3", "llama3_rope", "qwen3_moe", "olmo2", "granite", "cohere"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_other_families_are_right_and_reported(interpreted, family, implementation, cache):
    model = tiny_model(family, implementation, num_hidden_layers=1)
    inputs = prompt(tokens=80, padded=True)  # llama3_rope: its frequencies are for 64
    static = {"cache_implementation": "static"} if cache == "static" else {}
    expected = greedy(model, inputs, 6, **static)
    module = compiled(model)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        assert torch.equal(greedy(module, inputs, 6, **static), expected)
    explanation = ckv_compile.explain(module, show=False)
    if family == "mistral_window":
        assert explanation.sparse_steps == 0
        assert [reason for reasons in explanation.refused.values() for reason in reasons if "sliding" in reason]
    else:
        assert_every_step_was_sparse(module, 5)
        assert not explanation.refused


@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(2, 2), (2, 1), (3, 1), (4, 1), (6, 1), (7, 1), (8, 1), (16, 1), (16, 2)]
)
def test_every_group_size_reads_less_than_the_context(interpreted, heads, kv_heads):
    model = tiny_model(
        "llama", num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=16, hidden_size=16 * heads
    )
    inputs = prompt(tokens=200, batch=1)
    exact = compiled(model)
    assert torch.equal(greedy(exact, inputs, 6), greedy(model, inputs, 6))
    torch._dynamo.reset()
    module = compiled(copy.deepcopy(model), budget=96, append_block=64, block_size=64)
    greedy(module, inputs, 6)
    explanation = ckv_compile.explain(module, show=False)
    assert explanation.sparse_steps == 5
    assert 0 < explanation.tokens_attended <= 5 * 2 * kv_heads * 96 < explanation.tokens_in_context


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_every_head_dim_is_exact(interpreted, head_dim):
    model = tiny_model("llama", head_dim=head_dim)
    inputs = prompt(tokens=20)
    assert torch.equal(greedy(compiled(model), inputs, 6), greedy(model, inputs, 6))


def test_logits_equal_eager_to_1e_4(interpreted):
    model = tiny_model("qwen3")
    inputs = prompt(tokens=40, padded=True)
    arguments = {"max_new_tokens": 10, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    expected = model.generate(**inputs, **arguments)
    out = compiled(model).generate(**inputs, **arguments)
    for ours, eagers in zip(out.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, eagers, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_tokens_equal_where_the_margin_exceeds_rounding(interpreted, dtype):
    model = tiny_model("llama").to(dtype)
    inputs = prompt(tokens=40)
    reference = copy.deepcopy(model).float()
    module = compiled(model)
    with torch.no_grad():
        out = module(**inputs, use_cache=True)
        name = "cache" if "cache" in out else "past_key_values"
        ids, cache = inputs["input_ids"], out[name]
        for _ in range(10):
            exact = reference(input_ids=ids).logits[:, -1]
            eager = model(input_ids=ids).logits[:, -1].float()
            ours = out.logits[:, -1].float()
            rounding = (eager - exact).abs().max()
            assert (ours - exact).abs().max() <= 2 * rounding + 2**-7 * exact.abs().max()
            best = exact.topk(2).values
            clear = best[:, 0] - best[:, 1] > 4 * rounding
            assert torch.equal(ours.argmax(-1)[clear], exact.argmax(-1)[clear])
            token = exact.argmax(-1)[:, None]
            ids = torch.cat([ids, token], 1)
            out = module(input_ids=token, use_cache=True, **{name: cache})


def test_below_min_context_steps_are_dense_and_say_so(interpreted):
    model = tiny_model("llama")
    module = torch.compile(model, backend="communitykv", options={"workers": 0})
    inputs = prompt(tokens=20)
    assert torch.equal(greedy(module, inputs), greedy(model, inputs))
    explanation = ckv_compile.explain(module, show=False)
    assert explanation.sparse_steps == 0
    assert explanation.dense_steps == {"the context is not longer than min_context": 11}


def test_a_context_that_grows_past_min_context_becomes_sparse(interpreted):
    model = tiny_model("llama")
    inputs = prompt(tokens=20)
    module = torch.compile(
        model, backend="communitykv", options={"workers": 0, "min_context": 30, "append_block": 16, "block_size": 64}
    )
    assert torch.equal(greedy(module, inputs, 40), greedy(model, inputs, 40))
    explanation = ckv_compile.explain(module, show=False)
    assert 20 <= explanation.sparse_steps < 39


@pytest.mark.parametrize("tokens", [1, 2, 9, 10, 11, 12])
def test_prompts_of_sinks_only_are_exact(interpreted, tokens):
    model = tiny_model("llama")
    inputs = prompt(tokens=tokens, batch=1)
    for graph in ("keys", "attention"):
        torch._dynamo.reset()
        assert torch.equal(greedy(compiled(model, graph=graph), inputs, 6), greedy(model, inputs, 6))


def test_the_partition_runs_behind_the_steps_and_is_waited_for_by_none(interpreted):
    model = tiny_model("llama")
    inputs = prompt(tokens=40)
    module = torch.compile(model, backend="communitykv", options={"min_context": 0, "workers": 1})
    assert torch.equal(greedy(module, inputs, 20), greedy(model, inputs, 20))
    assert ckv_compile.explain(module, show=False).waited_seconds == 0


def test_deterministic_generations_repeat(interpreted):
    model = tiny_model("llama")
    inputs = prompt(tokens=150)
    options = {"min_context": 0, "workers": 2, "budget": 90, "append_block": 16, "deterministic": True}
    module = torch.compile(model, backend="communitykv", options=options)
    runs = [greedy(module, inputs, 40) for _ in range(3)]
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])
    assert ckv_compile.explain(module, show=False).sparse_steps == 3 * 39


def test_static_caches_of_several_capacities_are_all_sparse(interpreted):
    model = tiny_model("llama")
    module = compiled(model)
    for tokens in (20, 33, 40):
        inputs = prompt(tokens=tokens, padded=True)
        expected = greedy(model, inputs, 4, cache_implementation="static")
        assert torch.equal(greedy(module, inputs, 4, cache_implementation="static"), expected)
    assert_every_step_was_sparse(module, 9)


@pytest.mark.parametrize("graph", ["keys", "attention"])
def test_a_budget_of_exactly_the_context_loses_nothing(interpreted, graph):
    model = tiny_model("llama")
    inputs = prompt(tokens=150)
    module = compiled(model, budget=170, graph=graph)
    assert torch.equal(greedy(module, inputs, 20), greedy(model, inputs, 20))
    explanation = ckv_compile.explain(module, show=False)
    assert explanation.tokens_attended == explanation.tokens_in_context
