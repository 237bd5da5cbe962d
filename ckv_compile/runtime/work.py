"""What workers make of one cache: jobs under way, and partitions that came back and wait for their publication.

Workers only ever append to the inbox; everything else is the caller's thread's. Results carry the epoch in which they were
submitted, so that those of tokens that are gone are known when they come.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ckv_compile.community import partition as partitions
from ckv_compile.community.workers import shared_pool
from ckv_compile.config import CommunityConfig
from ckv_compile.runtime import jobs
from ckv_compile.runtime.index import Packed
from ckv_compile.runtime.rows import Origin
from ckv_compile.runtime.transfer import wait_for, with_arrays

log = logging.getLogger(__name__)


@dataclasses.dataclass
class Finished:
    """A partition of one layer that came back: ``result[row][graph]`` over positions ``start .. stop - 1``."""

    epoch: int
    layer: int
    start: int
    stop: int
    result: list[list]
    packed: Packed
    errors: list[str]
    joins: bool = False  # blocks that are published already
    rows: Origin = dataclasses.field(default_factory=Origin)  # where its rows went since it was submitted

    def arranged(self) -> Finished:
        """The same by the rows of now."""
        rows = self.rows.rows
        if rows is None:
            return self
        result, packed = self.rows.now(self.result), self.packed.of_rows(rows)
        return dataclasses.replace(self, result=result, packed=packed, rows=Origin())


@dataclasses.dataclass(frozen=True)
class Job:
    """Positions ``start .. stop - 1`` of a layer for workers to partition.

    first: of each row, the first of these positions that is a node. graphs: a row has so many. rows: where rows go from
    here on. joins: they are of blocks that are published already. by_graph: every graph is a call of its own.
    """

    layer: int
    start: int
    stop: int
    first: list[int]
    graphs: int
    rows: Origin
    joins: bool = False
    by_graph: bool = False

    def pages(self, page: int) -> list:
        """What stands in for the result of one call: runs of ``page`` tokens."""
        nodes = self.stop - self.start
        one = [partitions.contiguous_pages(nodes, first, page, reason="failed") for first in self.first]
        return one if self.by_graph else [[partition] * self.graphs for partition in one]

    def message(self, error: BaseException | None) -> list[str]:
        return [] if error is None else [f"layer {self.layer}, positions {self.start}-{self.stop - 1}: {error}"]


class Work:
    """The jobs of one cache and their results.

    waiting: (layer, start) -> came back before its turn. joined: layer -> one partition of several of its blocks.
    joining: layers of which such a partition is under way.
    """

    def __init__(self, config: CommunityConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        self.inbox: collections.deque[Finished] = collections.deque()
        self.epoch = 0  # of an earlier one, results belong to tokens that are gone, but for those
        self._stays: dict[int, int] = {}  # of blocks that end within so many tokens
        self.pending: set[Any] = set()
        self._pending_lock = threading.Lock()
        self.waiting: dict[tuple[int, int], Finished] = {}
        self.joined: dict[int, Finished] = {}
        self.joining: set[int] = set()

    # ------------------------------------------------------------------ jobs

    def submit(self, job: Job, function: Callable, *args: Any) -> None:
        """Have workers call ``function(*args)``, which returns partitions ``[row][graph]``.

        by_graph: those of one graph, ``[row]``; its number follows ``args``.
        """
        epoch, inbox, device = self.epoch, self.inbox, self.device

        def deliver(result: list[list], errors: list[str]) -> None:
            packed = Packed.of(result, device)  # here, in the worker
            inbox.append(
                Finished(epoch, job.layer, job.start, job.stop, result, packed, errors, job.joins, job.rows)
            )  # fmt: skip

        if not job.by_graph:

            def done(result, error) -> None:
                if result is not None:  # otherwise it was called off
                    deliver(result, job.message(error))

            self._call(job, function, args, done)
            return
        parts = jobs.LayerParts(job.graphs)

        def part_done(graph: int, result, error) -> None:
            whole = parts.put(graph, result, next(iter(job.message(error)), None))
            if whole is not None:
                deliver(whole, parts.errors)

        for graph in range(job.graphs):
            self._call(job, function, (*args, graph), functools.partial(part_done, graph), graph)

    def _call(self, job: Job, function: Callable, given: tuple, on_done: Callable, *graph: int) -> None:
        ticket = self._pool.submit(
            with_arrays(function), *given, description=(job.layer, job.start, job.stop, *graph),
            fallback=functools.partial(job.pages, self.config.mean_size), on_done=on_done,
            ready=functools.partial(wait_for, given),
        )  # fmt: skip
        with self._pending_lock:
            self.pending.add(ticket)

    @property
    def _pool(self):
        return shared_pool(self.config.workers, self.config.partition_timeout)

    def backlog(self):
        """How many jobs wait, for work that may take longer where none does. None where nothing may depend on that."""
        if self.config.deterministic or self.config.workers == 0:
            return None
        return self._pool.backlog

    def jobs_under_way(self) -> int:
        """Jobs that wait or run."""
        with self._pending_lock:
            return sum(not ticket.done for ticket in self.pending)

    def under_way(self) -> bool:
        """Whether a partition is being made, or has come back and is not published."""
        return self.jobs_under_way() > 0 or bool(self.inbox) or bool(self.waiting)

    def reap(self) -> float:
        """Forget answered tickets; the CPU seconds that they took."""
        with self._pending_lock:
            answered = {ticket for ticket in self.pending if ticket.done}
            self.pending -= answered
        return sum(ticket.cpu_seconds for ticket in answered)

    def wait(self) -> float:
        """Until every submitted partition is back; the seconds that this took."""
        with self._pending_lock:
            pending = list(self.pending)
        pool, began = self._pool, time.perf_counter()
        for ticket in pending:
            pool.wait(ticket)
        return time.perf_counter() - began

    # ------------------------------------------------------------------ results

    def receive(self) -> Iterator[str]:
        """Take what came back to where it waits; what went wrong with it."""
        while self.inbox:
            finished = self.inbox.popleft()
            if not self.wants(finished):
                continue
            yield from finished.errors
            if finished.joins:
                self.joined[finished.layer] = finished
                continue
            place = finished.layer, finished.start
            if place not in self.waiting or self.waiting[place].stop < finished.stop:
                self.waiting[place] = finished

    def came(self) -> list[Finished]:
        """What has come back, of tokens that are still there, and is not published."""
        return [one for one in (*self.waiting.values(), *list(self.inbox)) if self.wants(one)]

    def reaches(self, layer: int) -> int:
        """Tokens up to which partitions of a layer are under way or have come back."""
        came = [one.stop for one in self.came() if one.layer == layer]
        with self._pending_lock:
            made = [ticket.description[2] for ticket in self.pending if ticket.description[0] == layer]
        return max([0, *made, *came])

    def wants(self, finished: Finished) -> bool:
        """Whether what came back is of tokens that are still there."""
        stays = not finished.joins and finished.stop <= self._stays.get(finished.epoch, 0)
        return finished.epoch == self.epoch or stays

    # ------------------------------------------------------------------ tokens that are gone

    def forget(self, kept: int = 0) -> None:
        """Of what is under way, only blocks that end within the first ``kept`` tokens are wanted: the others are gone."""
        self._stays = {epoch: min(kept, stays) for epoch, stays in (*self._stays.items(), (self.epoch, kept)) if kept}
        self.epoch += 1
        self.waiting = {place: finished for place, finished in self.waiting.items() if finished.stop <= kept}
        self.joined.clear()
        self.joining.clear()
        with self._pending_lock:
            gone = {ticket for ticket in self.pending if ticket.description[2] > kept}
            self.pending -= gone
        for ticket in gone:
            ticket.cancel()

    def abandon(self) -> None:
        """Nothing is wanted any more. Takes no lock: a cache may die anywhere, in this object's own methods too."""
        self.epoch += 1
        self._stays = {}
        for ticket in list(self.pending):
            ticket.cancel()
        for finished in (self.inbox, self.waiting, self.joined):
            finished.clear()
