"""The quality bench: runs that branch off one prompt, its statistics, and a whole small run over SmolLM2."""

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
