"""Needles in a haystack: the eight forms of RULER (Hsieh et al. 2024, table 2 and appendix B) and the passkey task.

A needle tells a value of a key; the haystack is repeated noise, prose, or nothing but other needles.
"""

from __future__ import annotations

import dataclasses
import random
import uuid

from bench.task_grammars.sample import NOISE, Count, Sample, essay, fitted, hidden

_ADJECTIVES = (
    "amber bitter brisk calm clever curly dusty eager early faint fierce gentle glossy golden hasty hollow humble icy "
    "jolly keen lively lofty mellow misty noble odd pale polite proud quick quiet rapid rusty shiny silent sleepy slim "
    "smooth steep stormy sturdy sunny swift tidy timid tiny vivid warm wild young"
)
_NOUNS = (
    "anchor badge basket beacon bell blanket bottle bridge bucket button cabin candle canyon carpet castle chimney clock "
    "cottage cradle desert drum engine feather fiddle forest fountain garden glacier hammer harbor helmet island kettle "
    "ladder lantern magnet mirror needle orchard paddle pillow pocket rocket saddle shelter spoon teapot tunnel violin "
    "wagon"
)
ADJECTIVES, NOUNS = _ADJECTIVES.split(), _NOUNS.split()


@dataclasses.dataclass(frozen=True)
class Form:
    haystack: str  # noise, essay or needles
    key: str  # word or uuid
    value: str  # number or uuid
    keys: int = 1  # that have a needle, in "needles" besides the haystack
    values: int = 1  # of the key that is asked for
    queries: int = 1


FORMS = {
    "niah_single_1": Form("noise", "word", "number"),
    "niah_single_2": Form("essay", "word", "number"),
    "niah_single_3": Form("essay", "word", "uuid"),
    "niah_multikey_1": Form("essay", "word", "number", keys=4),
    "niah_multikey_2": Form("needles", "word", "number"),
    "niah_multikey_3": Form("needles", "uuid", "uuid"),
    "niah_multivalue": Form("essay", "word", "number", values=4),
    "niah_multiquery": Form("essay", "word", "number", keys=4, queries=4),
}


def drawn(rng: random.Random, kind: str) -> str:
    """A key of two words, a number of seven digits, or a UUID."""
    if kind == "word":
        return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"
    if kind == "number":
        return str(rng.randint(1_000_000, 9_999_999))
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def needle(kind: str, key: str, value: str) -> str:
    return f"One of the special magic {kind}s for {key} is: {value}."


def listed(items: list[str]) -> str:
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + f", and {items[-1]}"


def build(task: str, rng: random.Random, amount: int) -> Sample:
    """``amount`` sentences of haystack, or needles that nobody asks for."""
    form = FORMS[task]
    keys: list[str] = []
    while len(keys) < form.keys:
        key = drawn(rng, form.key)
        if key not in keys:
            keys.append(key)
    asked = keys[: form.queries]
    values = {key: [drawn(rng, form.value) for _ in range(form.values if key in asked else 1)] for key in keys}
    facts = [needle(form.value, key, value) for key in keys for value in values[key]]
    rng.shuffle(facts)
    if form.haystack == "noise":
        haystack = [NOISE[i % len(NOISE)] for i in range(amount)]
    elif form.haystack == "essay":
        haystack = essay(rng, amount)
    else:
        others = (drawn(rng, form.key) for _ in range(2 * amount))
        unasked = [key for key in others if key not in keys][:amount]
        haystack = [needle(form.value, key, drawn(rng, form.value)) for key in unasked]
    several = form.values * form.queries > 1
    about = f"special magic {form.value}{'s' * several} for {listed(asked)} mentioned in the provided text"
    prompt = (
        f"Some special magic {form.value}s are hidden within the following text. Make sure to memorize it. "
        f"I will quiz you about the {form.value}s afterwards.\n{hidden(rng, facts, haystack)}\n"
        f"What {'are all the' if several else 'is the'} {about}? The {about} {'are' if several else 'is'}"
    )
    answers = tuple(value for key in asked for value in values[key])
    return Sample(task, prompt, answers, f" {listed(list(answers))}.", "all")


def build_passkey(rng: random.Random, amount: int) -> Sample:
    """Mohtashami and Jaggi 2023, appendix A: five digits between repeated sentences."""
    key = str(rng.randint(10_000, 99_999))
    fact = f"The pass key is {key}. Remember it. {key} is the pass key."
    prompt = (
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. I will quiz you "
        f"about the important information there.\n{hidden(rng, [fact], [NOISE[i % 5] for i in range(amount)])}\n"
        "What is the pass key? The pass key is"
    )
    return Sample("passkey", prompt, (key,), f" {key}.", "all")


def make(task: str, seed: int, tokens: int, count: Count) -> Sample:
    build_one = build_passkey if task == "passkey" else lambda rng, amount: build(task, rng, amount)
    return fitted(build_one, f"{task} {seed}", tokens, count)


TASKS = (*FORMS, "passkey")
