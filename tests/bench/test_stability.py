"""Tables of long generations: what is compared with what, on a tiny model."""

import json

import pytest
import torch
from transformers import LlamaForCausalLM

from bench import readme_stability, stability
from ckv_compile.testing import tiny_config, tiny_model


def test_windows_of_a_dense_decode_are_those_of_one_dense_pass():
    model = tiny_model("llama")
    ids = torch.randint(1, 100, (2, 70), generator=torch.Generator().manual_seed(0))
    prompts, following = ids[:, :50], ids[:, 50:]
    sizes = stability.Sizes(50, (8, 20), 6, 64)
    wanted = {t for window in sizes.windows().values() for t in window}
    assert sorted(wanted) == [*range(2, 8), *range(14, 20)]
    with torch.no_grad():
        tokens, ours = stability.decode(model, prompts, 20, stability.given(following), wanted, lambda: None)
        dense = stability.dense_windows(model, prompts, tokens, sizes, lambda: None)
        rows = stability.rows_of([{"test": "a"}, {"test": "b"}], dense, ours, tokens, sizes)
    assert torch.equal(tokens, following)
    assert [(row["test"], row["horizon"]) for row in rows] == [("a", 8), ("a", 20), ("b", 8), ("b", 20)]
    for row in rows:
        assert row["agree"] == "1" * 6
        assert max(row["kl"]) < 1e-6
        assert row["nll"] == pytest.approx(row["dense_nll"], abs=1.1e-3)  # both are rounded to four digits
    with torch.no_grad():
        log_probs = model(ids[1:]).logits[0].log_softmax(-1)
    expected = [-float(log_probs[49 + t, following[1, t]]) for t in range(14, 20)]
    assert rows[3]["dense_nll"] == pytest.approx(expected, rel=1e-3)


def test_what_is_drawn_repeats_and_stays_within_the_likeliest():
    logits = torch.full((3, 20), -4.0)
    logits[:, :4] = torch.tensor([4.0, 3.0, 2.0, 1.0])
    first, again = (
        [stability.drawn(5, "cpu")(0, logits), stability.drawn(6, "cpu")(0, logits.expand(3, -1))] for _ in range(2)
    )
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    choose = stability.drawn(0, "cpu")
    drawn = torch.cat([choose(t, logits) for t in range(200)], 1)
    # At temperature 0.7 the first two have 0.95 and a little: the third is needed no more.
    kept = torch.softmax(logits[0, :4] / 0.7, 0).cumsum(0)
    assert drawn.max() == int((kept < 0.95).sum())
    assert drawn.min() == 0


def run(tmp_path, *arguments):
    stability.main(["--small", "--out", str(tmp_path), *arguments])
    (path,) = tmp_path.glob("stability-*.json")
    return json.loads(path.read_text())


def test_a_budget_of_everything_is_dense(tmp_path, restored):
    found = run(tmp_path, "--arms", "keys", "--texts", "python", "--budget", "256")
    assert [(cell["mode"], cell["horizon"]) for cell in found["cells"]] == [
        ("fixed", 16), ("fixed", 32), ("sampled", 16), ("sampled", 32),
    ]  # fmt: skip
    for cell in found["cells"]:
        assert cell["top1"] == 1.0
        assert cell["kl"] < 1e-5
        assert cell["attended"] == 1.0
        assert cell["tokens"] == 8


def test_a_small_budget_is_seen_to_be_one(tmp_path, restored):
    found = run(tmp_path, "--arms", "attention, incremental", "streaming", "--texts", "python", "--modes", "fixed")
    for cell in found["cells"]:
        assert 0.5 < cell["attended"] <= 128 / 160
        assert cell["kl"] > 1e-3
    again = stability.main(["--merge", *map(str, tmp_path.glob("stability-*.json")), "--out", str(tmp_path / "merged")])
    assert again == found["claims"]


def test_a_stretched_model_is_one_that_was_made_so():
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config("llama", max_position_embeddings=64))
    stability.stretch(model, 4.0)
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    expected = LlamaForCausalLM(
        tiny_config(
            "llama", max_position_embeddings=256, rope_parameters=dict(tiny_config("llama").rope_parameters) | rope
        )
    )
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, expected.model.rotary_emb.inv_freq)
    assert model.model.rotary_emb.attention_scaling == expected.model.rotary_emb.attention_scaling
    assert model.config.max_position_embeddings == 256


def test_the_tables_have_the_papers_rows_where_it_has_them(monkeypatch, tmp_path):
    def cell(mode, horizon, **more):
        return {
            "test": "python", "mode": mode, "arm": "keys", "horizon": horizon, "context": 4096, "budget": 512,
            "prompts": 2, "tokens": 1024, "top1": 0.9, "top1_interval": [0.8, 0.95], "kl": 0.01,
            "kl_interval": [0.0, 0.02], "nll": 1.5, "dense_nll": 1.25, "attended": 0.08, **more,
        }  # fmt: skip

    old, new = (
        [cell("fixed", 1024, kl=0.5), cell("fixed", 4096)],
        [cell("fixed", 1024), cell("sampled", 1024)],
    )
    for date, cells in (("2026-01-01", old), ("2026-01-02", new)):
        file = {"date": date, "cells": cells}
        (tmp_path / f"stability-{date}.json").write_text(json.dumps(file))
    monkeypatch.setattr(readme_stability, "RESULTS", tmp_path)
    lines = readme_stability.stability_tables().split("\n")
    ours = next(line for line in lines if line.startswith("| keys |"))
    assert ours == (
        "| keys | 0.900 (0.800-0.950), KL 0.0100, NLL +0.2500 | 0.900 (0.800-0.950), KL 0.0100, NLL +0.2500 | 8.0% |"
    )
    assert "| the paper's models, refresh | - | 0.956, KL 0.0369 | |" in lines
    sampled = lines[lines.index(next(line for line in lines if line.startswith("| Sampled"))) :]
    assert not any(line.startswith("| the paper") for line in sampled)
