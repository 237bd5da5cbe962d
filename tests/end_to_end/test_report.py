"""explain(): what matched, what was refused and why, what ran; and the warning when nothing did."""

import dataclasses
import warnings

import pytest
import torch
from transformers import AttentionInterface

import ckv_compile
from ckv_compile.errors import PartitionError
from ckv_compile.runtime import jobs
from ckv_compile.testing import prompt, tiny_model


def compiled(model, **options):
    return torch.compile(model, backend="communitykv", options={"min_context": 0, "workers": 0, **options})


def generate(module, inputs, new_tokens=6):
    return module.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)


def test_a_model_that_was_never_run_says_how_to_reach_the_backend():
    explanation = ckv_compile.explain(compiled(tiny_model("llama")), show=False)
    assert "torch.compile(model, backend='communitykv')" in str(explanation)


def test_explain_prints_and_counts(interpreted, capsys):
    module = compiled(tiny_model("llama"), budget=90)
    generate(module, prompt(tokens=150))
    explanation = ckv_compile.explain(module)
    printed = capsys.readouterr().out
    assert printed == str(explanation) + "\n"
    assert list(explanation.rewritten) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert explanation.rewritten["model.layers.0.self_attn"] == ["prefill", "decode"]
    assert (explanation.prefills, explanation.decode_steps, explanation.sparse_steps) == (1, 5, 5)
    assert explanation.cache_kinds == ["DYNAMIC", "EMPTY"]
    assert explanation.tokens_in_context == sum(150 + i for i in range(1, 6)) * 2 * 2 * 2
    assert explanation.tokens_attended <= 5 * 90 * 2 * 2 * 2
    assert 4 <= explanation.mean_community_size <= 16
    assert explanation.largest_community <= 64
    assert explanation.partition_seconds > 0
    for word in ("sparse", "of the context", "communities", "partition", "CUDA graphs"):
        assert word in printed


def test_grouped_linear_layers_are_counted(interpreted):
    module = compiled(tiny_model("llama"), group_projections="all")
    generate(module, prompt(tokens=20))
    explanation = ckv_compile.explain(module, show=False)
    (decode,) = (graph for graph in explanation.graphs if graph.phase == "decode")
    assert decode.grouped == (0, 0), "on a CPU there is nothing to gain"
    assert "grouped" not in str(explanation)
    decode.grouped = (15, 9)
    assert "linear layers in grouped kernels: decode with a dynamic cache: 15 in 9" in str(explanation)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("llama", {"head_dim": 12}, "head_dim 12"),
        ("llama", {"dtype": torch.float64}, "dtype float64"),
        ("mistral_window", {}, "sliding window"),
    ],
)
def test_every_refused_layer_is_listed_with_a_reason(interpreted, family, changes, reason):
    dtype = changes.pop("dtype", None) if "dtype" in changes else None
    model = tiny_model(family, **changes)
    module = compiled(model if dtype is None else model.to(dtype))
    with pytest.warns(UserWarning, match="left attention dense"):
        generate(module, prompt(tokens=20))
    explanation = ckv_compile.explain(module, show=False)
    assert len(explanation.refused) == 2
    assert any(reason in text for reasons in explanation.refused.values() for text in reasons), explanation.refused


@pytest.fixture
def clipped_attention():
    """An attention without a softmax, registered with transformers under this name."""

    def attend(module, query, key, value, attention_mask, **_):
        key, value = (states.repeat_interleave(module.num_key_value_groups, 1) for states in (key, value))
        scores = query @ key.transpose(2, 3) * module.scaling
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - scores.shape[-2])
        return (scores.relu() * seen @ value).transpose(1, 2).contiguous(), None

    AttentionInterface.register("clipped", attend)
    return "clipped"


def test_a_model_without_an_attention_that_is_known_says_so(interpreted, clipped_attention):
    model, inputs = tiny_model("llama", num_hidden_layers=1), prompt(tokens=20)
    model.set_attn_implementation(clipped_attention)
    module = compiled(model)
    with pytest.warns(UserWarning, match="without any attention rewritten"):
        assert torch.equal(generate(module, inputs), generate(model, inputs))
    assert "no attention was found in any graph" in str(ckv_compile.explain(module, show=False))


def test_a_model_whose_attention_was_never_rewritten_warns_once(interpreted):
    module = compiled(tiny_model("mistral_window"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            generate(module, prompt(tokens=20))
    messages = [str(w.message) for w in caught if "without any attention rewritten" in str(w.message)]
    assert len(messages) == 1


def test_gradients_keep_the_graph_dense_with_the_reason(interpreted):
    model = tiny_model("llama")
    module = compiled(model)
    inputs = prompt(tokens=20)
    with pytest.warns(UserWarning, match="torch.no_grad"):
        logits = module(**inputs, use_cache=True).logits
    torch.testing.assert_close(logits, model(**inputs, use_cache=True).logits, atol=1e-4, rtol=1e-4)
    reasons = ckv_compile.explain(module, show=False).refused
    assert any("no_grad" in reason for texts in reasons.values() for reason in texts)


def test_a_failing_partition_costs_pages_and_a_line(interpreted, monkeypatch):
    def broken(*args, stop):
        raise RuntimeError("no memory left")

    monkeypatch.setattr(jobs, "partition_block", broken)
    model = tiny_model("llama")
    inputs = prompt(tokens=40)
    module = compiled(model)
    assert torch.equal(generate(module, inputs), generate(model, inputs))
    explanation = ckv_compile.explain(module, show=False)
    assert explanation.sparse_steps == 5
    assert len(explanation.fallbacks) == 2
    assert "layer 0" in explanation.fallbacks[0]
    assert "no memory left" in explanation.fallbacks[0]


def test_a_partition_that_never_ends_costs_pages_not_the_generation(interpreted, monkeypatch):
    def endless(*args, stop):
        while not stop[0]:
            pass

    monkeypatch.setattr(jobs, "partition_block", endless)
    model = tiny_model("llama")
    inputs = prompt(tokens=40)
    module = compiled(model, workers=1, partition_timeout=0.2, deterministic=True)
    assert torch.equal(generate(module, inputs), generate(model, inputs))
    explanation = ckv_compile.explain(module, show=False)
    assert explanation.sparse_steps == 5
    assert any("longer than 0.2" in fallback for fallback in explanation.fallbacks)


def test_strict_raises_a_failed_partition_at_the_next_call(interpreted, monkeypatch):
    def broken(*args, stop):
        raise RuntimeError("no memory left")

    monkeypatch.setattr(jobs, "partition_block", broken)
    module = compiled(tiny_model("llama"), strict=True)
    with pytest.raises(PartitionError, match="no memory left"):
        generate(module, prompt(tokens=40))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_dropped_and_reported(interpreted, monkeypatch, bad):
    original = jobs.partition_edges

    def poisoned(pieces, *rest, **kwargs):
        (piece,) = pieces
        weight = piece.arrays().weight.copy()
        weight[..., 20, 0] = bad
        return original([dataclasses.replace(piece, weight=weight)], *rest, **kwargs)

    monkeypatch.setattr(jobs, "partition_edges", poisoned)
    model = tiny_model("llama")
    inputs = prompt(tokens=40)
    module = compiled(model, graph="attention")
    assert torch.equal(generate(module, inputs), generate(model, inputs))
    explanation = ckv_compile.explain(module, show=False)
    assert explanation.edges_dropped > 0
    assert "not a finite number" in str(explanation)


def test_explain_works_outside_of_the_inference_mode_in_which_the_model_ran(interpreted):
    module = compiled(tiny_model("llama"), budget=90)
    with torch.inference_mode():
        generate(module, prompt(tokens=150))
    assert ckv_compile.explain(module, show=False).sparse_steps == 5
