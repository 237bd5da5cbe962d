"""The tasks of lookup in the retrieval model's own tokens: the same facts and questions without a language.

RULER's counting tasks, its documents and most stories have no such form: the retrieval model only looks things up. Of
several values of one key it would have to tell which it has told already, so that form is missing too. A passkey is a
needle whose key never changes.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from bench.task_grammars import vocabulary as V
from bench.task_grammars.training import Drawing, assignments, scattered, with_column


@dataclasses.dataclass(frozen=True)
class Lookup:
    """Tokens of a key and of a value; facts among words (0: as many as there is room for), and questions."""

    key: int
    value: int
    facts: int
    queries: int = 1


LOOKUPS = {
    "niah_single_1": Lookup(2, 4, 1),  # one sentence repeated
    "niah_single_2": Lookup(2, 4, 1),
    "niah_single_3": Lookup(2, 8, 1),
    "niah_multikey_1": Lookup(2, 4, 4),
    "niah_multikey_2": Lookup(2, 4, 0),
    "niah_multikey_3": Lookup(3, 8, 0),
    "niah_multiquery": Lookup(2, 4, 4, queries=4),
    "passkey": Lookup(1, 5, 1),
    "copy": Lookup(2, 64, 4),  # a passage, behind its key
}
HOPS = 4
TASKS = (*LOOKUPS, "vt", "qa1")


@dataclasses.dataclass(frozen=True)
class TokenSamples:
    """``prompts`` [B, L] without a question; ``turns`` are (question [B, Q], answer [B, A]), one after the other."""

    task: str
    prompts: Tensor
    turns: list[tuple[Tensor, Tensor]]


def context_of(draw: Drawing, facts: Tensor, length: int, one_sentence: bool = False) -> Tensor:
    """BOS and facts [B, N, R] among words, [B, length]; ``one_sentence``: of 24 words, again and again."""
    context = scattered(draw, facts, length - 1)
    if one_sentence:
        words = (
            context[:, :24].new_empty(len(context), 24).random_(V.WORDS.start, V.WORDS.stop, generator=draw.generator)
        )
        repeated = words.repeat(1, -(-length // 24))[:, : length - 1]
        noise = (context >= V.WORDS.start) & (context < V.WORDS.stop)
        context = torch.where(noise, repeated, context)
    return torch.cat([context.new_full((len(context), 1), V.BOS), context], 1)


def lookups(task: str, draw: Drawing, rows: int, length: int) -> TokenSamples:
    form = LOOKUPS[task]
    record = form.key + form.value + 2
    number = form.facts or (length - 1) // record
    if number * record > length - 1:
        raise ValueError(f"length must be at least {number * record + 1} for the task {task}, got {length}")
    if task == "passkey":
        keys = torch.full((rows, 1, 1), V.KEYS.start, device=draw.device)
    else:  # the first tokens differ as long as there are enough
        first = V.KEYS.start + draw.orders(rows, max(number, len(V.KEYS)))[:, :number] % len(V.KEYS)
        keys = torch.cat([first[..., None], draw.tokens(V.KEYS, rows, number, form.key - 1)], -1)
    values = draw.tokens(V.VALUES, rows, number, form.value)
    facts = with_column(torch.cat([keys, values], -1), V.NEEDLE, V.END)
    prompts = context_of(draw, facts, length, one_sentence=task == "niah_single_1")
    asked = draw.orders(rows, number)[:, : form.queries]
    row = torch.arange(rows, device=draw.device)
    turns = [(with_column(keys[row, asked[:, i]], V.QUERY), values[row, asked[:, i]]) for i in range(form.queries)]
    return TokenSamples(task, prompts, turns)


def variables(draw: Drawing, rows: int, length: int) -> TokenSamples:
    """One chain of assignments; from its value, all names."""
    names = draw.tokens(V.KEYS, rows, 1, HOPS + 1, 2)
    names[:, :, 0] = draw.tokens(V.VALUES, rows, 1, 2)
    prompts = context_of(draw, assignments(draw, names), length)
    to = names.new_full((rows, HOPS, 1), V.TO)
    walk = torch.cat([names[:, 0, 1:], to], -1).flatten(1)[:, :-1]
    question = torch.cat([names.new_full((rows, 1), V.TRACK), names[:, 0, 0], to[:, 0]], -1)
    return TokenSamples("vt", prompts, [(question, walk)])


def stories(draw: Drawing, rows: int, length: int, persons: int = 4, moves: int = 8) -> TokenSamples:
    """bAbI's first task: where is a person whose moves, and others', are told?"""
    who = torch.cat(
        [torch.arange(persons, device=draw.device).expand(rows, -1), draw.integers(0, persons, rows, moves - persons)],
        1,
    )
    who = who.gather(1, draw.orders(rows, moves))
    names = V.KEYS.start + draw.orders(rows, len(V.KEYS))[:, :persons]
    places = draw.tokens(V.VALUES, rows, moves)
    facts = with_column(torch.stack([names.gather(1, who), places], -1), V.MOVE, V.END)
    prompts = context_of(draw, facts, length)
    asked = draw.integers(0, persons, rows)
    last = ((who == asked[:, None]) * torch.arange(1, moves + 1, device=draw.device)).argmax(-1)
    row = torch.arange(rows, device=draw.device)
    question = torch.stack([torch.full_like(asked, V.WHERE), names[row, asked]], -1)
    return TokenSamples("qa1", prompts, [(question, places[row, last][:, None])])


def make(task: str, draw: Drawing, rows: int, length: int) -> TokenSamples:
    if task in LOOKUPS:
        return lookups(task, draw, rows, length)
    return variables(draw, rows, length) if task == "vt" else stories(draw, rows, length)
