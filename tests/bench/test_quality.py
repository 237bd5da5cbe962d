"""The quality bench: runs that branch off one prompt, its cases, and its statistics."""

import numpy as np
import pytest
import torch

from bench import quality
from ckv_compile import backend
from ckv_compile.passes.rewrite_plan import AttentionGeometry
from ckv_compile.testing import tiny_model

PROMPT = 300


@pytest.fixture
def interpreted(monkeypatch):
    """Run rewritten graphs node by node: Inductor's compile time is not what is tested."""
    monkeypatch.setattr(backend, "_compile", lambda gm, fakes, patches: gm.forward)
    torch._dynamo.reset()


def steps(step, cache, tokens):
    return torch.cat([step(tokens[:, t : t + 1].contiguous(), past_key_values=cache).logits for t in range(8)], 1)


@pytest.mark.parametrize("policy", ["keys", "attention", "mixed"])
def test_a_branch_equals_decoding_right_after_the_prefill(interpreted, policy):
    model = tiny_model("llama")
    config = model.config
    geometry = AttentionGeometry(
        config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, config.head_dim,
        model.dtype, model.device,
    )  # fmt: skip
    prompts = torch.randint(1, 100, (2, PROMPT), generator=torch.Generator().manual_seed(0))
    tokens = prompts[:, :8]
    options = quality.config_of(policy, 128)
    with torch.no_grad():
        step = quality.compiled(model, options)
        cache = step(prompts, use_cache=True).past_key_values
        expected = steps(step, cache, tokens)
        del cache
        tensors = quality.tensors_of(model(prompts, use_cache=True).past_key_values)
        index = quality.indexed_prompts(model, tensors, prompts, options, geometry)
        for rows in ([0, 1], [1, 0]):
            cache, sequence = quality.branch(tensors, index, rows, options, geometry)
            torch.testing.assert_close(steps(step, cache, tokens[rows]), expected[rows])
            assert sequence.length == PROMPT + 8
            attended, context = sequence.index.tally.sum(0).tolist()
            assert attended < context / 2


@pytest.mark.parametrize("budget", quality.BUDGETS)
def test_the_streaming_control_is_all_window(budget):
    config = quality.config_of("streaming", budget)
    assert config.num_sink_tokens + config.recent_window == budget - 1


def test_a_copied_passage_repeats_a_cue_and_what_follows_it():
    ids = list(range(2000))
    prompts, cases = quality.cases_of({("frozen", "prose"): ids}, 1000, 64, ("copy",))
    assert prompts.tolist() == [ids[:1000]]
    assert [case.tokens[0].item() for case in cases] == [125, 375, 625, 875]
    for case in cases:
        assert case.tokens.tolist() == list(range(case.tokens[0], case.tokens[0] + 16 + 39))
        assert len(case.tokens) - case.skip == 40


def test_batches_hold_cases_of_one_length():
    cases = [quality.Case("a", "frozen", 0, torch.zeros(n)) for n in (5, 9, 5, 5)]
    assert [[len(case.tokens) for case in batch] for batch in quality.batches(cases, 2)] == [[9], [5, 5], [5]]


def test_wilson_matches_the_published_example():
    # Newcombe 1998, table I: 81 of 263.
    assert quality.wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)


def test_the_bootstrap_covers_the_mean_at_its_nominal_rate():
    rng = np.random.default_rng(1)
    hits = sum(
        low <= 1.0 <= high for low, high in (quality.bootstrap(rng.exponential(1, 200), 500) for _ in range(200))
    )
    assert 0.88 <= hits / 200 <= 0.99


def test_claims_are_named_after_test_policy_and_budget():
    row = {
        "texts": "frozen",
        "test": "copy",
        "policy": "keys",
        "budget": 512,
        "agree": "1101",
        "kl": [0.0, 0.1, 0.3, 0.0],
    }
    other = {**row, "policy": "random", "agree": "0001", "texts": "fresh"}
    claims = quality.claims_of(quality.summary([row, row, other]))
    assert claims == {
        "smollm2_top1_keys_copy_b512": 0.75,
        "smollm2_kl_keys_copy_b512": 0.1,
        "smollm2_top1_random_copy_b512_fresh": 0.25,
        "smollm2_kl_random_copy_b512_fresh": 0.1,
    }
