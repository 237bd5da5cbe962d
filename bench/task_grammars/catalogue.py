"""All tasks by name, as text and as tokens of the retrieval model."""

from __future__ import annotations

from bench.task_grammars import frequencies, needles, questions, stories, tokens, variables
from bench.task_grammars.sample import Count, Sample
from bench.task_grammars.tokens import TokenSamples
from bench.task_grammars.training import Drawing

FAMILIES = {task: family for family in (needles, variables, frequencies, questions, stories) for task in family.TASKS}
TEXT_TASKS = tuple(FAMILIES)
TOKEN_TASKS = tokens.TASKS
# Tokens that an answer may take: at most this many are generated.
NEW_TOKENS = {
    "niah_single_3": 48, "niah_multikey_3": 48, "niah_multivalue": 72, "niah_multiquery": 72, "vt": 40, "cwe": 96,
    "fwe": 32, "passkey": 12, **dict.fromkeys(stories.TASKS, 8),
}  # fmt: skip
DEFAULT_NEW_TOKENS = 16


def text_sample(task: str, seed: int, length: int, count: Count) -> Sample:
    """A sample whose prompt has at most ``length`` tokens, as ``count`` counts them; equal seeds, equal samples."""
    if task not in FAMILIES:
        raise ValueError(f"task must be one of {', '.join(TEXT_TASKS)}, got {task!r}")
    return FAMILIES[task].make(task, seed, length, count)


def token_samples(task: str, draw: Drawing, rows: int, length: int) -> TokenSamples:
    """``rows`` samples of the retrieval model's tokens, prompts of ``length`` tokens."""
    if task not in TOKEN_TASKS:
        raise ValueError(f"task must be one of {', '.join(TOKEN_TASKS)}, got {task!r}")
    return tokens.make(task, draw, rows, length)
