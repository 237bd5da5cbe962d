"""The retrieval model: what it begins with, how its training goes on, and what its evaluation counts."""

import json

import pytest
import torch
from rich.console import Console

from bench import retrieval_model
from bench.retrieval_model import Course, Size, Stage, planted_chain, planted_passage
from bench.task_grammars import vocabulary
from bench.task_grammars.training import Drawing, batch_of
from ckv_compile import backend

TINY = Size(hidden=64, layers=2, query_heads=4, kv_heads=2, head_dim=32, theta=1e6)


@pytest.fixture
def interpreted(monkeypatch):
    """Run rewritten graphs node by node: Inductor's compile time is not what is tested."""
    monkeypatch.setattr(backend, "_compile", lambda gm, fakes, patches: gm.forward)
    torch._dynamo.reset()


@pytest.mark.parametrize("length", [1, 2, 7, 64])
def test_training_attention_with_sinks_is_gpt_oss_own(length, tmp_path):
    model = retrieval_model.new_model("gpt_oss", TINY, seed=0)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=3.0)
    tokens = Drawing(1, "cpu").integers(0, vocabulary.SIZE, 2, length)
    with torch.no_grad():
        ours = model(tokens, use_cache=False).logits
    retrieval_model.save(model, tmp_path, torch.float32)
    eager = retrieval_model.load(tmp_path, "cpu", torch.float32)
    assert eager.config._attn_implementation == "eager"
    torch.testing.assert_close(ours, eager(tokens, use_cache=False).logits, rtol=1e-4, atol=1e-4)


def test_training_attention_refuses_a_mask():
    model = retrieval_model.new_model("gpt_oss", TINY, seed=0)
    with pytest.raises(ValueError, match="needs rows without padding, got an attention mask"):
        model(torch.ones(1, 4, dtype=torch.long), attention_mask=torch.ones(1, 1, 4, 4))


def test_heads_of_a_new_model_read_the_tokens_before():
    model = retrieval_model.new_model("llama", TINY, seed=0)
    model.set_attn_implementation("eager")
    tokens = Drawing(1, "cpu").integers(0, vocabulary.SIZE, 1, 200)
    with torch.no_grad():
        weights = model(tokens, use_cache=False, output_attentions=True).attentions[0][0]  # [H, N, N]
    position = torch.arange(10, 200)
    for head, offset in enumerate([1, 2, 1, 2]):
        read = (weights[head, 10:].argmax(-1) == position - offset).float().mean()
        assert read > 0.95, f"head {head} reads {offset} back in {read:.0%} of the positions"


@pytest.mark.slow
def test_lookup_emerges_within_some_hundred_steps():
    args = retrieval_model.arguments(["--device", "cpu"])
    stages = (Stage(64, 2048, 1.0, ("lookup",), 2.0),)
    trainer = retrieval_model.Trainer(args, TINY, stages, Console(quiet=True))
    losses, accuracies = zip(*(trainer.step("lookup", 64, 32, min(1.0, step / 50)) for step in range(250)), strict=True)
    assert torch.stack(accuracies[:10]).mean() < 0.02
    assert torch.stack(accuracies[-20:]).mean() > 0.3
    assert torch.stack(losses[-20:]).mean() < torch.stack(losses[:10]).mean() - 2


def test_a_stage_ends_when_it_is_learned_or_its_time_is_over():
    stages = tuple(Stage(length, 1, 0.5, ("lookup", "chain"), 0.9) for length in (64, 128))
    course = Course(stages, window=2)
    for form in ("lookup", "chain"):
        course.learned(form, 64, 0.95)
    assert not course.advance(0.1), "a window is not full"
    course.learned("lookup", 64, 0.95)
    course.learned("chain", 64, 0.8)
    assert not course.advance(0.1), "one form is below the target"
    course.learned("chain", 32, 1.0)
    assert course.accuracies()["chain"] == pytest.approx(0.875), "other lengths do not count"
    course.learned("chain", 64, 1.0)
    course.learned("chain", 64, 1.0)
    assert course.advance(0.1)
    assert course.stage.length == 128
    assert not course.advance(1.0), "the last stage has no next"
    slow = Course(stages)
    assert not slow.advance(0.49)
    assert slow.advance(0.5)


def test_learning_rates_warm_up_and_fall():
    factors = [retrieval_model.rate_factor(step, step / 1000, warm_up=50) for step in range(1001)]
    assert factors[0] == pytest.approx(1 / 50)
    assert max(factors) == factors[49] > 0.98
    assert factors[49:] == sorted(factors[49:], reverse=True)
    assert factors[-1] == pytest.approx(0.02)


def test_every_matrix_of_a_layer_goes_to_muon():
    model = retrieval_model.new_model("llama", TINY, seed=0)
    adam, muon = retrieval_model.optimizers_of(model, 1e-3, 1e-2)
    counts = [sum(len(group["params"]) for group in optimizer.param_groups) for optimizer in (adam, muon)]
    assert counts == [len(list(model.parameters())) - 7 * TINY.layers, 7 * TINY.layers]


@pytest.mark.parametrize("tokens", [8, 200])
def test_a_planted_passage_stands_behind_its_key(tokens):
    prompt = planted_passage(Drawing(3, "cpu"), 4096, tokens)
    assert len(prompt.tokens) == 4096
    row, key, answer = prompt.tokens.tolist(), prompt.tokens[-2:].tolist(), prompt.answer.tolist()
    assert len(answer) == tokens
    places = [i for i in range(4000) if row[i : i + 3] == [vocabulary.NEEDLE, *key]]
    assert [row[i + 3 : i + 3 + tokens] for i in places] == [answer]


@pytest.mark.parametrize("tokens", [8, 200])
def test_a_planted_chain_is_walked_by_its_statements(tokens):
    prompt = planted_chain(Drawing(3, "cpu"), 4096, tokens)
    row, answer = prompt.tokens.tolist(), prompt.answer.tolist()
    assert len(row) == 4096
    assert len(answer) == tokens
    follows = {
        tuple(row[i + 1 : i + 3]): row[i + 4 : i + 6] for i, token in enumerate(row[:-4]) if token == vocabulary.ASSIGN
    }
    walk, name = [], tuple(row[-3:-1])
    while len(walk) < tokens:
        name = tuple(follows[name])
        walk += [*name, vocabulary.TO]
    assert walk[:tokens] == answer


def test_accuracy_counts_whole_answers():
    """A model that is right about all but one kind of token."""

    class Oracle(torch.nn.Module):
        def __init__(self, batch):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))
            self.batch = batch
            self.lm_head = torch.nn.Identity()

        def model(self, tokens, use_cache):
            following = tokens.roll(-1, 1)
            following[following == self.batch] = vocabulary.PAD
            return type("Output", (), {"last_hidden_state": torch.nn.functional.one_hot(following, vocabulary.SIZE)})

    seed = retrieval_model.EVALUATION_SEED + 128
    batch = batch_of("lookup", Drawing(seed, "cpu"), 2, 128)
    perfect = retrieval_model.dense_accuracy(Oracle(-1), 128, "lookup", 1, 2)
    assert perfect["accuracy"] == perfect["token_accuracy"] == 1
    first = int(batch.answers.nonzero()[0, 1])
    missed = int(batch.tokens[0, first])
    found = retrieval_model.dense_accuracy(Oracle(missed), 128, "lookup", 1, 2)
    wrong = {
        (row, int(batch.records[row, i]))
        for row, i in batch.answers.nonzero().tolist()
        if int(batch.tokens[row, i]) == missed
    }
    assert wrong
    assert found["questions"] - found["exact"] == len(wrong)


@pytest.mark.parametrize("graph", ["keys", "attention"])
def test_generations_within_the_budget_equal_dense(interpreted, graph, tmp_path):
    retrieval_model.save(retrieval_model.new_model("llama", TINY, seed=0), tmp_path, torch.float16)
    model = retrieval_model.load(tmp_path, "cpu", torch.float32)
    prompts = [planted_passage(Drawing(3, "cpu"), 300, 12), planted_chain(Drawing(3, "cpu"), 300, 12)]
    dense = [retrieval_model.generated(model, prompt.tokens, 12) for prompt in prompts]
    options = {"graph": graph, "min_context": 0, "deterministic": True}
    module = torch.compile(model, backend="communitykv", options=options)
    rows = retrieval_model.compare(module, prompts, options, dense, lambda: None)
    for row, expected, prompt in zip(rows, dense, prompts, strict=True):
        assert row["equal"] == row["equal_before_first_difference"] == row["tokens"] == 12
        assert row["correct"] == row["dense_correct"] == int((expected == prompt.answer).sum())
        assert row["sparse_steps"] == row["decode_steps"] == 11


@pytest.mark.slow
def test_a_training_leaves_weights_and_a_loss_curve(monkeypatch, tmp_path, interpreted):
    stages = (Stage(64, 512, 0.5, ("lookup",), 2.0), Stage(128, 512, 0.5, ("lookup", "chain"), 2.0))
    monkeypatch.setitem(retrieval_model.SIZES, "small", TINY)
    monkeypatch.setitem(retrieval_model.STAGES, "small", stages)
    retrieval_model.main(["--small", "--seconds", "4", "--device", "cpu", "--out", str(tmp_path)])
    (path,) = tmp_path.glob("retrieval_model-train-llama-small-*.json")
    result = json.loads(path.read_text())
    assert result["stopped"] is None
    curve = result["loss_curve"]
    assert [row["step"] for row in curve] == list(range(len(curve)))
    assert {row["length"] for row in result["rows"]} == {64, 128}
    assert result["weights_bytes"] < 16e6
    for row in result["rows"]:
        assert result["claims"][f"retrieval_llama_accuracy_{row['form']}_{row['length']}"] == row["accuracy"]
    arguments = ["--evaluate", str(tmp_path / "llama"), "--lengths", "700", "--tokens", "6", "--samples", "1"]
    retrieval_model.main([*arguments, "--graphs", "keys", "--device", "cpu", "--out", str(tmp_path)])
    (path,) = tmp_path.glob("retrieval_model-evaluate-llama-*.json")
    result = json.loads(path.read_text())
    assert result["errors"] == []
    assert [row["kind"] for row in result["rows"]] == ["passage", "chain"]
    for row in result["rows"]:
        assert row["budget"] == 87
        assert row["sparse_steps"] == 5
        assert result["claims"][f"retrieval_llama_keys_{row['kind']}_700_b87_tokens_equal_least"] == row["equal"]


def test_an_error_after_some_steps_keeps_the_weights(monkeypatch):
    args = retrieval_model.arguments(["--device", "cpu", "--seconds", "60"])
    trainer = retrieval_model.Trainer(args, TINY, (Stage(64, 128, 1.0, ("lookup",), 2.0),), Console(quiet=True))
    step = trainer.step

    def failing(*arguments):
        if trainer.tokens >= 12 * 128:
            raise RuntimeError("out of memory")
        return step(*arguments)

    monkeypatch.setattr(trainer, "step", failing)
    trainer.run()
    assert trainer.stopped == "RuntimeError: out of memory"
    assert len(trainer.curve) == 10
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())


def test_unknown_families_are_named():
    with pytest.raises(ValueError, match="family must be one of llama, gpt_oss, got 'bert'"):
        retrieval_model.configuration("bert", TINY)


@pytest.mark.slow
def test_a_compiled_inner_model_is_called_in_the_place_of_its_own():
    model = retrieval_model.new_model("llama", TINY, seed=0)
    batch = batch_of("lookup", Drawing(0, "cpu"), 2, 64)
    graphs = []
    inner = torch.compile(model.model, backend=lambda gm, inputs: graphs.append(gm) or gm.forward, dynamic=True)
    with torch.no_grad():
        logits, target = retrieval_model.answers_of(model, batch, inner)
        expected, same = retrieval_model.answers_of(model, batch)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(target, same)
    assert graphs, "the compiled module was not called"
