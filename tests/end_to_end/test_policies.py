"""Unmodified generation under every policy: exact where the budget holds the context, sparse and repeatable beyond."""

import pytest
import torch
from transformers import DynamicCache

import ckv_compile
from ckv_compile.policies import POLICIES
from ckv_compile.testing import prompt, tiny_model

SMALL = {"min_context": 0, "workers": 0, "num_sink_tokens": 2, "recent_window": 4, "mean_size": 4, "append_block": 16}
TYPICAL = ("quest", "kmeans", "h2o")  # one of each way to choose; the others are slow tests
OTHERS = [
    name if name in TYPICAL else pytest.param(name, marks=pytest.mark.slow)
    for name in POLICIES
    if name != "communities"
]
SEEING = [one for one in OTHERS if POLICIES[one if isinstance(one, str) else one.values[0]].sees_prompt]


def compiled(model, **options):
    torch._dynamo.reset()
    return torch.compile(model, backend="communitykv", options={**SMALL, **options})


def generate(module, tokens=150, new_tokens=24, cache="dynamic", **kwargs):
    static = {"cache_implementation": "static"} if cache == "static" else {}
    inputs = prompt(tokens=tokens, padded=True)
    return module.generate(
        **inputs, max_new_tokens=new_tokens, do_sample=False, output_logits=True, return_dict_in_generate=True, **static,
        **kwargs,
    )  # fmt: skip


@pytest.mark.parametrize("cache", ["dynamic", pytest.param("static", marks=pytest.mark.slow)])
@pytest.mark.parametrize("policy", OTHERS)
def test_a_budget_of_the_context_is_exact_while_the_index_grows(interpreted, policy, cache):
    model = tiny_model("llama")
    expected = generate(model).sequences
    module = compiled(model, policy=policy, budget=180)
    assert torch.equal(generate(module, cache=cache).sequences, expected)
    report = ckv_compile.explain(module, show=False)
    assert (report.decode_steps, report.sparse_steps) == (23, 23)
    assert report.tokens_attended == report.tokens_in_context
    assert not report.fallbacks


@pytest.mark.parametrize("policy", OTHERS)
def test_a_smaller_budget_is_kept_and_repeats(interpreted, policy):
    model = tiny_model("llama")
    module = compiled(model, policy=policy, budget=32)
    found = generate(module)
    report = ckv_compile.explain(module, show=False)
    assert report.sparse_steps == 23
    assert report.tokens_attended < 0.6 * report.tokens_in_context
    assert not report.fallbacks
    again = generate(module)
    assert torch.equal(torch.stack(again.logits), torch.stack(found.logits))
    dense = generate(model)
    assert not torch.equal(torch.stack(found.logits), torch.stack(dense.logits))


@pytest.mark.parametrize("policy", OTHERS)
def test_several_tokens_at_a_time_and_a_crop_are_exact_within_the_budget(interpreted, policy):
    model = tiny_model("llama")
    module = compiled(model, policy=policy, budget=190)
    ids, cache = prompt(tokens=174)["input_ids"], DynamicCache(config=model.config)
    with torch.no_grad():
        module(ids[:, :148], past_key_values=cache, use_cache=True)
        for begin, end in ((148, 152), (152, 153), (153, 156)):
            module(ids[:, begin:end].contiguous(), past_key_values=cache, use_cache=True)
        cache.crop(-6)
        got = [
            module(ids[:, begin : begin + 4].contiguous(), past_key_values=cache).logits for begin in range(150, 174, 4)
        ]
        want = model(ids).logits[:, 150:]
    torch.testing.assert_close(torch.cat(got, 1), want, rtol=1e-4, atol=1e-4)
    # A cropped cache may have to be copied, and over a copy policies that need the prompt's queries are dense.
    assert ckv_compile.explain(module, show=False).sparse_steps >= (3 if policy in SEEING else 9)


@pytest.mark.parametrize("policy", SEEING)
def test_a_prompt_that_was_never_seen_is_attended_densely_and_the_report_says_why(interpreted, policy):
    model = tiny_model("llama")
    ids = prompt(tokens=80)["input_ids"]
    with torch.no_grad():
        cache = model(ids[:, :70], use_cache=True).past_key_values
        module = compiled(model, policy=policy, budget=32)
        steps = [module(ids[:, t : t + 1].contiguous(), past_key_values=cache).logits for t in range(70, 80)]
        want = model(ids).logits[:, 70:]
    torch.testing.assert_close(torch.cat(steps, 1), want, rtol=1e-4, atol=1e-4)
    report = ckv_compile.explain(module, show=False)
    assert report.sparse_steps == 0
    assert f"which policy='{policy}' needs" in str(report)


@pytest.mark.parametrize("policy", ["quest", pytest.param("freekv", marks=pytest.mark.slow), "h2o"])
def test_inductor_computes_the_same(monkeypatch, policy):
    from ckv_compile import backend

    model = tiny_model("llama")
    found = torch.stack(generate(compiled(model, policy=policy, budget=32), new_tokens=6).logits)
    monkeypatch.setattr(backend, "_compile", lambda gm, fakes, patches: gm.forward)
    want = torch.stack(generate(compiled(model, policy=policy, budget=32), new_tokens=6).logits)
    torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-3)
