"""Small blocks of generated tokens are partitioned together as they add up, and once they fill a block."""

import time

import numpy as np
import pytest
import torch

from ckv_compile.config import CommunityConfig
from ckv_compile.runtime import jobs, turns, work
from ckv_compile.runtime.turns import joinable
from ckv_compile.testing import (
    assert_consistent_index,
    assert_whole_communities,
    bare_sequence,
    extend_sequence,
    retrieve_step,
)


def keys_config(**options):
    base = {"min_context": 0, "workers": 0, "block_size": 64, "append_block": 16, "num_sink_tokens": 3}
    return CommunityConfig(**{**base, **options})


def prefilled(config, tokens, capacity=400, **sizes):
    sequence = bare_sequence(config, capacity, **sizes)
    for layer in range(sequence.geometry.num_layers):
        sequence.offer(layer, sequence.keys(layer), 0, tokens, None, None)
    sequence.prefilled(tokens)
    sequence.publish()
    return sequence


def ends(sequence):
    (same,) = {tuple(tokens for tokens, _ in marks) for marks in sequence.index.marks}
    return list(same)


@pytest.mark.parametrize(
    ("block_ends", "closed", "expected"),
    [
        ([], 0, None),
        ([64, 128, 190], 0, None),
        ([16, 32, 48], 0, (0, 48)),
        ([16, 32, 48], 48, None),
        ([48, 56], 0, None),
        ([48, 56, 64], 48, (0, 64)),
        ([64, 112, 120, 128], 64, (64, 128)),
        ([64, 100, 112], 64, (64, 112)),
        ([64, 104, 112], 64, None),
        ([16, 32, 48, 64], 0, (0, 64)),
        ([64, 80, 96, 112, 128, 144], 0, (64, 128)),
        ([30, 46, 62, 64], 0, (0, 64)),
        ([64, 80, 128, 192, 200, 256], 128, (192, 256)),
        ([64, 80, 96, 112, 128, 144], 128, None),
    ],
)
def test_blocks_are_joined_when_they_fill_one_or_add_a_third(block_ends, closed, expected):
    assert joinable(block_ends, closed, 64) == expected


@pytest.mark.usefixtures("layers_at_once")
@pytest.mark.parametrize("prompt", [30, 63, 70, 112, 128])
def test_full_blocks_begin_where_those_of_the_whole_would(prompt):
    sequence = prefilled(keys_config(), prompt)
    longest = 0
    for _ in range(200):
        extend_sequence(sequence, 1)
        longest = max(longest, sequence.length - ends(sequence)[-1])
    assert [end for end in ends(sequence) if end < 192] == [64, 128]
    assert longest <= 18  # a block is published one step after it is offered
    assert_consistent_index(sequence)


def test_a_later_turn_closes_the_open_block_first():
    sequence = prefilled(keys_config(), 70)
    for layer in range(2):
        sequence.offer(layer, sequence.keys(layer), 70, 150, None, None)
    sequence.prefilled(220)
    sequence.publish()
    assert ends(sequence) == [64, 70, 128, 192, 208]
    extend_sequence(sequence, 2)
    assert ends(sequence) == [64, 128, 192, 208]
    assert_consistent_index(sequence)


@pytest.mark.usefixtures("layers_at_once")
@pytest.mark.parametrize(
    "options", [{}, {"append": "assign"}, {"graph_aggregation": "layer"}, {"centroid_budget": 4}], ids=str
)
def test_generated_tokens_end_up_in_full_blocks(options):
    config = keys_config(**options)
    sequence = prefilled(config, 64, batch=2)
    seen = []
    for _ in range(4 * 64 + 3):
        extend_sequence(sequence, 1)
        if not seen or ends(sequence) != seen[-1]:
            seen.append(ends(sequence))
            assert_consistent_index(sequence)
    assert seen[:6] == [[64], [64, 80], [64, 80, 96], [64, 96], [64, 96, 112], [64, 112]]
    assert seen[-1] == [64, 128, 192, 256, 320]


def test_a_joined_block_is_the_partition_of_its_tokens_at_once():
    streamed, whole = (prefilled(keys_config(deterministic=True), tokens) for tokens in (64, 128))
    extend_sequence(streamed, 66)
    assert ends(streamed) == ends(whole) == [64, 128]
    assert streamed.index.used == whole.index.used
    for name in ("member", "start", "stored", "size"):
        ours, expected = (getattr(one.index, name) for one in (streamed, whole))
        used = 128 if name == "member" else whole.index.used[0]
        np.testing.assert_array_equal(ours[0, ..., :used], expected[0, ..., :used])


@pytest.mark.usefixtures("layers_at_once")
def test_blocks_behind_the_joined_ones_keep_their_members(monkeypatch):
    """A partition that comes back late finds other blocks behind those that it replaces."""
    sequence = prefilled(keys_config(append="assign", centroid_budget=4), 64, seed=1)
    held = []
    submit = sequence._submit

    def late(*args, joins=False):
        submit(*args, joins=joins)
        if joins:
            held.append(sequence.work.inbox.pop())

    monkeypatch.setattr(sequence, "_submit", late)
    extend_sequence(sequence, 100)
    assert ends(sequence) == [64, 80, 96, 112, 128, 144, 160]
    before = sequence.index.used[0]
    sequence.work.inbox.extend(held)
    sequence.publish()
    assert ends(sequence) == [64, 96, 112, 128, 144, 160]
    assert sequence.index.used[0] != before, "the test should see the numbers of later communities change"
    assert_consistent_index(sequence)


@pytest.mark.usefixtures("layers_at_once")
def test_small_blocks_stay_when_their_joint_partition_fails(monkeypatch):
    original = jobs.partition_block

    def fails_for_full(neighbors, *rest, stop):
        if neighbors.shape[2] == 64:
            raise MemoryError("too large")
        return original(neighbors, *rest, stop=stop)

    sequence = prefilled(keys_config(), 64)
    monkeypatch.setattr(jobs, "partition_block", fails_for_full)
    extend_sequence(sequence, 140)
    assert ends(sequence) == [64, 112, 128, 176, 192]
    assert_consistent_index(sequence)
    assert len(sequence.statistics.failures) == 4  # two layers, two blocks, each tried once
    assert all("too large" in failure for failure in sequence.statistics.failures)


@pytest.mark.usefixtures("layers_at_once")
def test_a_crop_into_a_joined_block_indexes_its_rest_again():
    sequence = prefilled(keys_config(), 64)
    extend_sequence(sequence, 81)
    assert ends(sequence) == [64, 128, 144]
    sequence.truncate(120)
    assert ends(sequence) == [64]
    assert_consistent_index(sequence)
    extend_sequence(sequence, 90)
    assert ends(sequence)[:2] == [64, 128]
    assert_consistent_index(sequence)


@pytest.mark.usefixtures("layers_at_once")
def test_a_crop_while_blocks_are_being_joined_forgets_the_result():
    sequence = prefilled(keys_config(), 64)
    extend_sequence(sequence, 64)
    sequence.publish()
    assert ends(sequence) == [64, 112, 128]
    assert sequence.work.joining == {0, 1}
    sequence.truncate(120)
    assert not sequence.work.joining
    sequence.publish()
    assert ends(sequence) == [64, 112]
    assert_consistent_index(sequence)


@pytest.mark.usefixtures("layers_at_once")
def test_control_policies_join_nothing():
    sequence = prefilled(keys_config(policy="streaming"), 64)
    extend_sequence(sequence, 82)
    assert ends(sequence) == [64, 80, 96, 112, 128, 144]


@pytest.mark.parametrize(("append", "most"), [("attend", 1), ("attend", 2), ("assign", 1)])
def test_steps_find_whole_communities_while_blocks_come_and_are_joined(monkeypatch, append, most):
    monkeypatch.setattr(turns, "LAYERS", most)  # of two, between two steps
    delays, original, seen = np.random.default_rng(0), work.Finished, set()

    def late(*args):
        time.sleep(delays.random() * 0.02)
        return original(*args)

    monkeypatch.setattr(work, "Finished", late)
    config = keys_config(workers=3, append=append, recent_window=4, budget=90)
    sequence = bare_sequence(config, 1200)
    for layer in range(2):
        sequence.offer(layer, sequence.keys(layer), 0, 64, None, None)
    sequence.prefilled(64)
    sequence.wait()
    generator = torch.Generator().manual_seed(0)
    for _ in range(600):
        extend_sequence(sequence, 1)
        for layer in range(2):
            query = torch.randn(1, 4, 1, 16, generator=generator)
            tokens, count = retrieve_step(sequence, layer, query, 150)
            if count.min() > 0:
                assert_whole_communities(sequence, layer, tokens, count)
                seen.add((layer, tuple(sequence.index.marks[layer])))
    assert len(seen) > 40
    sequence.wait()
    sequence.publish()
    assert_consistent_index(sequence)
