"""generate's own compilation of static caches, asked for the backend: it compiles decode and leaves prefill eager."""

import torch
from transformers import CompileConfig

import ckv_compile
from ckv_compile.testing import prompt, tiny_model


def test_with_compile_config_decode_is_indexed_from_the_keys_of_the_unseen_prompt(interpreted, compilations):
    model = tiny_model("llama")
    inputs = prompt(tokens=40, padded=True)
    expected = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    config = CompileConfig(backend="communitykv", mode=None, options={"min_context": 0, "workers": 0})
    config._compile_all_devices = True  # generate does this by itself on CUDA only
    out = model.generate(
        **inputs, max_new_tokens=8, do_sample=False, cache_implementation="static", compile_config=config
    )
    assert torch.equal(out, expected)
    assert {plan.phase for plan in compilations} == {"decode"}
    explanation = ckv_compile.explain(model, show=False)
    assert explanation.prefills == 0
    assert explanation.caches_adopted == 1
    assert explanation.sparse_steps == explanation.decode_steps == 7


def test_the_mode_that_a_compile_config_has_by_itself_is_taken(interpreted, compilations):
    model, inputs = tiny_model("llama", num_hidden_layers=1), prompt(tokens=40, padded=True)
    expected = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    config = CompileConfig(backend="communitykv")
    assert config.mode == "reduce-overhead"
    config._compile_all_devices = True
    out = model.generate(
        **inputs, max_new_tokens=8, do_sample=False, cache_implementation="static", compile_config=config
    )
    assert torch.equal(out, expected)
    assert {plan.phase for plan in compilations} == {"decode"}
