"""The generated tasks: answers are in the prompt, equal seeds give equal samples, and metrics tell right from wrong."""

import dataclasses
import itertools
import random
import re

import pytest
import torch

from bench.task_grammars import catalogue, frequencies, needles, stories, tokens, training, vocabulary
from bench.task_grammars.sample import Sample, only_label, score, string_match_all, string_match_part
from bench.task_grammars.training import Drawing, batch_of

LENGTH = 900


def count(text):
    """Words and marks: a tokenizer that needs no package."""
    return len(re.findall(r"\w+|[^\w\s]", text))


def sample_of(task, seed=0, length=LENGTH):
    return catalogue.text_sample(task, seed, length, count)


def test_the_catalogue_has_the_tasks_of_the_benchmarks():
    niah = [task for task in catalogue.TEXT_TASKS if task.startswith("niah")]
    assert len(niah) == 8
    others = {"passkey", "vt", "cwe", "fwe", "qa_1", "qa_2", "qa1", "qa2", "qa3", "qa4", "qa5"}
    assert set(catalogue.TEXT_TASKS) == {*niah, *others}
    assert set(catalogue.TOKEN_TASKS) - {"copy"} < set(catalogue.TEXT_TASKS)


@pytest.mark.parametrize("task", catalogue.TEXT_TASKS)
@pytest.mark.parametrize("length", [700, 2000])
def test_a_prompt_fills_its_length_and_holds_its_answers(task, length):
    sample = sample_of(task, length=length)
    assert 0.9 * length <= count(sample.prompt) <= length
    for answer in sample.answers:
        assert answer in sample.prompt


@pytest.mark.parametrize("task", catalogue.TEXT_TASKS)
def test_samples_depend_on_the_seed_only(task):
    assert sample_of(task, 3) == sample_of(task, 3)
    assert sample_of(task, 3) != sample_of(task, 4)


@pytest.mark.parametrize("task", catalogue.TEXT_TASKS)
def test_the_right_continuation_scores_one_and_another_samples_less(task):
    sample = sample_of(task)
    assert score(sample, sample.gold) == 1
    assert score(sample, "") == 0
    others = [score(sample, sample_of(task, seed).gold) for seed in range(1, 12)]
    assert min(others) < 1


def test_too_short_a_length_is_refused():
    with pytest.raises(ValueError, match=r"tokens must be at least \d+ for the task vt, got 20"):
        sample_of("vt", length=20)
    with pytest.raises(ValueError, match=r"task must be one of niah_single_1, .* got 'niah'"):
        sample_of("niah")


def test_string_match_all_is_the_share_of_answers():
    assert string_match_all("It is 12 and 34.", ("12", "34")) == 1
    assert string_match_all("it is 12", ("12", "34")) == 0.5
    assert string_match_all("ABCDE", ("abcde",)) == 1
    assert string_match_part("it is 12", ("12", "34")) == 1
    assert string_match_part("it is 5", ("12", "34")) == 0


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [
        ("The kitchen.", 1), ("kitchen", 1), ("The kitchen or the garden.", 0), ("garden", 0), ("", 0),
        ("the kitchen. Then the garden", 1), ("not the office but the kitchen.", 1),
    ],
)  # fmt: skip
def test_only_label_takes_one_label_of_the_first_sentence_without_those_of_the_question(prediction, expected):
    assert only_label(prediction, "kitchen", "Where is it after the office?", stories.PLACES) == expected


def test_a_metric_must_have_a_name():
    with pytest.raises(ValueError, match=r"sample\.metric must be 'all', 'part' or 'labels', got 'bleu'"):
        score(Sample("x", "", ("a",), "a", "bleu"), "a")


def test_needles_tell_the_values_that_are_asked_for():
    sample = sample_of("niah_multivalue")
    key = re.search(r"numbers for ([a-z]+-[a-z]+) mentioned", sample.prompt).group(1)
    found = re.findall(rf"numbers? for {key} is: (\d{{7}})\.", sample.prompt)
    assert set(found) == set(sample.answers)
    assert len(sample.answers) == 4
    sample = sample_of("niah_multiquery")
    for key, answer in zip(
        re.findall(r"[a-z]+-[a-z]+", sample.prompt.split("What are all")[1])[:4], sample.answers, strict=True
    ):
        assert needles.needle("number", key, answer) in sample.prompt


def test_every_name_of_a_chain_follows_from_the_value():
    sample = sample_of("vt")
    value = re.search(r"assigned the value (\d+) in", sample.prompt.split("\n\n")[-1]).group(1)
    source = dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", sample.prompt.split("\n\n")[-1]))
    for name in sample.answers:
        hops = 0
        while name != value:
            name, hops = source[name], hops + 1
        assert hops <= 5


def test_the_answers_are_the_most_frequent_words():
    sample = sample_of("cwe", length=2000)
    words = re.findall(r"\d+\. ([a-z-]+)", sample.prompt.split("Memorize the ones that appear most often.\n")[2])
    ranked = sorted(set(words), key=words.count, reverse=True)
    assert set(ranked[:10]) == set(sample.answers)
    assert words.count(ranked[9]) > words.count(ranked[10])
    sample = sample_of("fwe", length=2000)
    coded = sample.prompt.split("coded words. ")[1].split("\nQuestion")[0].split()
    ranked = sorted(set(coded), key=coded.count, reverse=True)
    assert ranked[0] == "..."
    assert tuple(ranked[1:4]) == sample.answers


def test_zeta_counts_follow_the_distribution():
    counts = frequencies.zeta_counts(10_000)
    assert counts[0] == int(10_000 * 6 / 3.141592653589793**2)
    assert counts[1] == pytest.approx(counts[0] / 4, abs=1)
    assert sum(counts) <= 10_000


def told(facts):
    """(place of each person, places of each object) as the sentences tell them, without the world that made them."""
    at, holds, trail = {}, {}, {}
    for fact in facts:
        who, *_, last = fact.rstrip(".").split()
        if any(f" {verb} the " in fact for verb in stories.MOVES) and last in stories.PLACES:
            at[who] = last
            for thing, holder in holds.items():
                if holder == who and trail[thing][-1] != last:
                    trail[thing].append(last)
        elif fact.endswith("there."):
            thing = fact.split(" the ")[1].split()[0]
            holds[thing] = who
            if not trail.get(thing) or trail[thing][-1] != at[who]:
                trail.setdefault(thing, []).append(at[who])
        else:
            del holds[last]
    return at, trail


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("task", ["qa1", "qa2", "qa3"])
def test_answers_of_stories_are_what_the_sentences_tell(task, seed):
    facts, question, answer = stories.story(task, random.Random(seed))
    at, trail = told(facts)
    subject = question.split()[2].rstrip("?") if task == "qa1" else question.split(" the ")[1].split()[0].rstrip("?")
    if task == "qa1":
        assert at[subject] == answer
    elif task == "qa2":
        assert trail[subject][-1] == answer
    else:
        place = question.split()[-1].rstrip("?")
        assert trail[subject].count(place) == 1
        assert trail[subject][trail[subject].index(place) - 1] == answer


@pytest.mark.parametrize("seed", range(12))
def test_answers_about_directions_and_gifts_follow_from_one_sentence(seed):
    facts, question, answer = stories.story("qa4", random.Random(seed))
    if match := re.fullmatch(r"What is (\w+) of the (\w+)\?", question):
        assert f"The {answer} is {match[1]} of the {match[2]}." in facts
    else:
        place, way = re.fullmatch(r"What is the (\w+) (\w+) of\?", question).groups()
        assert f"The {place} is {way} of the {answer}." in facts
    facts, question, answer = stories.story("qa5", random.Random(seed))
    subjects = {*stories.GIVERS, *stories.OBJECTS} & set(re.findall(r"\w+", question))
    gifts = [re.fullmatch(r"(\w+) (?:gave|handed|passed) the (\w+) to (\w+)\.", fact) for fact in facts]
    (gift,) = [gift.groups() for gift in gifts if gift and {*subjects, answer} <= set(gift.groups())]
    assert answer == gift[{"What did": 1, "Who gave": 0}.get(question[:8], 2)]


# ---------------------------------------------------------------------- tokens of the retrieval model


@pytest.mark.parametrize("task", catalogue.TOKEN_TASKS)
def test_token_prompts_hold_every_answer_behind_its_question(task):
    samples = catalogue.token_samples(task, Drawing(5, "cpu"), 3, 600)
    assert samples.prompts.shape == (3, 600)
    for question, answer in samples.turns:
        for row in range(3):
            prompt, asked, told_tokens = samples.prompts[row].tolist(), question[row].tolist(), answer[row].tolist()
            if task == "vt":
                pairs = [asked[1:3], *(told_tokens[i : i + 2] for i in range(0, len(told_tokens), 3))]
                wanted = [[*one, vocabulary.TO, *two] for one, two in itertools.pairwise(pairs)]
            else:
                wanted = [asked[1:] + told_tokens]
            for piece in wanted:
                assert any(prompt[i : i + len(piece)] == piece for i in range(600)), piece


def test_the_newest_move_counts():
    samples = catalogue.token_samples("qa1", Drawing(5, "cpu"), 16, 200)
    ((question, answer),) = samples.turns
    for row in range(16):
        prompt = samples.prompts[row].tolist()
        last = max(
            i for i, token in enumerate(prompt[:-1]) if token == vocabulary.MOVE and prompt[i + 1] == question[row, 1]
        )
        assert prompt[last + 2] == answer[row, 0]


def test_token_samples_depend_on_the_seed_only():
    first, again, other = (catalogue.token_samples("vt", Drawing(seed, "cpu"), 2, 200).prompts for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("length", [64, 128, 515, 2048])
@pytest.mark.parametrize("form", training.FORMS)
def test_answers_of_training_rows_stand_in_their_context(form, length):
    """Every answer is found by looking for what stands before it: the last such place has it behind."""
    draw = Drawing(7, "cpu")
    for _ in range(4):
        batch = batch_of(form, draw, 2, length)
        assert batch.tokens.shape == batch.answers.shape == (2, length)
        assert batch.answers.any(1).all()
        assert (batch.answers == (batch.records >= 0)).all()
        for row, answers in zip(batch.tokens.tolist(), batch.answers.tolist(), strict=True):
            begin = next(i for i in range(length) if answers[i])
            for i in range(begin, length):
                if not answers[i] or row[i] < vocabulary.WORDS.start:
                    continue
                prefix = row[i - 1] if form in ("latest", "passage") else None
                places = [j for j in range(1, begin) if row[j] == row[i] and (prefix is None or row[j - 1] == prefix)]
                assert places, (form, length, i)
            if form == "latest":
                for i in range(begin, length):
                    if answers[i] and row[i] >= vocabulary.WORDS.start:
                        assert (
                            row[
                                max(
                                    j
                                    for j in range(2, begin)
                                    if row[j - 2] == vocabulary.MOVE and row[j - 1] == row[i - 1]
                                )
                            ]
                            == row[i]
                        )


def test_drawings_refuse_what_has_no_room():
    with pytest.raises(ValueError, match="length must be at least 64 tokens, got 10"):
        batch_of("lookup", Drawing(0, "cpu"), 1, 10)
    with pytest.raises(ValueError, match=r"form must be one of .* got 'copy'"):
        batch_of("copy", Drawing(0, "cpu"), 1, 64)
    with pytest.raises(ValueError, match="length must be at least 273 for the task copy, got 100"):
        catalogue.token_samples("copy", Drawing(0, "cpu"), 1, 100)
    assert dataclasses.asdict(tokens.LOOKUPS["copy"]) == {"key": 2, "value": 64, "facts": 4, "queries": 1}
