"""Threads that partition graphs while the model runs on."""

from __future__ import annotations

import atexit
import collections
import dataclasses
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from ckv_compile.errors import PartitionError

log = logging.getLogger(__name__)

MAX_PENDING = 4096
GRACE_SECONDS = 1.0  # a job that ignores its stop flag for so long loses its thread to a new one
EXIT_SECONDS = 2.0


@dataclasses.dataclass
class PoolStats:
    """Counts since the pool was made. cpu_seconds: CPU time of the worker threads in jobs (not of engine processes)."""

    jobs: int = 0
    cpu_seconds: float = 0.0
    failures: int = 0
    timeouts: int = 0
    rejected: int = 0


class Ticket:
    """One submitted job. ``description`` names its layer and graph in messages."""

    def __init__(self, fn, args, description, fallback, on_done, ready=None) -> None:
        self.description = description
        self.result: Any = None
        self.error: BaseException | None = None
        self.cpu_seconds = 0.0
        self._fn, self._args, self._fallback, self._on_done, self._ready = fn, args, fallback, on_done, ready
        self._stop = np.zeros(1, np.int32)
        self._deadline = float("inf")
        self._claimed = False  # someone delivers, or has delivered, the result
        self._cancelled = False
        self._done = threading.Event()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def cancel(self) -> None:
        """Say that the result is not wanted any more; ``on_done`` is then called with neither result nor fallback."""
        self._cancelled = True
        self._stop[0] = 1

    def __repr__(self) -> str:
        return f"Ticket({self.description!r}, {'done' if self.done else 'pending'})"


class PartitionPool:
    """Daemon threads that run partition jobs; a job's failure or lateness is answered with its fallback.

    workers: threads; 0 runs every job inside ``submit``. timeout: seconds that a job may run (waiting does not count).
    max_pending: jobs that may wait. Beyond it a job is not queued but answered with its fallback at once, so the thread
    that submits never waits for a partition and never computes one.

    A job is called as ``fn(*args, stop=stop)``; ``stop`` is an int32 [1] that becomes 1 when the result is not wanted
    any more. Exactly once per job, ``on_done(result, error)`` is called from the thread that ends the job: error is
    None and result what fn returned; or error is what went wrong (PartitionError for a time-out) and result what
    ``fallback()`` returned. The child of a fork starts with an empty pool; tickets of its parent end there with an
    error, uncalled.
    """

    def __init__(self, workers: int, timeout: float = float("inf"), *, max_pending: int = MAX_PENDING) -> None:
        if workers < 0:
            raise ValueError(f"workers must be at least 0, got {workers}")
        self.workers = workers
        self.timeout = timeout
        self.max_pending = max_pending
        self._reset()
        _pools.add(self)

    def _reset(self) -> None:
        # One lock and a condition for each who waits: a job that comes or ends wakes nobody whom it does not concern,
        # for every thread that wakes takes the GIL from the one that runs the model.
        self._lock = threading.Lock()
        self._work_waits = threading.Condition(self._lock)  # workers
        self._answered = threading.Condition(self._lock)  # drain
        self._times_begin = threading.Condition(self._lock)  # the watch
        self._watch_wakes = 0.0  # when the watch looks again by itself
        self._queue: collections.deque[Ticket] = collections.deque()
        self._running: set[Ticket] = set()
        self._open = 0  # tickets whose result is not delivered
        self._threads: set[threading.Thread] = set()
        self._lost: set[threading.Thread] = set()
        self._thread_of: dict[Ticket, threading.Thread] = {}
        self._idle = 0
        self._monitor: threading.Thread | None = None
        self._closed = False
        self.stats = PoolStats()

    def submit(
        self,
        fn: Callable[..., Any],
        *args: Any,
        description: Any = (),
        fallback: Callable[[], Any] | None = None,
        on_done: Callable[[Any, BaseException | None], None] | None = None,
        ready: Callable[[], None] | None = None,
    ) -> Ticket:
        """Queue one job; returns at once (with 0 workers, when the job is done).

        ready: waits, in the job's thread and before its time begins, until ``fn`` has what it needs; never raises.
        """
        ticket = Ticket(fn, args, description, fallback, on_done, ready)
        rejection = None
        with self._lock:
            self.stats.jobs += 1
            self._open += 1
            if self._closed:
                rejection = "the pool is closed"
            elif self.workers and len(self._queue) >= self.max_pending:
                rejection = f"{self.max_pending} jobs are waiting already"
                self.stats.rejected += 1
            elif self.workers:
                self._queue.append(ticket)
                if self._idle < len(self._queue) and len(self._threads) < self.workers:
                    self._start_worker()
                self._work_waits.notify()
        if rejection is not None:
            self._claim(ticket)
            self._deliver(ticket, None, PartitionError(f"partition of {description} was not started: {rejection}"))
        elif not self.workers:
            self._run(ticket)
        return ticket

    def wait(self, ticket: Ticket, timeout: float | None = None) -> bool:
        """Whether the job was answered (``on_done`` included) within ``timeout`` seconds."""
        return ticket._done.wait(timeout)

    def drain(self, timeout: float | None = None) -> bool:
        """Whether every job submitted so far was answered within ``timeout`` seconds."""
        with self._lock:
            return self._answered.wait_for(lambda: self._open == 0, timeout)

    def backlog(self) -> int:
        """Jobs that wait for a thread."""
        return len(self._queue)

    @property
    def pending(self) -> int:
        """Jobs that are not answered yet."""
        return self._open

    def close(self, timeout: float | None = EXIT_SECONDS) -> None:
        """Stop running jobs, answer all that is left with fallbacks, and end the threads; later jobs are refused."""
        with self._lock:
            self._closed = True
            waiting = list(self._queue)
            self._queue.clear()
            for ticket in self._running:
                ticket._stop[0] = 1
            threads = [thread for thread in self._threads if thread is not threading.current_thread()]
            monitor = self._monitor
            self._work_waits.notify_all()
            self._times_begin.notify_all()
        for ticket in waiting:
            if self._claim(ticket):
                self._deliver(
                    ticket, None, PartitionError(f"partition of {ticket.description} was not started: closed")
                )
        deadline = None if timeout is None else time.monotonic() + timeout
        for thread in [*threads, monitor]:
            if thread is not None and thread is not threading.current_thread():
                thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> PartitionPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # The threads. `_lock` is never held while a job, a fallback or on_done runs.

    def _start_worker(self) -> None:
        thread = threading.Thread(target=self._work, name="ckv-partition", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _work(self) -> None:
        me = threading.current_thread()
        while True:
            with self._lock:
                self._idle += 1
                while not self._queue and not self._closed and me not in self._lost:
                    self._work_waits.wait()
                self._idle -= 1
                if me in self._lost or not self._queue:
                    self._lost.discard(me)
                    self._threads.discard(me)
                    return
                ticket = self._queue.popleft()
            self._run(ticket)
            del ticket

    def _run(self, ticket: Ticket) -> None:
        with self._lock:
            self._running.add(ticket)
            self._thread_of[ticket] = threading.current_thread()
        if ticket._ready is not None:
            ticket._ready()
        with self._lock:
            ticket._deadline = time.monotonic() + self.timeout
            if ticket._deadline != float("inf"):
                if self._monitor is None or not self._monitor.is_alive():
                    self._monitor = threading.Thread(target=self._watch, name="ckv-partition-watch", daemon=True)
                    self._monitor.start()
                if ticket._deadline < self._watch_wakes:
                    self._times_begin.notify()
        result, error = None, None
        began = time.thread_time()
        try:
            if not ticket._cancelled:
                result = ticket._fn(*ticket._args, stop=ticket._stop)
        except BaseException as raised:  # leidenalg raises bare BaseException
            error = raised
        ticket.cpu_seconds = time.thread_time() - began
        with self._lock:
            self._running.discard(ticket)
            self._thread_of.pop(ticket, None)
            if self._closed and not self._running:
                self._times_begin.notify_all()  # the watch's work is done
            self.stats.cpu_seconds += ticket.cpu_seconds
            mine = not ticket._claimed
            ticket._claimed = True
            if error is None and mine and (ticket._stop[0] or time.monotonic() > ticket._deadline):
                # The flag came first: what fn returned may be half a result.
                ticket._stop[0] = 1
                if ticket._cancelled:
                    error = PartitionError(f"partition of {ticket.description} was cancelled")
                else:
                    error = self._closed_error(ticket) if self._closed else self._late_error(ticket)
        if mine:
            self._deliver(ticket, result, error)
        if error is not None and isinstance(error, KeyboardInterrupt | SystemExit) and not self.workers:
            raise error  # the caller's own, not the job's

    def _watch(self) -> None:
        while True:
            late, now = [], time.monotonic()
            with self._lock:
                if self._closed and not self._running:
                    return
                for ticket in self._running:
                    if now >= ticket._deadline and not ticket._claimed:
                        ticket._stop[0] = 1
                        ticket._claimed = True
                        late.append(ticket)
                    elif ticket._claimed and now >= ticket._deadline + GRACE_SECONDS:
                        self._replace(self._thread_of.get(ticket))
                if not late:
                    times = [
                        ticket._deadline + (GRACE_SECONDS if ticket._claimed else 0.0)
                        for ticket in self._running
                        if not (ticket._claimed and self._thread_of.get(ticket) in self._lost)
                    ]
                    times = [moment for moment in times if moment > now]
                    self._watch_wakes = min(times, default=float("inf"))
                    self._times_begin.wait(self._watch_wakes - now if self._watch_wakes != float("inf") else None)
                    self._watch_wakes = 0.0
            for ticket in late:
                self._deliver(ticket, None, self._late_error(ticket))

    def _replace(self, thread: threading.Thread | None) -> None:
        """Let another thread take the place of one that is stuck; it ends by itself if its job ever returns."""
        if thread in self._threads:
            self._threads.discard(thread)
            self._lost.add(thread)
            if self._queue and not self._closed:
                self._start_worker()

    def _late_error(self, ticket: Ticket) -> PartitionError:
        return PartitionError(
            f"partition of {ticket.description} took longer than {self.timeout} s; raise options['partition_timeout']"
        )

    def _closed_error(self, ticket: Ticket) -> PartitionError:
        return PartitionError(f"partition of {ticket.description} was stopped: the pool is closed")

    def _claim(self, ticket: Ticket) -> bool:
        with self._lock:
            mine = not ticket._claimed
            ticket._claimed = True
            return mine

    def _deliver(self, ticket: Ticket, result: Any, error: BaseException | None) -> None:
        """Answer a claimed ticket: the fallback stands in for a result that failed, then ``on_done``."""
        late = ticket._stop[0] != 0
        if error is not None:
            result = None
            if not ticket._cancelled:
                log.warning("%s: %s", type(error).__name__, error)
            if ticket._fallback is not None and not ticket._cancelled:
                try:
                    result = ticket._fallback()
                except BaseException:
                    log.exception("the fallback of %s failed", ticket.description)
        ticket.result, ticket.error = result, error
        on_done = ticket._on_done
        ticket._fn = ticket._args = ticket._fallback = ticket._on_done = ticket._ready = None  # let go of the arrays
        if on_done is not None:
            try:
                on_done(result, error)
            except BaseException:
                log.exception("publishing the partition of %s failed", ticket.description)
        with self._lock:
            if error is not None and not ticket._cancelled:
                self.stats.failures += 1
                self.stats.timeouts += int(late and not self._closed)
            self._open -= 1
            ticket._done.set()
            if not self._open:
                self._answered.notify_all()

    def _forget_after_fork(self) -> None:
        tickets = [*self._queue, *self._running]
        closed, stats = self._closed, self.stats
        self._reset()
        self._closed, self.stats = closed, dataclasses.replace(stats)
        for ticket in tickets:
            ticket._claimed = True
            ticket.error = PartitionError(f"partition of {ticket.description} belongs to the parent process")
            ticket._done = threading.Event()
            ticket._done.set()


_pools: weakref.WeakSet[PartitionPool] = weakref.WeakSet()
_shared: dict[tuple[int, float], PartitionPool] = {}
_shared_lock = threading.Lock()


def shared_pool(workers: int, timeout: float) -> PartitionPool:
    """The process's pool of that many workers and that time-out; made on first use."""
    with _shared_lock:
        pool = _shared.get((workers, timeout))
        if pool is None or pool._closed:
            pool = _shared[workers, timeout] = PartitionPool(workers, timeout)
        return pool


def _close_pools() -> None:
    for pool in list(_pools):
        pool.close()


def _forget_pools_after_fork() -> None:
    global _shared_lock
    _shared_lock = threading.Lock()
    for pool in list(_pools):
        pool._forget_after_fork()


atexit.register(_close_pools)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pools_after_fork)
