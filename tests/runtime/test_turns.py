"""Layers have their turn one after another between decode steps: few at a time, all in the end, and none of it shows."""

import numpy as np
import pytest
import torch

import ckv_compile.ops  # noqa: F401
from ckv_compile.config import CommunityConfig
from ckv_compile.runtime import moments, turns
from ckv_compile.runtime import sequence as sequences
from ckv_compile.runtime.index import CommunityIndex
from ckv_compile.runtime.sequence import Sequence
from ckv_compile.testing import assert_consistent_index, bare_sequence, extend_sequence, retrieve_step

LAYERS = 7


def config_of(**options):
    base = {"min_context": 0, "workers": 0, "block_size": 64, "append_block": 32, "num_sink_tokens": 3, "kappa": 4}
    return CommunityConfig(**{**base, **options})


def prefill(sequence, count):
    length = sequence.length
    for layer in range(LAYERS):
        sequence.offer(layer, sequence.keys(layer), length, count, None, None)
    sequence.prefilled(length + count)


def prefilled(config, tokens):
    sequence = bare_sequence(config, 400, layers=LAYERS)
    prefill(sequence, tokens)
    sequence.wait()
    return sequence


def ends(sequence):
    return [[tokens for tokens, _ in marks] for marks in sequence.index.marks]


def settle(sequence):
    """Until nothing is under way: blocks that are published may be joined."""
    for _ in range(4):
        sequence.wait()
        sequence.publish()


def recording(method, layers):
    def record(self, layer, *args, **kwargs):
        layers.append(layer)
        return method(self, layer, *args, **kwargs)

    return record


@pytest.fixture
def served(monkeypatch):
    """Layers that were offered and published, by what happened to them, since the lists were last cleared."""
    layers = {"offered": [], "published": []}
    for owner, name, what in (
        (Sequence, "_submit", "offered"),
        (CommunityIndex, "append_block", "published"),
        (CommunityIndex, "join_blocks", "published"),
    ):
        monkeypatch.setattr(owner, name, recording(getattr(owner, name), layers[what]))
    return layers


@pytest.mark.parametrize("workers", [0, 2])
def test_a_step_offers_and_publishes_few_layers(served, workers):
    sequence = prefilled(config_of(workers=workers), 64)
    extend_sequence(sequence, 1)
    assert served["published"] == list(range(LAYERS))
    most, uneven = {"offered": 0, "published": 0}, 0
    for _ in range(150):
        for layers in served.values():
            layers.clear()
        extend_sequence(sequence, 1)
        most = {what: max(most[what], len(set(layers))) for what, layers in served.items()}
        uneven += len({tokens[-1] for tokens in ends(sequence)}) > 1
    assert most["offered"] == sequence.turns.offered == 1
    assert 1 <= most["published"] <= sequence.turns.published == 2
    assert uneven > 4
    settle(sequence)
    assert ends(sequence) == [[64, 128, 192]] * LAYERS
    assert_consistent_index(sequence)


def test_the_index_becomes_that_of_all_layers_at_once(monkeypatch):
    def final():
        sequence = prefilled(config_of(), 64)
        extend_sequence(sequence, 128 + 20)
        settle(sequence)
        return sequence

    spread = final()
    monkeypatch.setattr(turns, "LAYERS", LAYERS)
    at_once = final()
    assert spread.index.marks == at_once.index.marks
    for name, buffer in spread.index.buffers.items():
        if name in ("member", "start", "stored", "size", "centroid", "n_indexed", "num_communities"):
            assert torch.equal(buffer, at_once.index.buffers[name]), name


def test_deterministic_steps_are_those_of_all_layers_at_once(monkeypatch):
    def story(most, workers):
        monkeypatch.setattr(turns, "LAYERS", most)
        sequence = prefilled(config_of(deterministic=True, workers=workers, recent_window=4, budget=40), 64)
        generator, seen = torch.Generator().manual_seed(0), []
        for _ in range(100):
            extend_sequence(sequence, 1)
            query = torch.randn(1, 4, 1, 16, generator=generator)
            lists = [retrieve_step(sequence, layer, query, 60) for layer in (0, LAYERS - 1)]
            seen.append((ends(sequence), [tokens[0, 0, : int(count[0, 0])].tolist() for tokens, count in lists]))
        return seen

    assert story(1, 0) == story(1, 2) == story(LAYERS, 0)


def test_a_crop_and_a_later_turn_find_layers_indexed_up_to_different_tokens():
    sequence = prefilled(config_of(), 64)

    def until_uneven():
        for _ in range(40):
            extend_sequence(sequence, 1)
            if len({tokens[-1] for tokens in ends(sequence)}) > 1:
                return
        pytest.fail("the layers were served at once")

    until_uneven()
    sequence.truncate(90)
    assert ends(sequence) == [[64]] * LAYERS
    until_uneven()
    assert_consistent_index(sequence)
    sequence.publish()
    prefill(sequence, 70)
    sequence.publish(spread=True)
    assert min(tokens[-1] for tokens in ends(sequence)) >= 128
    extend_sequence(sequence, 80)
    settle(sequence)
    assert len({tokens[-1] for tokens in ends(sequence)}) == 1
    assert_consistent_index(sequence)
    sequence.restart([0])
    assert not sequence.work.waiting
    prefill(sequence, 64)
    sequence.publish(spread=True)
    assert ends(sequence) == [[64]] * LAYERS


@pytest.mark.parametrize("came_back", [False, True])
def test_a_crop_keeps_the_blocks_under_way_whose_tokens_stay(busy_worker, came_back):
    """Drafts are rejected while the prompt is being partitioned: only the block that held them begins anew."""
    sequence = bare_sequence(config_of(workers=1), 400, layers=LAYERS)
    prefill(sequence, 200)
    if came_back:
        busy_worker.set()
        sequence.wait()
    sequence.truncate(150)
    assert sequence.submitted == sequence.awaited == [128] * LAYERS
    extend_sequence(sequence, 3)
    busy_worker.set()
    settle(sequence)
    assert ends(sequence) == [[64, 128]] * LAYERS
    extend_sequence(sequence, 60)
    settle(sequence)
    assert ends(sequence) == [[64, 128, 192]] * LAYERS
    assert_consistent_index(sequence)
    assert not sequence.statistics.failures
    assert sequence.statistics.index_lag_seconds or sequence.index_lags


def test_layers_have_their_turn_in_time():
    for layers in (2, 36, 80):
        for interval in (16, 64, 512):
            turn = turns.Turns(config_of(append_block=interval, block_size=512), layers)
            most, every = turn.offered, turn.every
            assert most == 1 or (most - 1) * interval < layers * turns.PART
            assert most == 1 or every == 1
            assert -(-layers // most) * every <= interval // turns.PART
            assert (-(-layers // most) + 1) * (every + 1) > interval // turns.PART, "work is not spread as it might be"


def test_turns_are_some_tokens_apart_and_come_behind_a_crop():
    turn = turns.Turns(config_of(append_block=64), 4)
    assert turn.every == 8
    assert turn.come(0)
    turn.taken(1, 100)
    turn.taken(0, 104)
    assert [length for length in range(100, 112) if turn.come(length)] == [108, 109, 110, 111]
    assert turn.come(99)


class FakeEvent:
    """An event of a device that records one each quarter of a second."""

    recorded, waited = 0, 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, stream):
        assert stream == "the current stream"
        self.at = FakeEvent.recorded = FakeEvent.recorded + 1

    def synchronize(self):
        FakeEvent.waited += 1

    def elapsed_time(self, end):
        return 250.0 * (end.at - self.at)


def test_the_lag_of_an_index_is_the_devices_and_nobody_waits_for_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the current stream")
    monkeypatch.setattr(sequences, "moment", lambda device: moments.moment(torch.device("cuda")))
    sequence = prefilled(config_of(), 200)
    late = [one for one in sequence.work.inbox if (one.layer, one.stop) == (LAYERS - 1, 200)]
    sequence.work.inbox.remove(*late)
    sequence.publish(spread=True)
    assert sequence.indexed_layers() == LAYERS
    assert FakeEvent.recorded == 1  # one block is missing
    sequence.work.inbox.extend(late)
    extend_sequence(sequence, 5)
    assert FakeEvent.recorded == 2
    assert FakeEvent.waited == 0
    sequence.settle()
    assert sequence.statistics.index_lag_seconds == [0.25]
    sequence.settle()
    assert FakeEvent.waited == 1


def test_the_lag_of_an_index_on_the_host_is_the_hosts(monkeypatch):
    now = np.arange(3.0, 100.0).tolist()
    monkeypatch.setattr(moments.time, "perf_counter", lambda: now.pop(0))
    assert moments.seconds_between(moments.moment(torch.device("cpu")), moments.moment(torch.device("cpu"))) == 1.0
