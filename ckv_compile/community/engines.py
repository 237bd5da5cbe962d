"""The Leiden engines behind one call: the native one in this thread, igraph and leidenalg in processes of their own."""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

from ckv_compile.community.engine_process import read_frame, write_frame
from ckv_compile.community.graph import TokenGraph
from ckv_compile.community.leiden import enforce_size, leiden, start_labels
from ckv_compile.errors import PartitionError

ENGINES = ("native", "igraph", "leidenalg")
POLL_SECONDS = 0.02
MAX_IDLE_PROCESSES = 8


class EngineProcess:
    """One worker process and the pipes to it; used by one thread at a time.

    It is started as a module instead of through multiprocessing, so the caller's main module is never imported again: a
    script without a ``__main__`` guard, ``python -c`` and a notebook all work.
    """

    def __init__(self) -> None:
        package_root = str(Path(__file__).resolve().parents[2])
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (package_root, environment.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ckv_compile.community.engine_process"], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, env=environment,
        )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._replies = self._process.stdin, self._process.stdout

    def call(self, request: dict, stop: np.ndarray | None, timeout: float | None) -> np.ndarray:
        """The labels, or PartitionError; after one that is not the engine's own report the process is gone."""
        deadline = None if timeout is None else time.monotonic() + timeout
        process = self._process
        try:
            write_frame(self._requests, request)
            while not select.select([self._replies], [], [], POLL_SECONDS)[0]:
                if stop is not None and stop[0]:
                    raise PartitionError(f"{request['engine']} was stopped")
                if deadline is not None and time.monotonic() > deadline:
                    raise PartitionError(f"{request['engine']} took longer than {timeout} s")
            reply = read_frame(self._replies)
        except (OSError, EOFError) as error:
            self.kill()
            raise PartitionError(f"the {request['engine']} process ended (exit status {process.returncode})") from error
        except BaseException:
            self.kill()
            raise
        if reply[0] == "error":
            raise PartitionError(f"{request['engine']} failed: {reply[1]}")
        return reply[1]

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self.abandon()

    def abandon(self) -> None:
        """Close this side of the pipes; an idle process then ends."""
        for stream in (self._requests, self._replies):
            with contextlib.suppress(OSError):
                stream.close()


_lock = threading.Lock()
_idle: list[EngineProcess] = []


def _acquire() -> EngineProcess:
    with _lock:
        while _idle:
            process = _idle.pop()
            if process.alive:
                return process
            process.abandon()
    return EngineProcess()


def _release(process: EngineProcess) -> None:
    with _lock:
        if process.alive and len(_idle) < MAX_IDLE_PROCESSES:
            _idle.append(process)
            return
    process.abandon()


def shut_down_engines() -> None:
    """End the idle worker processes; the next call starts new ones."""
    with _lock:
        processes, _idle[:] = _idle[:], []
    for process in processes:
        process.kill()


def _forget_after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    for process in _idle:
        process.abandon()  # the parent's; a copy of the pipe here would keep it alive
    _idle.clear()


atexit.register(shut_down_engines)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)


def edge_list(graph: TokenGraph) -> tuple[np.ndarray, np.ndarray]:
    """Every edge once: int32 [E, 2] and float32 [E]."""
    rows = np.repeat(np.arange(graph.num_nodes, dtype=np.int32), np.diff(graph.indptr))
    once = rows < graph.indices
    return np.stack([rows[once], graph.indices[once]], axis=1), graph.weights[once]


def partition_graph(
    graph: TokenGraph,
    *,
    engine: str,
    gamma: float,
    passes: int = 1,
    initial: np.ndarray | None = None,
    seed: int = 0,
    max_community_size: int = 0,
    stop: np.ndarray | None = None,
    timeout: float | None = None,
) -> np.ndarray:
    """Communities of a graph by a named engine; arguments and promises as of ``leiden``.

    "igraph" and "leidenalg" run in a worker process, which is killed when ``stop`` is raised or after ``timeout``
    seconds; PartitionError says so, and whatever else went wrong there. Size limit and connectedness are seen to
    afterwards.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(map(repr, ENGINES))}, got {engine!r}")
    if passes < 1:
        raise ValueError(f"passes must be at least 1, got {passes}")
    if engine == "native":
        return leiden(
            graph, gamma=gamma, passes=passes, initial=initial, seed=seed, max_community_size=max_community_size,
            stop=stop,
        )  # fmt: skip
    edges, weights = edge_list(graph)
    if len(edges) == 0:
        return np.arange(graph.num_nodes, dtype=np.int32)
    request = {
        "engine": engine, "num_nodes": graph.num_nodes, "edges": edges, "weights": weights, "gamma": float(gamma),
        "passes": int(passes), "seed": int(seed),
        "initial": None if initial is None else start_labels(graph.num_nodes, initial),
    }  # fmt: skip
    process = _acquire()
    try:
        labels = process.call(request, stop, timeout)
    finally:
        _release(process)
    return enforce_size(graph, labels, gamma=gamma, max_community_size=max_community_size, stop=stop)
