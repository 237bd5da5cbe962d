"""BABILong's first five tasks (Kuratov et al. 2024): a small story, as bAbI tells them (Weston et al. 2015), in prose.

    qa1  where is a person?          qa2  where is an object?      qa3  where was an object before a place?
    qa4  which place lies where?     qa5  who gave what to whom?

The stories are made here, by a world that knows who is where and who holds what.
"""

from __future__ import annotations

import dataclasses
import random

from bench.task_grammars.sample import Count, Sample, essay, fitted, hidden

PERSONS = ("John", "Mary", "Sandra", "Daniel")
GIVERS = ("Bill", "Fred", "Jeff", "Mary")
PLACES = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
OBJECTS = ("apple", "football", "milk")
MOVES = ("moved to", "went to", "went back to", "journeyed to", "travelled to")
TAKES = ("got", "grabbed", "picked up", "took")
DROPS = ("dropped", "discarded", "left", "put down")
GIVES = ("gave", "handed", "passed")
OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}


@dataclasses.dataclass
class World:
    """Who is where, who holds what, and every place that an object has been at, without repetition in a row."""

    rng: random.Random
    at: dict[str, str] = dataclasses.field(default_factory=dict)
    holder: dict[str, str] = dataclasses.field(default_factory=dict)
    trail: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    facts: list[str] = dataclasses.field(default_factory=list)

    def _seen(self, thing: str, place: str) -> None:
        trail = self.trail.setdefault(thing, [])
        if not trail or trail[-1] != place:
            trail.append(place)

    def move(self, who: str, place: str) -> None:
        self.at[who] = place
        self.facts.append(f"{who} {self.rng.choice(MOVES)} the {place}.")
        for thing, holder in self.holder.items():
            if holder == who:
                self._seen(thing, place)

    def take(self, who: str, thing: str) -> None:
        self.holder[thing] = who
        self._seen(thing, self.at[who])
        self.facts.append(f"{who} {self.rng.choice(TAKES)} the {thing} there.")

    def drop(self, who: str, thing: str) -> None:
        del self.holder[thing]
        self.facts.append(f"{who} {self.rng.choice(DROPS)} the {thing}.")

    def go_on(self) -> None:
        """One more event that can happen."""
        who = self.rng.choice(PERSONS)
        held = [thing for thing, holder in self.holder.items() if holder == who]
        here = [
            thing
            for thing in OBJECTS
            if thing not in self.holder and self.trail.get(thing, [self.at.get(who)])[-1] == self.at.get(who)
        ]
        what = self.rng.random()
        if who in self.at and here and what < 0.3:
            self.take(who, self.rng.choice(here))
        elif held and what < 0.45:
            self.drop(who, self.rng.choice(held))
        else:
            self.move(who, self.rng.choice([place for place in PLACES if place != self.at.get(who)]))


def moves(rng: random.Random) -> tuple[list[str], str, str]:
    world = World(rng)
    for _ in range(rng.randint(4, 8)):
        who = rng.choice(PERSONS)
        world.move(who, rng.choice([place for place in PLACES if place != world.at.get(who)]))
    who = rng.choice(sorted(world.at))
    return world.facts, f"Where is {who}?", world.at[who]


def objects(rng: random.Random, before: bool) -> tuple[list[str], str, str]:
    while True:
        world = World(rng)
        for _ in range(rng.randint(8, 14)):
            world.go_on()
        things = [thing for thing in OBJECTS if len(world.trail.get(thing, ())) >= (3 if before else 2)]
        if not things:
            continue
        thing = rng.choice(things)
        trail = world.trail[thing]
        if not before:
            return world.facts, f"Where is the {thing}?", trail[-1]
        if trail.count(trail[-1]) == 1:  # or "before the kitchen" would mean two moments
            return world.facts, f"Where was the {thing} before the {trail[-1]}?", trail[-2]


def directions(rng: random.Random) -> tuple[list[str], str, str]:
    """Two facts about three places in a row; a question that only one of them answers."""
    first, middle, last = rng.sample(PLACES, 3)
    way = rng.choice(sorted(OPPOSITE))
    facts = [f"The {first} is {way} of the {middle}.", f"The {middle} is {way} of the {last}."]
    rng.shuffle(facts)
    if rng.random() < 0.5:
        return facts, f"What is {way} of the {middle}?", first
    return facts, f"What is the {middle} {way} of?", last


def gifts(rng: random.Random) -> tuple[list[str], str, str]:
    """Persons give each other things and walk about; every object is given once, so that questions have one answer."""
    facts = []
    given: list[tuple[str, str, str]] = []
    for thing in rng.sample(OBJECTS, 2):
        giver, taker = rng.sample(GIVERS, 2)
        if any({giver, taker} == {one, other} for one, other, _ in given):
            continue
        facts.append(f"{giver} {rng.choice(MOVES)} the {rng.choice(PLACES)}.")
        facts.append(f"{giver} {rng.choice(TAKES)} the {thing} there.")
        facts.append(f"{giver} {rng.choice(GIVES)} the {thing} to {taker}.")
        given.append((giver, taker, thing))
    giver, taker, thing = rng.choice(given)
    question, answer = rng.choice(
        [
            (f"Who gave the {thing} to {taker}?", giver),
            (f"What did {giver} give to {taker}?", thing),
            (f"Who did {giver} give the {thing} to?", taker),
            (f"Who gave the {thing}?", giver),
            (f"Who received the {thing}?", taker),
        ]
    )
    return facts, question, answer


# What the answer should look like, with an example that no story here can repeat.
FORMS = {
    "qa1": ("Charlie went to the hallway. Charlie moved to the garage.", "Where is Charlie?", "garage"),
    "qa2": (
        "Charlie went to the garage. Charlie got the bottle there. Charlie moved to the shop.",
        "Where is the bottle?",
        "shop",
    ),
    "qa3": (
        "Charlie went to the shop. Charlie got the bottle there. Charlie moved to the garage. Charlie went to the beach.",
        "Where was the bottle before the beach?",
        "garage",
    ),
    "qa4": ("The shop is north of the garage. The garage is north of the beach.", "What is north of the garage?", "shop"),
    "qa5": (
        "Charlie took the bottle there. Charlie gave the bottle to Judith.",
        "Who gave the bottle to Judith?",
        "Charlie",
    ),
}  # fmt: skip


def story(task: str, rng: random.Random) -> tuple[list[str], str, str]:
    """(facts, question, answer)"""
    if task == "qa1":
        return moves(rng)
    if task in ("qa2", "qa3"):
        return objects(rng, before=task == "qa3")
    return directions(rng) if task == "qa4" else gifts(rng)


def build(task: str, rng: random.Random, amount: int) -> Sample:
    """A story among ``amount`` sentences of a novel."""
    facts, question, answer = story(task, rng)
    example, example_question, example_answer = FORMS[task]
    prompt = (
        "Facts are hidden in the context below. Answer the question by the facts alone, with one word. If things "
        "changed, the newest facts count.\n"
        f"<example>\n{example}\nQuestion: {example_question}\nAnswer: {example_answer}.\n</example>\n"
        f"<context>\n{hidden(rng, facts, essay(rng, amount))}\n</context>\nQuestion: {question}\nAnswer:"
    )
    labels = (*GIVERS, *OBJECTS) if task == "qa5" else PLACES
    return Sample(task, prompt, (answer,), f" {answer}.", "labels", question, labels)


def make(task: str, seed: int, tokens: int, count: Count) -> Sample:
    return fitted(lambda rng, amount: build(task, rng, amount), f"{task} {seed}", tokens, count)


TASKS = ("qa1", "qa2", "qa3", "qa4", "qa5")
