"""Models with attn_implementation="eager", learned sinks among them: greedy tokens through sparse steps are eager's."""

import pytest
import torch
import transformers

import ckv_compile
from ckv_compile.testing import prompt, tiny_model

# The whole context fits the budget and nothing is too short for an index, so every step retrieves, and loses nothing.
EXACT = {"min_context": 0, "workers": 0}


def greedy(model, inputs, **kwargs):
    return model.generate(**inputs, max_new_tokens=6, do_sample=False, **kwargs)


@pytest.fixture(scope="module")
def models():
    one_layer = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    return {"llama": tiny_model("llama", "eager"), "gpt_oss": tiny_model("gpt_oss", "eager", **one_layer)}


@pytest.mark.parametrize(
    ("family", "cache", "padded"),
    [
        ("llama", "dynamic", True),
        ("llama", "static", True),
        ("gpt_oss", "dynamic", False),
        ("gpt_oss", "dynamic", True),
        ("gpt_oss", "static", False),
        ("gpt_oss", "static", True),
    ],
)
def test_greedy_tokens_equal_eager(interpreted, models, family, padded, cache):
    model = models[family]
    static = {"cache_implementation": "static"} if cache == "static" else {}
    inputs = prompt(tokens=30, padded=padded)
    expected = greedy(model, inputs, **static)
    module = torch.compile(model, backend="communitykv", options=EXACT)
    assert torch.equal(greedy(module, inputs, **static), expected)
    explanation = ckv_compile.explain(module, show=False)
    assert explanation.decode_steps == explanation.sparse_steps == 5, str(explanation)
    assert not explanation.refused


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_chunks_of_a_prompt_and_a_second_turn_with_learned_sinks(interpreted, models, cache):
    model = models["gpt_oss"]
    inputs = prompt(tokens=42, padded=True)
    lengths = (20, 16, 1, 4, 1)  # a prompt in two chunks, a step, another turn, a step
    module = torch.compile(model, backend="communitykv", options=EXACT)

    def logits(callee):
        if cache == "dynamic":
            state = transformers.DynamicCache(config=model.config)
        else:
            state = transformers.StaticCache(config=model.config, max_cache_len=48)
        end, found = 0, []
        with torch.no_grad():
            for length in lengths:
                begin, end = end, end + length
                ids, mask = inputs["input_ids"][:, begin:end].clone(), inputs["attention_mask"][:, :end].clone()
                out = callee(ids, attention_mask=mask, past_key_values=state, use_cache=True)
                found.append(out.logits[:, -1])
        return torch.stack(found)

    expected = logits(model)
    torch.testing.assert_close(logits(module), expected, atol=1e-4, rtol=1e-4)
    explanation = ckv_compile.explain(module, show=False)
    assert not explanation.refused
    assert explanation.decode_steps == explanation.sparse_steps
    assert explanation.prefills + explanation.decode_steps == len(lengths)


def test_an_additive_mask_with_another_number_is_dense(interpreted, models):
    model = models["llama"]
    module = torch.compile(model, backend="communitykv", options=EXACT)
    least, inputs = torch.finfo(torch.float32).min, prompt(tokens=12)["input_ids"]

    def logits(callee, biased):
        cache, found = transformers.StaticCache(config=model.config, max_cache_len=16), []
        with torch.no_grad():
            for begin, end in ((0, 10), (10, 11), (11, 12)):
                seen = torch.arange(16) <= torch.arange(begin, end)[:, None]
                mask = torch.where(seen, 0.0, least)[None, None].repeat(2, 1, 1, 1)
                if biased:
                    mask[:, :, -1, 5] = -1.0
                out = callee(inputs[:, begin:end].clone(), attention_mask=mask, past_key_values=cache, use_cache=True)
                found.append(out.logits[:, -1])
        return torch.stack(found)

    for biased, reason in ((False, None), (True, "the mask is not causal with left padding")):
        before = ckv_compile.explain(module, show=False).sparse_steps
        torch.testing.assert_close(logits(module, biased), logits(model, biased), atol=1e-4, rtol=1e-4)
        after = ckv_compile.explain(module, show=False)
        assert after.sparse_steps - before == (0 if biased else 2)
        assert reason is None or reason in after.dense_steps
