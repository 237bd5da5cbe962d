"""The tasks bench: decoding in turns, scores, the skip rule, and claims; the sparse arms equal dense within the budget."""

import json

import pytest
import torch

from bench import retrieval_model, tasks
from bench.task_grammars import vocabulary
from bench.tasks import Arms, Group
from ckv_compile import backend

SIZE = retrieval_model.Size(hidden=64, layers=2, query_heads=4, kv_heads=2, head_dim=32, theta=1e6)


@pytest.fixture
def interpreted(monkeypatch):
    """Run rewritten graphs node by node: Inductor's compile time is not what is tested."""
    monkeypatch.setattr(backend, "_compile", lambda gm, fakes, patches: gm.forward)
    torch._dynamo.reset()


@pytest.fixture
def model():
    return retrieval_model.new_model("llama", SIZE, seed=0).eval().requires_grad_(False)


def prompts(rows=2, length=200):
    return torch.randint(0, vocabulary.SIZE, (rows, length), generator=torch.Generator().manual_seed(0))


def cache_of(model, tokens):
    return model(tokens, use_cache=True).past_key_values


def test_turns_are_decoded_as_one_sequence(model):
    tokens = prompts()
    turns = [(tokens[:, :3], 4), (tokens[:, 5:7], 2)]
    told = tasks.greedy(model, cache_of(model, tokens), turns)
    assert [tuple(new.shape) for new in told] == [(2, 4), (2, 2)]
    sequence = torch.cat([tokens, turns[0][0], told[0], turns[1][0], told[1]], 1)
    choices = model(sequence, use_cache=False).logits.argmax(-1)
    assert torch.equal(choices[:, 202:206], told[0])
    assert torch.equal(choices[:, 208:210], told[1])


def test_forced_tokens_are_judged_where_they_are_predicted(model):
    tokens, gold = prompts(), prompts(length=6)[:, :6].flip(1)
    given = tokens[:, :2]
    everything = torch.cat([tokens, given, gold], 1)
    logits = model(everything, use_cache=False).logits
    gold = torch.cat([logits[:, 201:202].argmax(-1), gold[:, 1:]], 1)  # the first is the most probable one
    everything[:, 202:] = gold
    logits = model(everything, use_cache=False).logits[:, 201:-1]
    right, likelihood = tasks.forced(model, cache_of(model, tokens), given, gold)
    assert right.shape == likelihood.shape == (2, 6)
    assert right[:, 0].all()
    assert torch.equal(right, logits.argmax(-1) == gold)
    torch.testing.assert_close(likelihood, logits.log_softmax(-1).gather(-1, gold[..., None])[..., 0])


@pytest.mark.parametrize("policy", ["keys", "attention", "streaming", "random"])
def test_a_budget_that_holds_everything_loses_nothing(interpreted, model, policy):
    tokens = prompts()
    group = Group("x", tokens, [(tokens[:, :1], 0)], gold=tokens[:, 1:9])
    arms = Arms(model, [policy], [1024])
    with torch.no_grad():
        tensors = arms.prefilled(group)
        dense = arms.dense(group, tensors)
        advanced = []
        (ours,) = arms.sparse(policy, group, tensors, lambda: advanced.append(1))
    assert len(advanced) == 1
    assert ours["attended_share"] == 1
    assert ours["scores"] == dense["scores"]
    assert ours["log_likelihood"] == pytest.approx(dense["log_likelihood"], abs=2e-4)


def test_a_small_budget_bounds_what_is_read(interpreted, model):
    tokens = prompts(length=1200)
    group = Group("x", tokens, [(tokens[:, :1], 6)], lambda turns: [0.0, 0.0])
    arms = Arms(model, ["keys"], [80, 160])
    with torch.no_grad():
        rows = arms.sparse("keys", group, arms.prefilled(group), lambda: None)
    assert [row["budget"] for row in rows] == [80, 160]
    for row in rows:
        assert row["attended_share"] <= row["budget"] / 1200


def test_token_answers_count_turn_by_turn():
    group = tasks.token_group("niah_multiquery", range(3), 400, "cpu")
    assert group.prompts.shape == (3, 400)
    assert [(given.shape[1], number) for given, number in group.turns] == [(3, 4)] * 4
    parts = [tasks.catalogue.token_samples("niah_multiquery", tasks.Drawing(seed, "cpu"), 1, 400) for seed in range(3)]
    told = [torch.cat([part.turns[i][1] for part in parts]) for i in range(4)]
    assert group.score(told) == [1.0, 1.0, 1.0]
    told[2] = told[2].clone()
    told[2][1, 3] += 1  # one token of one answer
    assert group.score(told) == [1.0, 0.75, 1.0]


def test_fillers_go_behind_the_first_token():
    assert tasks.filled([7, 8, 9], 5, 0) == [7, 0, 0, 8, 9]


def test_an_unknown_policy_is_refused_by_the_configuration():
    with pytest.raises(ValueError, match=r"must be one of .* got 'nearest'"):
        tasks.config_of("nearest", 256)
    assert tasks.config_of("attention", 256).graph == "attention"
    assert tasks.config_of("streaming", 256).policy == "streaming"


def test_cells_join_batches_and_weigh_forced_tokens():
    dense = {"task": "vt", "policy": "dense", "budget": 0}
    ours = {"task": "vt", "policy": "keys", "budget": 128}
    rows = [
        {**dense, "scores": [1.0, 0.5]}, {**ours, "scores": [1.0, 0.0]}, {**dense, "scores": [1.0]},
        {**ours, "scores": [1.0]},
        {"task": "copy", "policy": "dense", "budget": 0, "scores": [0.5], "log_likelihood": [-1.0], "tokens": 40},
    ]  # fmt: skip
    cells = {(cell["task"], cell["policy"]): cell for cell in tasks.cells_of(rows)}
    assert cells["vt", "dense"]["score"] == pytest.approx(2.5 / 3, abs=1e-4)
    assert cells["vt", "keys"]["samples"] == 3
    assert cells["copy", "dense"]["interval"] == [round(end, 4) for end in tasks.quality.wilson(20, 40)]
    assert cells["copy", "dense"]["log_likelihood"] == -1
    claims = tasks.claims_of(list(cells.values()), "m", 2048)
    assert claims == {
        "tasks_m_vt_dense": pytest.approx(2.5 / 3, abs=1e-4),
        "tasks_m_copy_dense": 0.5,
        "tasks_m_vt_keys_1_16": pytest.approx(2 / 3, abs=1e-4),
        "tasks_over_dense_m_keys_1_16": pytest.approx(0.8, abs=1e-3),
        "ruler_over_dense": pytest.approx(0.8, abs=1e-3),
        "tasks_m_compared": 1,
    }


def test_a_small_run_writes_what_it_prints(interpreted, tmp_path, capsys):
    claims = tasks.main(["--small", "--tasks", "qa1", "--policies", "keys", "streaming", "--out", str(tmp_path)])
    (path,) = tmp_path.glob("tasks-untrained-*.json")
    result = json.loads(path.read_text())
    assert result["claims"] == claims
    assert {(cell["policy"], cell["budget"]) for cell in result["cells"]} == {
        ("dense", 0), ("keys", 80), ("keys", 160), ("streaming", 80), ("streaming", 160),
    }  # fmt: skip
    assert result["skipped"] == []
    assert {row["first_seed"] for row in result["rows"]} == {0}
    assert "streaming" in capsys.readouterr().out


def test_ruler_over_dense_is_that_of_its_tasks_by_default():
    def cell(task, policy, budget, score):
        return {"task": task, "policy": policy, "budget": budget, "score": score, "forced_tokens": None}

    cells = [cell(task, "dense", 0, 1.0) for task in ("vt", "passkey", "qa1")]
    cells += [
        cell(task, policy, 128, score)
        for policy, score in (("keys", 0.5), ("attention", 0.1))
        for task in ("vt", "passkey")
    ]
    cells += [cell("vt", "keys", 256, 1.0), cell("qa1", "keys", 128, 0.0)]
    claims = tasks.claims_of(cells, "m", 2048)
    assert claims["ruler_over_dense"] == 0.5
    assert claims["tasks_over_dense_m_keys_1_16"] == pytest.approx(1 / 3, abs=1e-4)
    assert claims["tasks_over_dense_m_keys_1_8"] == 1


def test_runs_of_different_samples_can_be_joined(tmp_path):
    pytest.importorskip("matplotlib")
    common = {"model": "m", "prompt_tokens": 2048, "least": 0.5, "dtype": "float32", "skipped": [], "cells": []}
    common |= dict.fromkeys(("command", "device", "versions", "commit", "date"), "x")

    def written(name, seed, scores, **changes):
        row = {"task": "vt", "first_seed": seed, "scores": scores}
        rows = [{**row, "policy": "dense", "budget": 0}, {**row, "policy": "keys", "budget": 128}]
        path = tmp_path / name
        path.write_text(json.dumps({**common, "rows": rows, **changes}))
        return str(path)

    one, two = written("1.json", 0, [1.0, 1.0]), written("2.json", 2, [0.0])
    claims = tasks.main(["--merge", one, two, "--out", str(tmp_path / "out")])
    assert claims["tasks_m_vt_dense"] == pytest.approx(2 / 3, abs=1e-4)
    (path,) = (tmp_path / "out").glob("*.json")
    assert len(json.loads(path.read_text())["runs"]) == 2
    with pytest.raises(ValueError, match="must be of different samples"):
        tasks.main(["--merge", one, one])
    with pytest.raises(ValueError, match="must share prompt_tokens"):
        tasks.main(["--merge", one, written("3.json", 4, [1.0], prompt_tokens=4096)])


def test_a_task_that_dense_cannot_do_is_listed_and_not_compared(interpreted, monkeypatch, model, tmp_path, capsys):
    monkeypatch.setattr(tasks, "loaded", lambda args: ("untrained", None, model))
    arguments = ["--model", "x", "--tasks", "qa1", "--length", "1280", "--samples", "6", "--probe", "2", "--batch", "2"]
    claims = tasks.main([*arguments, "--policies", "keys", "--out", str(tmp_path)])
    (path,) = tmp_path.glob("tasks-*.json")
    result = json.loads(path.read_text())
    assert result["skipped"] == ["qa1"]
    assert [(cell["policy"], cell["samples"]) for cell in result["cells"]] == [("dense", 2)]
    assert claims == {"tasks_untrained_qa1_dense": 0.0, "tasks_untrained_compared": 0}
    assert "listed and not compared: qa1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "squad"], "--tasks must be of niah_single_1"),
        (["--length", "512"], "--length must be at least 1200"),
        (["--batch", "0"], "--batch must be at least 1, got 0"),
        (["--model", "x", "--tasks", "cwe"], "with --model x, got cwe"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        tasks.arguments(arguments)
    assert message in " ".join(capsys.readouterr().err.split())


def test_the_figure_shows_what_was_compared(tmp_path):
    pytest.importorskip("matplotlib")
    cells = [
        {"task": "vt", "policy": policy, "budget": budget, "score": 0.5, "interval": [0.2, 0.8]}
        for policy, budget in (("dense", 0), ("keys", 128), ("keys", 256))
    ]
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps({"cells": cells}))
    assert tasks.plot(path).stat().st_size > 1000
    path.write_text(json.dumps({"cells": cells[:1]}))
    with pytest.raises(ValueError, match="must hold a task that was compared with dense, got none"):
        tasks.plot(path)
