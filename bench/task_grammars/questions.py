"""Question answering over documents (RULER's QA), from facts that are made up: nothing can be known beforehand.

"qa_1" asks what one document says, "qa_2" what follows from two. The other documents are about others.
"""

from __future__ import annotations

import random

from bench.task_grammars.sample import Count, Sample, fitted

_SYLLABLES = "ba dor el fin gal hu jor ka lin mar nev os pel quin ra sol tam ur vel wen yor zan"
_TRADES = "baker blacksmith carpenter clockmaker cooper falconer glassblower mason miller potter tailor weaver"
SYLLABLES, TRADES = _SYLLABLES.split(), _TRADES.split()


def name(rng: random.Random, taken: set[str]) -> str:
    while True:
        made = "".join(rng.choices(SYLLABLES, k=3)).capitalize()
        if made not in taken:
            taken.add(made)
            return made


def person(rng: random.Random, who: str, town: str, year: int) -> str:
    return f"{who} was born in {town} in {year} and works as a {rng.choice(TRADES)}."


def place(rng: random.Random, town: str, mayor: str) -> str:
    return f"{town} is a town of {rng.randint(2, 90)},000 inhabitants. Its mayor is {mayor}."


def build(task: str, rng: random.Random, amount: int) -> Sample:
    """``amount`` documents that do not matter, half of persons and half of towns."""
    taken: set[str] = set()
    who, town, mayor = (name(rng, taken) for _ in range(3))
    documents = [person(rng, who, town, rng.randint(1900, 1999)), place(rng, town, mayor)]
    for i in range(amount):
        one, other = name(rng, taken), name(rng, taken)
        documents.append(place(rng, one, other) if i % 2 else person(rng, one, other, rng.randint(1900, 1999)))
    rng.shuffle(documents)
    text = "\n\n".join(f"Document {i}:\n{document}" for i, document in enumerate(documents, 1))
    ask = "Answer the question based on the given documents. Only give me the answer and do not output any other words."
    question = (
        f"In which town was {who} born?" if task == "qa_1" else f"Who is the mayor of the town where {who} was born?"
    )
    answer = town if task == "qa_1" else mayor
    prompt = f"{ask}\n\nThe following are given documents.\n\n{text}\n\n{ask}\n\nQuestion: {question} Answer:"
    return Sample(task, prompt, (answer,), f" {answer}", "part", question)


def make(task: str, seed: int, tokens: int, count: Count) -> Sample:
    return fitted(lambda rng, amount: build(task, rng, amount), f"{task} {seed}", tokens, count)


TASKS = ("qa_1", "qa_2")
