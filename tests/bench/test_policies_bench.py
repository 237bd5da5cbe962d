"""The policies bench: it computes what the backend computes, and its oracle is one."""

import json

import pytest
import torch
from rich.progress import Progress

from bench import policies, quality
from ckv_compile import backend
from ckv_compile.policies import POLICIES
from ckv_compile.testing import TINY_VOCAB, tiny_model

CONTEXT, WINDOW = 200, 24
KINDS = [("python", "frozen"), ("prose", "fresh")]


def tokens_of(batch=2):
    return torch.randint(1, TINY_VOCAB, (batch, CONTEXT + WINDOW), generator=torch.Generator().manual_seed(0))


def measured(names, budgets):
    model = tiny_model("llama")
    with Progress(disable=True) as progress:
        window = policies.window_of(model, tokens_of(), CONTEXT, names, None, progress)
        return policies.measure(model, window, KINDS, names, budgets, progress)


@pytest.fixture(scope="module")
def everything():
    return measured(list(POLICIES), [64])


def test_a_budget_of_the_context_loses_nothing():
    rows, _ = measured([name for name in POLICIES if name != "streaming"], [CONTEXT + WINDOW])
    for row in rows:
        assert row["agree"] == "1" * WINDOW
        assert max(row["kl"]) < 1e-4
        assert min(row["recall_by_layer"]) > 0.9999
        assert max(max(heads) for heads in row["error_by_head"]) < 1e-4


def test_no_policy_recalls_more_than_the_oracle_and_all_keep_the_budget(everything):
    rows, _ = everything
    best = {row["test"]: row["recall_by_layer"] for row in rows if row["policy"] == "oracle"}
    assert {row["policy"] for row in rows} == set(POLICIES)
    for row in rows:
        assert row["attended"] <= 64
        if row["policy"] != "streaming":  # whose window is another one
            assert all(ours <= top + 1e-4 for ours, top in zip(row["recall_by_layer"], best[row["test"]], strict=True))
        assert max(row["kl"]) > 1e-4, "nothing was left out"


def test_the_index_of_a_policy_is_what_its_steps_read(everything):
    _, costs = everything
    tokens, kv_floats = 2 * 2 * (CONTEXT + WINDOW), 2 * 2 * 16
    assert all(cost["kv_bytes"] == tokens * kv_floats * 4 for cost in costs.values())
    assert costs["oracle"]["bytes"] == costs["sparq"]["bytes"] == 0
    assert costs["h2o"]["bytes"] == tokens * 2 * 4
    assert costs["quest"]["bytes"] == tokens // 16 * kv_floats * 4
    assert 0 < costs["communities"]["bytes"] < costs["communities"]["kv_bytes"]


@pytest.mark.parametrize("policy", ["communities", "quest", "freekv", "snapkv", "streaming"])
def test_predictions_are_those_of_the_compiled_model_step_by_step(monkeypatch, policy):
    monkeypatch.setattr(backend, "_compile", lambda gm, fakes, patches: gm.forward)
    torch._dynamo.reset()
    model, tokens, budget = tiny_model("llama"), tokens_of(), 64
    found = {}

    def keep(model, hidden):
        found["ours"] = log_probabilities(model, hidden)
        return found["ours"]

    log_probabilities = policies.log_probabilities
    monkeypatch.setattr(policies, "log_probabilities", keep)
    with Progress(disable=True) as progress:
        window = policies.window_of(model, tokens, CONTEXT, [policy], None, progress)
        policies.measure(model, window, KINDS, [policy], [budget], progress)
    step = quality.compiled(model, policies.config_of(policy, budget))
    with torch.no_grad():
        cache = step(tokens[:, :CONTEXT], use_cache=True).past_key_values
        logits = [
            step(tokens[:, t : t + 1].contiguous(), past_key_values=cache, use_cache=True).logits
            for t in range(CONTEXT, CONTEXT + WINDOW)
        ]
        dense = model(tokens).logits[:, CONTEXT:].log_softmax(-1)
    torch.testing.assert_close(found["ours"], torch.cat(logits, 1).log_softmax(-1), rtol=1e-3, atol=1e-3)
    assert not torch.allclose(found["ours"], dense, rtol=1e-3, atol=1e-3)


def test_a_file_is_drawn_and_its_figures_are_those_of_its_rows(everything, tmp_path):
    pytest.importorskip("matplotlib")
    rows, costs = everything
    cells = policies.cells_of(rows)
    path = tmp_path / "policies.json"
    path.write_text(json.dumps({"cells": cells, "costs": costs}, default=float))
    assert policies.plot(path).stat().st_size > 10_000
    (cell,) = (cell for cell in cells if (cell["policy"], cell["test"]) == ("quest", "prose"))
    (row,) = (row for row in rows if (row["policy"], row["test"]) == ("quest", "prose"))
    assert cell["tokens"] == WINDOW
    assert cell["top1"] == row["agree"].count("1") / WINDOW
    assert cell["kl"] == pytest.approx(sum(row["kl"]) / WINDOW)
    assert cell["recall"] == pytest.approx(sum(row["recall_by_layer"]) / len(row["recall_by_layer"]))
    assert "communities_kl_gain_interval" in cell
    assert policies.claims_of(cells)["policy_top1_quest_prose_b64"] == round(cell["top1"], 4)


def test_budgets_that_hold_no_more_than_the_window_are_refused(capsys):
    with pytest.raises(SystemExit):
        policies.arguments(["--context", "1024", "--shares", "64"])
    assert "budgets must be at least 42 tokens, got 1024 / 64" in capsys.readouterr().err
