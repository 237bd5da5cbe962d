"""Parts of a long bench, each in a process of its own: prepared side by side, measured one after the other.

What a part compiles takes a minute or two of one core and nothing of the GPU worth naming, so the parts of a wave
compile at the same time; nothing else runs while one of them measures. A part that raises, dies, or hangs leaves a row
that says so, and the others go on: a CUDA error ends one process only.

A part is a picklable description that ``start`` turns into an object with ``prepare()`` and ``measure()``; rows are sent
as they come, so that what a part has measured before it fails is kept.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

Row = dict[str, Any]
GRACE_SECONDS = 45.0  # beyond the limit, for a part that is measuring a cell when it is reached
TAIL = 600  # characters of the output of a process that died


class Prepared(Protocol):
    """What ``Part.start`` makes. ``left()`` are the seconds that are left of the limit."""

    def prepare(self) -> None: ...

    def measure(self, left: Callable[[], float]) -> None: ...


@dataclasses.dataclass(frozen=True)
class Part:
    """One part. rest_gib: memory of the GPU that it holds once it is prepared; peak_gib: while it measures."""

    name: str
    start: Callable[[Part, Callable[[Row], None]], Prepared]
    arguments: Any = None
    rest_gib: float = 0.0
    peak_gib: float = 0.0


@dataclasses.dataclass
class Limits:
    """seconds: of everything; prepare_seconds: of a wave's preparation. gib: of GPU memory. processes: in a wave."""

    seconds: float
    prepare_seconds: float = 330.0
    gib: float = 130.0
    processes: int = 5

    def __post_init__(self) -> None:
        self.until = time.monotonic() + self.seconds

    def left(self) -> float:
        return self.until - time.monotonic()


def failure(name: str, error: str, **more: Any) -> Row:
    return {"kind": "failure", "part": name, "error": error, **more}


def skipped(name: str, limits: Limits) -> Row:
    return {"kind": "skipped", "part": name, "error": f"not begun within {limits.seconds:.0f} s"}


# ---------------------------------------------------------------------- in this process


def run_here(parts: Sequence[Part], limits: Limits) -> Iterator[tuple[Part, Row]]:
    """Prepare and measure each part in turn, in this process."""
    for part in parts:
        rows: list[Row] = []
        try:
            if limits.left() <= 0:
                rows.append(skipped(part.name, limits))
            else:
                began = time.monotonic()
                prepared = part.start(part, rows.append)
                prepared.prepare()
                rows.append({"kind": "prepared", "part": part.name, "seconds": time.monotonic() - began})
                prepared.measure(limits.left)
        except Exception as error:
            traceback.print_exc()
            rows.append(failure(part.name, f"{type(error).__name__}: {str(error)[:400]}"))
        for row in rows:
            yield part, row


# ---------------------------------------------------------------------- in processes


def waves(parts: Sequence[Part], limits: Limits) -> list[list[Part]]:
    """Parts in order, in groups whose memory suffices while one measures and the rest wait."""
    found: list[list[Part]] = []
    for part in parts:
        wave = [*found[-1], part] if found else [part]
        resting = sum(one.rest_gib for one in wave)
        needed = max(resting + one.peak_gib - one.rest_gib for one in wave)
        if found and len(wave) <= limits.processes and needed <= limits.gib:
            found[-1] = wave
        else:
            found.append([part])
    return found


@dataclasses.dataclass
class _Child:
    part: Part
    process: Any
    connection: Connection
    output: Path
    began: float
    ready: bool = False
    ended: bool = False


def run_apart(
    parts: Sequence[Part], limits: Limits, say: Callable[[str], None] = lambda text: None
) -> Iterator[tuple[Part, Row]]:
    """Rows of the parts, as they come; ``say`` is told what goes on."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(2, (os.cpu_count() or 2) // limits.processes)))
    with tempfile.TemporaryDirectory() as folder:
        for number, wave in enumerate(waves(parts, limits)):
            if limits.left() <= 0:
                yield from ((part, skipped(part.name, limits)) for part in wave)
                continue
            say(f"wave {number + 1}: preparing {', '.join(part.name for part in wave)}")
            children = [_spawn(part, Path(folder)) for part in wave]
            try:
                yield from _prepare(children, limits, say)
                for child in children:
                    if not child.ended:
                        yield from _measure(child, limits, say)
            finally:
                for child in children:
                    _end(child)


def _spawn(part: Part, folder: Path) -> _Child:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    output = folder / f"{part.name.replace('/', '-')}.txt"
    process = context.Process(target=_child, args=(part, theirs, str(output)), daemon=False)
    process.start()
    theirs.close()
    return _Child(part, process, ours, output, time.monotonic())


def _prepare(children: list[_Child], limits: Limits, say: Callable[[str], None]) -> Iterator[tuple[Part, Row]]:
    until = min(limits.until, time.monotonic() + limits.prepare_seconds)
    while waiting := [child for child in children if not child.ready and not child.ended]:
        left = until - time.monotonic()
        if left <= 0:
            for child in waiting:
                yield child.part, failure(child.part.name, "not prepared in time", output=_tail(child))
                _end(child)
            return
        for child in _heard(waiting, left):
            for kind, content in _messages(child):
                if kind == "ready":
                    child.ready = True
                    seconds = time.monotonic() - child.began
                    say(f"{child.part.name}: prepared in {seconds:.0f} s")
                    yield child.part, {"kind": "prepared", "part": child.part.name, "seconds": seconds}
                elif kind == "row":
                    yield child.part, content
            if child.ended:
                say(f"{child.part.name}: ended while it was prepared")


def _measure(child: _Child, limits: Limits, say: Callable[[str], None]) -> Iterator[tuple[Part, Row]]:
    if limits.left() <= 0:
        yield child.part, skipped(child.part.name, limits)
        return
    began = time.monotonic()
    child.connection.send(("go", limits.left()))
    while not child.ended:
        left = limits.left() + GRACE_SECONDS
        if left <= 0:
            yield child.part, failure(child.part.name, f"still measuring after {limits.seconds:.0f} s and more")
            break
        for heard in _heard([child], left):
            for kind, content in _messages(heard):
                if kind == "row":
                    yield child.part, content
    _end(child)
    say(f"{child.part.name}: measured in {time.monotonic() - began:.0f} s")


def _heard(children: list[_Child], seconds: float) -> list[_Child]:
    ready = wait([child.connection for child in children], timeout=seconds)
    return [child for child in children if child.connection in ready]


def _messages(child: _Child) -> Iterator[tuple[str, Any]]:
    """What has arrived; the end of the process, with its last words if it did not say goodbye, is the last message."""
    try:
        while child.connection.poll():
            message = child.connection.recv()
            if message[0] == "bye":
                child.ended = True
                return
            yield message
    except (EOFError, OSError):
        child.ended = True
        child.process.join(5)
        error = f"its process ended with {child.process.exitcode}"
        yield "row", failure(child.part.name, error, output=_tail(child))


def _tail(child: _Child) -> str:
    try:
        return child.output.read_text(errors="replace")[-TAIL:]
    except OSError:
        return ""


def _end(child: _Child) -> None:
    child.ended = True
    child.connection.close()  # one that waits for its turn then ends by itself
    child.process.join(3 if child.ready else 0.1)
    if child.process.is_alive():
        child.process.kill()
        child.process.join()


def _child(part: Part, connection: Connection, output: str) -> None:
    """The life of a part in its own process. What it prints goes to a file: its last words, if it dies."""
    with open(output, "w", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout.flush()

    def send(row: Row) -> None:
        connection.send(("row", row))

    try:
        prepared = part.start(part, send)
        prepared.prepare()
        connection.send(("ready", None))
        _, seconds = connection.recv()
        until = time.monotonic() + seconds
        prepared.measure(lambda: until - time.monotonic())
    except EOFError:
        return  # nobody waits for it any more
    except Exception as error:
        traceback.print_exc()
        send(failure(part.name, f"{type(error).__name__}: {str(error)[:400]}"))
    connection.send(("bye", None))
    connection.close()
    sys.stdout.flush()
    os._exit(0)  # threads of the bench, and CUDA, need no goodbye
