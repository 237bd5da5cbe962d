"""From a device to pageable memory of the host, in a thread of its own: what partitions are made from.

Whoever launches a prefill is far ahead of the device and must not wait for it. It leaves tensors here together with an
event; a thread per device waits for that event on a stream beside the caller's, copies through a small ring of pinned
buffers, and only then lets go of the tensors. Waiting (``cudaEventSynchronize``) and copying out of the ring hold no
GIL. So pinned memory is SLOTS * SLOT_BYTES for everything that ever leaves, and nothing is read before the event of its
copy has completed.

Tensors that wait here take memory of the device. Beyond WAITING_BYTES of them ``send`` waits until some have left: the
caller is then that much ahead of the device, which still has work.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from ckv_compile.runtime import cuda_graphs

log = logging.getLogger(__name__)

SLOTS = 2
SLOT_BYTES = 32 << 20
WAITING_BYTES = 1 << 30
EXIT_SECONDS = 2.0

Make = Callable[[], Iterable[Sequence[torch.Tensor]]]


class Parcel:
    """What was sent, when it arrives: arrays, one list for each group of tensors."""

    def __init__(self, make: Make, tensors: Sequence[torch.Tensor], ready: Any) -> None:
        self._make: Make | None = make
        self._tensors, self._ready = tensors, ready
        self.size = 0  # bytes of the device that it holds
        self._arrived = threading.Event()
        self._arrays: list[list[np.ndarray]] = []
        self._error: BaseException | None = None

    def wait(self) -> None:
        """Until it has arrived, or is lost. Holds no GIL."""
        self._arrived.wait()

    def arrays(self) -> list[list[np.ndarray]]:
        """Waits; raises what went wrong on the way."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._arrays


class CudaLane:
    """The stream, the events and the pinned memory of an outbox.

    Its stream comes first: what is made before it leaves is small kernels one after another, each of which would otherwise
    wait for a whole attention kernel of the prefill (0.38 s a layer of 131,072 tokens in place of 0.05).
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device, priority=-1)

    def ready(self, tensors: Sequence[torch.Tensor]) -> torch.cuda.Event:
        """An event behind what the current stream has to do; the tensors' memory is also used by this lane."""
        cuda_graphs.require_no_capture("handing over what a partition is made from")
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        for tensor in tensors:
            tensor.record_stream(self.stream)
        return event

    @contextlib.contextmanager
    def after(self, event: torch.cuda.Event):
        """Work launched inside follows the event, on this lane's stream."""
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(event)
            yield

    def pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def copy(self, host: torch.Tensor, tensor: torch.Tensor) -> Any:
        """Start a copy; the event's ``synchronize`` says when ``host`` holds it."""
        host.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event(blocking=True)
        event.record(self.stream)
        return event


class Ring:
    """Pinned buffers that every copy to the host goes through, in turn; for one thread."""

    def __init__(self, lane: Any, slots: int = SLOTS, slot_bytes: int = SLOT_BYTES) -> None:
        self._lane, self._slot_bytes = lane, slot_bytes
        self._free = collections.deque(lane.pinned(slot_bytes) for _ in range(slots))

    def fetch(self, tensor: torch.Tensor) -> np.ndarray:
        """A copy of the tensor in pageable memory. While one buffer is emptied, the next ones fill."""
        array = np.empty(tensor.shape, _numpy_dtype(tensor.dtype))
        source = tensor.contiguous().view(-1).view(torch.uint8)
        target = torch.from_numpy(array.reshape(-1).view(np.uint8))
        filling: collections.deque[tuple[torch.Tensor, int, int, Any]] = collections.deque()
        begin = 0
        while begin < len(source) or filling:
            if begin < len(source) and self._free:
                slot, end = self._free.popleft(), min(begin + self._slot_bytes, len(source))
                filling.append((slot, begin, end, self._lane.copy(slot[: end - begin], source[begin:end])))
                begin = end
            else:
                slot, low, high, copied = filling.popleft()
                copied.synchronize()
                target[low:high].copy_(slot[: high - low])  # by torch's threads: one copies and faults in 6 GB/s
                self._free.append(slot)
        return array


class Outbox:
    """Takes tensors of one device and gives a ``Parcel`` for them; first in, first out."""

    def __init__(self, lane: Any, waiting_bytes: int = WAITING_BYTES, slot_bytes: int = SLOT_BYTES) -> None:
        self._lane, self._waiting_bytes, self._slot_bytes = lane, waiting_bytes, slot_bytes
        self._changed = threading.Condition()
        self._parcels: collections.deque[Parcel] = collections.deque()
        self._bytes = 0  # of tensors that wait
        self._closed = False
        self._thread: threading.Thread | None = None
        self.held_seconds = 0.0  # that callers had to wait for room

    def send(
        self, tensors: Sequence[torch.Tensor], make: Make | None = None, *, sent_again: bool = False
    ) -> Parcel:  # fmt: skip
        """Send tensors that the current stream of the calling thread computes, and that nobody writes to afterwards.

        make: what to send in their place, computed from them in the outbox's thread and on its stream, group by group;
        it may wait for the device. sent_again: these tensors follow in parcels of their own, where their bytes count.
        """
        parcel = Parcel(make or (lambda: [tensors]), tensors, self._lane.ready(tensors))
        size = parcel.size = 0 if sent_again else sum(tensor.nbytes for tensor in tensors)
        with self._changed:
            if self._bytes and self._bytes + size > self._waiting_bytes:
                began = time.perf_counter()
                self._changed.wait_for(lambda: self._closed or self._bytes + size <= max(self._waiting_bytes, size))
                held = time.perf_counter() - began
                self.held_seconds += held
                log.info("held a prefill for %.3f s: %d MiB wait to leave the device", held, self._bytes >> 20)
            if self._closed:
                _lose(parcel, RuntimeError("the process is ending"))
                return parcel
            self._bytes += size
            self._parcels.append(parcel)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="ckv-outbox", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return parcel

    def close(self, timeout: float | None = EXIT_SECONDS) -> None:
        """Lose what has not left, and end the thread."""
        with self._changed:
            self._closed = True
            lost = list(self._parcels)
            self._parcels.clear()
            self._changed.notify_all()
        for parcel in lost:
            _lose(parcel, RuntimeError("the process is ending"))
        if self._thread is not None:
            self._thread.join(timeout)

    @torch.no_grad()
    def _work(self) -> None:
        ring: Ring | None = None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._parcels)
                if self._closed:
                    return
                parcel = self._parcels.popleft()
            size = parcel.size
            try:
                with self._lane.after(parcel._ready):
                    ring = ring or Ring(self._lane, slot_bytes=self._slot_bytes)
                    _pack(parcel, ring)
            except BaseException as error:
                ring = None  # its buffers may still be written to
                parcel._error = error.with_traceback(None)  # whose frames would keep the tensors
            parcel._make, parcel._tensors, parcel._ready = None, (), None
            parcel._arrived.set()
            del parcel
            with self._changed:
                self._bytes -= size
                self._changed.notify_all()


def _pack(parcel: Parcel, ring: Ring) -> None:
    assert parcel._make is not None
    for group in parcel._make():
        parcel._arrays.append([ring.fetch(tensor) for tensor in group])


def _lose(parcel: Parcel, error: BaseException) -> None:
    parcel._make, parcel._tensors, parcel._ready = None, (), None
    parcel._error = error
    parcel._arrived.set()


def _numpy_dtype(dtype: torch.dtype) -> np.dtype:
    return torch.empty(0, dtype=dtype).numpy().dtype


_outboxes: dict[torch.device, Outbox] = {}
_lock = threading.Lock()


def leaves_by_outbox(device: torch.device) -> bool:
    """Whether what is on this device has a way to go before a worker can read it."""
    return device.type == "cuda"


def outbox_of(device: torch.device) -> Outbox:
    """The process's outbox of a device; made on first use."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    with _lock:
        if device not in _outboxes:
            _outboxes[device] = Outbox(CudaLane(device))
        return _outboxes[device]


def _close_outboxes() -> None:
    for outbox in list(_outboxes.values()):
        outbox.close()


def _forget_after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    _outboxes.clear()  # their threads are the parent's, and so is CUDA


atexit.register(_close_outboxes)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
