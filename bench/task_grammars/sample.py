"""What every family of tasks makes: a prompt as text, its answers, and how a prediction is scored."""

from __future__ import annotations

import dataclasses
import functools
import random
import re
from collections.abc import Callable
from pathlib import Path

Count = Callable[[str], int]  # tokens of a text


@dataclasses.dataclass(frozen=True)
class Sample:
    """``prompt`` ends where the answer begins; ``gold`` is a continuation that is right in every respect.

    metric: "all", "part" or "labels", see ``score``. ``labels`` and ``question`` are needed by "labels" only.
    """

    task: str
    prompt: str
    answers: tuple[str, ...]
    gold: str
    metric: str
    question: str = ""
    labels: tuple[str, ...] = ()


def string_match_all(prediction: str, answers: tuple[str, ...]) -> float:
    """RULER's metric for all but question answering: the share of the answers that the prediction contains."""
    return sum(answer.lower() in prediction.lower() for answer in answers) / len(answers)


def string_match_part(prediction: str, answers: tuple[str, ...]) -> float:
    """RULER's metric for question answering: 1 if the prediction contains any of the answers."""
    return float(any(answer.lower() in prediction.lower() for answer in answers))


def only_label(prediction: str, answer: str, question: str, labels: tuple[str, ...]) -> float:
    """BABILong's metric: of the labels that the question does not name, the first sentence holds the answer alone."""
    sentence = prediction.lower().split(".")[0].split("<context>")[0].split("<example>")[0]
    named = {label.lower() for label in labels if label.lower() in sentence}
    named -= {label.lower() for label in labels if label.lower() in question.lower()}
    return float(named == {answer.lower()})


def score(sample: Sample, prediction: str) -> float:
    """0 to 1, by the metric of the benchmark that the task comes from."""
    if sample.metric == "all":
        return string_match_all(prediction, sample.answers)
    if sample.metric == "part":
        return string_match_part(prediction, sample.answers)
    if sample.metric == "labels":
        return only_label(prediction, sample.answers[0], sample.question, sample.labels)
    raise ValueError(f"sample.metric must be 'all', 'part' or 'labels', got {sample.metric!r}")


def fitted(build: Callable[[random.Random, int], Sample], seed: str, tokens: int, count: Count) -> Sample:
    """The sample with the largest filling whose prompt has at most ``tokens`` tokens.

    build: makes a sample from a generator and an amount of filling, in units of its own; equal seeds, equal draws.
    """

    def made(amount: int) -> tuple[Sample, int]:
        sample = build(random.Random(seed), amount)
        return sample, count(sample.prompt)

    least, length = made(1)
    if length > tokens:
        raise ValueError(f"tokens must be at least {length} for the task {least.task}, got {tokens}")
    low, high = 1, 2
    while made(high)[1] <= tokens:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if made(middle)[1] <= tokens:
            low = middle
        else:
            high = middle
    return made(low)[0]


@functools.cache
def novel() -> str:
    return (Path(__file__).parents[1] / "texts" / "northanger_abbey.txt").read_text(encoding="utf-8")


@functools.cache
def sentences() -> tuple[str, ...]:
    """The sentences of a novel, each on one line."""
    text = " ".join(novel().split())
    return tuple(part for part in re.split(r"(?<=[.!?;]) ", text) if 20 <= len(part) <= 300)


@functools.cache
def words() -> tuple[str, ...]:
    """Words of 5 to 9 letters, each once."""
    return tuple(sorted(set(re.findall(r"\b[a-z]{5,9}\b", novel()))))


NOISE = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")


def essay(rng: random.Random, amount: int) -> list[str]:
    """``amount`` consecutive sentences of the novel from a random one on, around its end."""
    begin = rng.randrange(len(sentences()))
    return [sentences()[(begin + i) % len(sentences())] for i in range(amount)]


def hidden(rng: random.Random, facts: list[str], haystack: list[str]) -> str:
    """Facts in their order at random places among the sentences of a haystack."""
    places = sorted(rng.randint(0, len(haystack)) for _ in facts)
    parts: list[str] = []
    done = 0
    for place, fact in zip(places, facts, strict=True):
        parts += [*haystack[done:place], fact]
        done = place
    return " ".join([*parts, *haystack[done:]])
