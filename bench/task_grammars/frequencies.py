"""Aggregation (RULER's CWE and FWE): which words are the most frequent?"""

from __future__ import annotations

import math
import random
import string

from bench.task_grammars.sample import Count, Sample, fitted, words

COMMON = 10  # words to find in a list
ALPHA = 2.0  # exponent of the zeta distribution of coded words


def numbered(rng: random.Random, common: list[str], others: list[str], times: int, other_times: int) -> str:
    every = common * times + others * other_times
    rng.shuffle(every)
    return " ".join(f"{i}. {word}" for i, word in enumerate(every, 1))


def different_words(rng: random.Random, number: int) -> list[str]:
    """Words of the novel, and pairs of them where these are not enough."""
    chosen = rng.sample(words(), min(number, len(words())))
    taken = set(chosen)
    while len(chosen) < number:
        pair = "-".join(rng.sample(words(), 2))
        if pair not in taken:
            taken.add(pair)
            chosen.append(pair)
    return chosen


def build_common(rng: random.Random, amount: int, long: bool) -> Sample:
    """Ten words stand 30 times each among ``amount`` words that stand 3 times; 10 times and once in short lists."""
    times, other_times = (30, 3) if long else (10, 1)
    ask = (
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
        "appear most often.\n"
    )
    end = (
        "\nQuestion: What are the 10 most common words in the above list? Answer: The top 10 words that appear most often "
        "in the list are:"
    )
    chosen = different_words(rng, 2 * COMMON + 10 + amount)
    example_common, common = chosen[:COMMON], chosen[COMMON : 2 * COMMON]
    example_others, others = chosen[2 * COMMON : 2 * COMMON + 10], chosen[2 * COMMON + 10 :]
    example = ask + numbered(rng, example_common, example_others, 3, 1) + end
    example += " " + " ".join(f"{i}. {word}" for i, word in enumerate(example_common, 1)) + "\n"
    prompt = example + ask + numbered(rng, common, others, times, other_times) + end
    gold = " " + " ".join(f"{i}. {word}" for i, word in enumerate(common, 1))
    return Sample("cwe", prompt, tuple(common), gold, "all")


def zeta_counts(total: int) -> list[int]:
    """How often the k-th most frequent of ``total`` words stands: total * k^-alpha / zeta(alpha), alpha = 2."""
    zeta = math.pi**2 / 6
    counts: list[int] = []
    while (times := int(total * (len(counts) + 1) ** -ALPHA / zeta)) > 0:
        counts.append(times)
    return counts


def build_coded(rng: random.Random, amount: int) -> Sample:
    """60 and ``amount`` * 20 coded words of six letters; the most frequent "word" is "...", asked are the next three."""
    counts = zeta_counts(60 + 20 * amount)
    coded = ["..."] + ["".join(rng.choices(string.ascii_lowercase, k=6)) for _ in counts[1:]]
    every = [word for word, times in zip(coded, counts, strict=True) for _ in range(times)]
    rng.shuffle(every)
    prompt = (
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
        f"appeared coded words. {' '.join(every)}\nQuestion: Do not provide any explanation. Please ignore the dots "
        "'....'. What are the three most frequently appeared words in the above coded text? Answer: According to the "
        "coded text above, the three most frequently appeared words are:"
    )
    return Sample("fwe", prompt, tuple(coded[1:4]), f" {coded[1]}, {coded[2]}, and {coded[3]}.", "all")


def make(task: str, seed: int, tokens: int, count: Count) -> Sample:
    if task == "fwe":
        return fitted(build_coded, f"{task} {seed}", tokens, count)
    return fitted(lambda rng, amount: build_common(rng, amount, tokens >= 4096), f"{task} {seed}", tokens, count)


TASKS = ("cwe", "fwe")
