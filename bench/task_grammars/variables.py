"""Variable tracking (RULER's VT): one chain of four assignments hidden in noise; which names hold its value?"""

from __future__ import annotations

import random
import string

from bench.task_grammars.sample import NOISE, Count, Sample, fitted, hidden

HOPS = 4


def chain(rng: random.Random, hops: int) -> tuple[str, list[str], list[str]]:
    """(value, names, statements) of a chain: the first name has the value, each other one the name before it."""
    names: list[str] = []
    while len(names) <= hops:
        name = "".join(rng.choices(string.ascii_uppercase, k=5))
        if name not in names:
            names.append(name)
    value = str(rng.randint(10_000, 99_999))
    sources = [value, *(f"VAR {name}" for name in names[:-1])]
    return value, names, [f"VAR {name} = {source}." for name, source in zip(names, sources, strict=True)]


def question(value: str, number: int) -> str:
    return (
        f"Question: Find all variables that are assigned the value {value} in the text above. Answer: According to the "
        f"chain(s) of variable assignment in the text above, {number} variables are assigned the value {value}, they are:"
    )


def build(rng: random.Random, amount: int) -> Sample:
    """One solved example, as in RULER, and ``amount`` sentences of noise."""
    ask = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    value, names, facts = chain(rng, HOPS)
    example = f"{ask}{hidden(rng, facts, list(NOISE))}\n{question(value, len(names))} {' '.join(names)}\n\n"
    value, names, facts = chain(rng, HOPS)
    text = hidden(rng, facts, [NOISE[i % len(NOISE)] for i in range(amount)])
    prompt = f"{example}{ask}{text}\n{question(value, len(names))}"
    return Sample("vt", prompt, tuple(names), " " + " ".join(names), "all")


def make(task: str, seed: int, tokens: int, count: Count) -> Sample:
    return fitted(build, f"{task} {seed}", tokens, count)


TASKS = ("vt",)
