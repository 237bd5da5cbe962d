"""What leaves a device arrives as it was sent, in order, through few buffers, and without the sender waiting."""

import contextlib
import gc
import threading
import time
import weakref

import numpy as np
import pytest
import torch

from ckv_compile.runtime.outbox import Outbox, Ring
from ckv_compile.runtime.transfer import Arriving
from ckv_compile.testing import HostLane, outbox_of_the_host


@pytest.fixture
def box():
    boxes = []

    def make(**options):
        boxes.append(Outbox(HostLane(), **options))
        return boxes[-1]

    yield make
    for one in boxes:
        one.close()


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("slot_bytes", [8, 24, 4096])
def test_a_ring_hands_over_tensors_of_any_size_and_kind(slots, slot_bytes):
    lane = HostLane()
    ring = Ring(lane, slots, slot_bytes)
    tensors = [
        torch.randn(7, 5), torch.arange(30).view(2, 3, 5).transpose(0, 2), torch.tensor(3, dtype=torch.int32),
        torch.empty(0, 4), torch.rand(9) > 0.5, torch.randn(3, dtype=torch.float64),
    ]  # fmt: skip
    for tensor in tensors:
        array = ring.fetch(tensor)
        assert array.shape == tensor.shape
        np.testing.assert_array_equal(array, tensor.numpy())
    assert lane.allocated == slots
    assert lane.most_open <= slots


def test_no_buffer_is_read_or_filled_again_before_its_copy_has_completed():
    lane = HostLane()  # which writes at ``synchronize`` only, and complains if a buffer has two copies open
    np.testing.assert_array_equal(Ring(lane, 2, 16).fetch(torch.arange(1000)), np.arange(1000))
    assert lane.most_open == 2


def test_parcels_arrive_in_order_and_let_go_of_what_was_sent(box):
    outbox, seen = box(), []
    tensors = [torch.full((3,), number) for number in range(5)]
    gone = weakref.ref(tensors[4])

    def make(number):
        seen.append(number)
        yield [torch.tensor([number]), tensors[number] + 1] if number < 4 else [torch.tensor(4)]
        yield [torch.tensor(-number)]

    parcels = [outbox.send([tensors[number]], lambda number=number: make(number)) for number in range(4)]
    parcels.append(outbox.send([tensors.pop()]))
    assert [array.tolist() for array in parcels[2].arrays()[0]] == [[2], [3, 3, 3]]
    assert parcels[2].arrays()[1][0] == -2
    assert parcels[4].arrays()[0][0].tolist() == [4, 4, 4]
    assert seen == [0, 1, 2, 3]
    gc.collect()
    assert gone() is None


def test_an_error_on_the_way_is_the_parcels_own(box):
    outbox = box()

    def fails():
        yield [torch.ones(2)]
        raise ValueError("half way")

    bad, good = outbox.send([torch.ones(1)], fails), outbox.send([torch.ones(2)])
    with pytest.raises(ValueError, match="half way"):
        bad.arrays()
    assert good.arrays()[0][0].tolist() == [1, 1]


def test_a_sender_waits_only_where_too_much_waits_already(box):
    outbox, release = box(waiting_bytes=100), threading.Event()

    def slow():
        release.wait(30)
        return [[torch.ones(1)]]

    outbox.send([torch.ones(15)], slow)  # 60 bytes
    outbox.send([torch.ones(10)], slow)
    assert outbox.held_seconds == 0
    third = []
    sender = threading.Thread(target=lambda: third.append(outbox.send([torch.ones(12)])))
    sender.start()
    time.sleep(0.05)
    assert not third
    release.set()
    sender.join(30)
    assert third[0].arrays()[0][0].tolist() == [1] * 12
    assert outbox.held_seconds > 0.04
    assert outbox.send([torch.ones(1000)]).arrays()[0][0].sum() == 1000  # larger than all room: alone


def test_a_closed_outbox_loses_parcels_with_an_error(box):
    outbox, release = box(), threading.Event()
    outbox.send([torch.ones(1)], lambda: release.wait(30) and [])
    lost = outbox.send([torch.ones(1)])
    closing = threading.Thread(target=outbox.close)
    closing.start()
    with pytest.raises(RuntimeError, match="ending"):
        lost.arrays()
    release.set()
    closing.join(30)
    with pytest.raises(RuntimeError, match="ending"):
        outbox.send([torch.ones(1)]).arrays()


def test_what_was_made_in_inference_mode_leaves_too(monkeypatch):
    with outbox_of_the_host(monkeypatch):
        with torch.inference_mode():
            arriving = Arriving(torch.arange(12).view(3, 4))
        assert arriving.part(0, 1, 3).part(1, 0, 2).array().tolist() == [[4, 5], [8, 9]]
        assert arriving.array().shape == (3, 4)


def test_work_runs_behind_the_event_of_what_was_sent():
    class Recording(HostLane):
        def __init__(self):
            super().__init__()
            self.order = []

        def ready(self, tensors):
            self.order.append(("ready", threading.current_thread() is threading.main_thread()))
            return len(self.order)

        @contextlib.contextmanager
        def after(self, event):
            self.order.append(("after", event))
            yield

    lane = Recording()
    outbox = Outbox(lane)
    outbox.send([torch.ones(1)]).arrays()
    outbox.close()
    assert lane.order == [("ready", True), ("after", 1)]
