"""Batches that teach lookup: facts among words, then many questions, so that most tokens at the end of a row are answers.

Three forms, all of records that follow each other in one row:

    lookup   NEEDLE key value END ... QUERY key value END; keys of 1 to 3 tokens, values of 1 to a whole passage
    chain    ASSIGN source TO name END ... TRACK source TO name TO name ... END, each name the source of the next
    latest   MOVE person place END ... WHERE person place END, the place of the person's last move

Everything is drawn on the device at once: a row is made in far less time than a model needs to read it.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from bench.task_grammars import vocabulary as V

FORMS = ("lookup", "passage", "chain", "latest")


@dataclasses.dataclass
class Batch:
    """``tokens`` [B, L] int64; ``answers`` [B, L] bool marks tokens that the tokens before them determine."""

    tokens: Tensor
    answers: Tensor
    records: Tensor  # [B, L] int64: the question that an answer token belongs to, from 0 in each row; -1 elsewhere
    form: str


class Drawing:
    """Random numbers of one generator on one device."""

    def __init__(self, seed: int, device: str | torch.device) -> None:
        self.device = torch.device(device)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.host = torch.Generator().manual_seed(seed)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """From low to high - 1."""
        return torch.randint(low, high, shape, generator=self.generator, device=self.device)

    def tokens(self, kind: range, *shape: int) -> Tensor:
        return self.integers(kind.start, kind.stop, *shape)

    def orders(self, rows: int, items: int) -> Tensor:
        """A permutation per row, [rows, items]."""
        return torch.rand(rows, items, generator=self.generator, device=self.device).argsort(-1)

    def one(self, low: int, high: int) -> int:
        """A size, from low to high: drawn on the host, so that nothing waits for the device."""
        return int(torch.randint(low, max(low, high) + 1, (), generator=self.host))

    def fraction(self) -> float:
        return float(torch.rand((), generator=self.host))


def haystack(draw: Drawing, rows: int, length: int) -> Tensor:
    """Words, the first ones far more often than the last, [rows, length]; a fifth of the rows repeats one sentence."""
    skewed = torch.rand(rows, length, generator=draw.generator, device=draw.device) ** 3
    words = V.WORDS.start + (skewed * len(V.WORDS)).long()
    sentence = min(length, draw.one(8, 32))
    repeated = words[:, :sentence].repeat(1, -(-length // sentence))[:, :length]
    return torch.where(draw.integers(0, 5, rows, 1) == 0, repeated, words)


def scattered(draw: Drawing, facts: Tensor, length: int) -> Tensor:
    """Facts [B, N, R] in their order among words, [B, length]: one in each of N equal slots, anywhere within it."""
    rows, count, record = facts.shape
    slot = length // count
    if slot < record:
        raise ValueError(f"length must be at least {count * record} for {count} facts of {record} tokens, got {length}")
    words = haystack(draw, rows, length)
    begin = torch.arange(count, device=draw.device) * slot + draw.integers(0, slot - record + 1, rows, count)
    places = begin[..., None] + torch.arange(record, device=draw.device)
    return words.scatter(1, places.flatten(1), facts.flatten(1))


def joined(form: str, context: Tensor, questions: Tensor, given: int, length: int, told: int = 0) -> Batch:
    """BOS, context and questions [B, M, R]; of a question, tokens ``given`` to ``told`` are answers (0: to its end)."""
    rows, count, record = questions.shape
    device = context.device
    tokens = torch.cat([context.new_full((rows, 1), V.BOS), context, questions.flatten(1)], 1)
    assert tokens.shape[1] == length
    place = torch.arange(record, device=device)
    answered = ((place >= given) & (place < (told or record))).repeat(count)
    number = torch.arange(count, device=device).repeat_interleave(record).masked_fill(~answered, -1)
    answers = torch.zeros_like(tokens, dtype=torch.bool)
    records = torch.full_like(tokens, -1)
    answers[:, -count * record :] = answered
    records[:, -count * record :] = number
    return Batch(tokens, answers, records, form)


def with_column(tensor: Tensor, front: int | None = None, back: int | None = None) -> Tensor:
    """Records [..., R] with a token before or behind."""
    column = tensor[..., :1]
    parts = [torch.full_like(column, front)] if front is not None else []
    parts.append(tensor)
    if back is not None:
        parts.append(torch.full_like(column, back))
    return torch.cat(parts, -1)


def lookup(draw: Drawing, rows: int, length: int, form: str = "lookup", ask: float = 0.5) -> Batch:
    """Facts and questions about them; a passage is a fact with a long value.

    ask: the share of a row that may be questions.
    """
    if form == "passage":
        value = draw.one(min(16, length // 8), min(256, length // 4))
        key = draw.one(1, 3)
    else:
        key = draw.one(1, 3)
        value = draw.one(1, 8)
    record = key + value + 2
    questions = max(1, int(length * ask) // record)
    room = length - 1 - questions * record
    most = room // record
    # Few facts among many words, or next to nothing but facts, and all between; never more than keys tell apart.
    facts = max(1, min(int(most ** (1 - 0.7 * draw.fraction() ** 2)), most))
    keys = draw.tokens(V.KEYS, rows, facts, key)
    if key == 1:  # each key once
        facts = min(facts, len(V.KEYS))
        keys = V.KEYS.start + draw.orders(rows, len(V.KEYS))[:, :facts, None]
    values = draw.tokens(V.VALUES, rows, facts, value)
    pairs = torch.cat([keys, values], -1)
    asked = draw.integers(0, facts, rows, questions)
    chosen = pairs.gather(1, asked[..., None].expand(-1, -1, pairs.shape[-1]))
    context = scattered(draw, with_column(pairs, V.NEEDLE, V.END), room)
    return joined(form, context, with_column(chosen, V.QUERY, V.END), 1 + key, length)


def chain(draw: Drawing, rows: int, length: int, ask: float = 0.4) -> Batch:
    """Chains of 2 to 8 names, their statements in random order; a question follows one from its source to its end.

    That there is no next name is not asked: a walk goes on as long as it is asked to.
    """
    hops = draw.one(2, min(8, length // 32))
    question = 1 + 2 + 3 * hops + 1
    questions = max(1, int(length * ask) // question)
    room = length - 1 - questions * question
    most = room // (7 * hops)
    chains = max(1, min(int(most ** (1 - 0.7 * draw.fraction() ** 2)), most))
    names = draw.tokens(V.KEYS, rows, chains, hops + 1, 2)
    names[:, :, 0] = draw.tokens(V.VALUES, rows, chains, 2)
    statements = assignments(draw, names)
    asked = draw.integers(0, chains, rows, questions)[..., None, None]
    chosen = names.gather(1, asked.expand(-1, -1, hops + 1, 2))
    to = torch.full_like(chosen[..., :1], V.TO)
    steps = torch.cat([to, chosen], -1).flatten(2)[..., 1:]
    context = scattered(draw, statements, room)
    questions_of = with_column(steps, V.TRACK, V.END)
    return joined("chain", context, questions_of, 4, length, told=question - 1)


def assignments(draw: Drawing, names: Tensor) -> Tensor:
    """ASSIGN source TO name END for neighbours of chains [B, chains, names, 2], in random order, [B, N, 7]."""
    to = torch.full_like(names[:, :, 1:, :1], V.TO)
    statements = torch.cat([names[:, :, :-1], to, names[:, :, 1:]], -1).flatten(1, 2)
    order = draw.orders(*statements.shape[:2])
    return with_column(statements.gather(1, order[..., None].expand(-1, -1, 5)), V.ASSIGN, V.END)


def latest(draw: Drawing, rows: int, length: int, ask: float = 0.3) -> Batch:
    """Persons who move about; a question asks for the place of a person's last move."""
    record = 4
    persons = draw.one(2, 8)
    questions = max(1, min(persons, int(length * ask) // record))
    room = length - 1 - questions * record
    moves = min(room // record, persons * draw.one(1, 12))
    who = draw.integers(0, persons, rows, moves)
    who[:, :persons] = torch.arange(persons, device=draw.device)[:moves]  # everybody moves at least once
    who = who.gather(1, draw.orders(rows, moves))
    places = draw.tokens(V.VALUES, rows, moves)
    names = V.KEYS.start + draw.orders(rows, len(V.KEYS))[:, :persons]
    facts = torch.stack([names.gather(1, who), places], -1)
    asked = draw.orders(rows, persons)[:, :questions]
    mine = who[:, None] == asked[..., None]  # [B, M, moves]
    last = (mine * torch.arange(1, moves + 1, device=draw.device)).argmax(-1)
    chosen = facts.gather(1, last[..., None].expand(-1, -1, 2))
    context = scattered(draw, with_column(facts, V.MOVE, V.END), room)
    return joined("latest", context, with_column(chosen, V.WHERE, V.END), 2, length)


def batch_of(form: str, draw: Drawing, rows: int, length: int) -> Batch:
    """Rows of one form; ``length`` in tokens."""
    if form not in FORMS:
        raise ValueError(f"form must be one of {', '.join(FORMS)}, got {form!r}")
    if length < 64:
        raise ValueError(f"length must be at least 64 tokens, got {length}")
    if form in ("lookup", "passage"):
        return lookup(draw, rows, length, form)
    return chain(draw, rows, length) if form == "chain" else latest(draw, rows, length)
