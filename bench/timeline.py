"""Who does what while a prompt is prefilled and partitioned: a trace that Perfetto opens, and a picture.

``Timeline`` records, from ``start`` to ``stop``: the kernels of a GPU (torch.profiler), lists of edges on their way to the
host (outbox), jobs of the partition workers, and publications. Times are the machine's clock, so that the host's and the
GPU's stand side by side.
"""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ckv_compile.community.workers import PartitionPool
from ckv_compile.runtime import outbox, publication, sequence

LANES = ("GPU", "outbox", "publish", "partition")  # from above
Event = dict[str, Any]  # name, lane, begin and end in ns since the epoch


class Timeline:
    """Events of one stretch of time. Marks are moments that matter, by name."""

    def __init__(self, device: str) -> None:
        self.device, self.events, self.marks = device, [], {}
        self._lock, self._stack = threading.Lock(), contextlib.ExitStack()
        self._profiler: Any = None

    def start(self) -> None:
        for owner, name, lane, label in (
            (PartitionPool, "_run", "partition", lambda pool, ticket: str(ticket.description)),
            (outbox, "_pack", "outbox", lambda parcel, ring: "lists leave"),
            (publication, "publish_layer", "publish", lambda sequence, layer, **_: f"layer {layer}"),
            (sequence, "publish_layer", "publish", lambda sequence, layer, **_: f"layer {layer}"),
        ):
            if hasattr(owner, name):
                self._stack.enter_context(self._recorded(owner, name, lane, label))
        if self.device.startswith("cuda"):
            self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._profiler.__enter__()
        self.mark("start")

    def mark(self, name: str) -> None:
        self.marks[name] = time.time_ns()

    def stop(self) -> None:
        self.mark("stop")
        if self._profiler is not None:
            torch.cuda.synchronize()
            self._profiler.__exit__(None, None, None)
            self.events += _kernels(self._profiler)
        self._stack.close()

    @contextlib.contextmanager
    def _recorded(self, owner: Any, name: str, lane: str, label: Callable[..., str]) -> Iterator[None]:
        original = getattr(owner, name)

        @functools.wraps(original)
        def recorded(*arguments: Any, **named: Any) -> Any:
            what, begin = label(*arguments, **named), time.time_ns()
            try:
                return original(*arguments, **named)
            finally:
                event = {"name": what, "lane": lane, "thread": threading.get_ident(), "begin": begin}
                with self._lock:
                    self.events.append({**event, "end": time.time_ns()})

        setattr(owner, name, recorded)
        try:
            yield
        finally:
            setattr(owner, name, original)

    # ------------------------------------------------------------------ output

    def lanes(self) -> dict[str, list[Event]]:
        """Events by row of the picture: kernels by stream, workers by thread, what took no time left out."""
        rows: dict[tuple[str, int], list[Event]] = {}
        for event in self.events:
            if event["end"] > event["begin"]:
                rows.setdefault((event["lane"], event["thread"]), []).append(event)
        named, seen = {}, dict.fromkeys(LANES, 0)
        for (lane, _), events in sorted(rows.items(), key=lambda row: (LANES.index(row[0][0]), row[0][1])):
            seen[lane] += 1
            named[f"{lane} {seen[lane]}"] = sorted(events, key=lambda event: event["begin"])
        return named

    def write(self, path: Path) -> None:
        """Chrome's trace format: microseconds since ``start``."""
        base = self.marks["start"]
        trace: list[dict] = []
        for number, (lane, events) in enumerate(self.lanes().items()):
            trace.append({"name": "thread_name", "ph": "M", "pid": 1, "tid": number, "args": {"name": lane}})
            trace += [
                {
                    "name": event["name"], "cat": event["lane"], "ph": "X", "pid": 1, "tid": number,
                    "ts": (event["begin"] - base) / 1e3, "dur": (event["end"] - event["begin"]) / 1e3,
                }
                for event in events
            ]  # fmt: skip
        trace += [
            {"name": name, "ph": "i", "s": "g", "pid": 1, "tid": 0, "ts": (moment - base) / 1e3}
            for name, moment in self.marks.items()
        ]
        path.write_text(json.dumps({"traceEvents": trace, "displayTimeUnit": "ms"}))

    def plot(self, path: Path) -> Path:
        """Draw it beside the trace."""
        from matplotlib.figure import Figure

        base, lanes = self.marks["start"], self.lanes()
        figure = Figure(figsize=(10, 1 + 0.25 * len(lanes)), layout="constrained")
        axes = figure.subplots()
        for row, (lane, events) in enumerate(lanes.items()):
            spans = [((event["begin"] - base) / 1e9, (event["end"] - event["begin"]) / 1e9) for event in events]
            axes.broken_barh(spans, (row - 0.4, 0.8), color=f"C{LANES.index(lane.split()[0])}")
        for name, moment in self.marks.items():
            if name not in ("start", "stop"):
                axes.axvline((moment - base) / 1e9, color="black", linewidth=0.8, linestyle=":")
                axes.text((moment - base) / 1e9, len(lanes) - 0.4, f" {name}", fontsize=8)
        axes.set_yticks(range(len(lanes)), labels=list(lanes), fontsize=7)
        axes.set_xlabel("seconds")
        axes.invert_yaxis()
        picture = path.with_suffix(".svg")
        figure.savefig(picture)
        return picture


def _kernels(profiler: Any) -> list[Event]:
    """Kernels and copies of a GPU, by stream."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
    base = int(trace.get("baseTimeNanoseconds", 0))
    return [
        {
            "name": event["name"][:160], "lane": "GPU", "thread": int(event["tid"]), "begin": base + int(event["ts"] * 1e3),
            "end": base + int((event["ts"] + event["dur"]) * 1e3),
        }
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]  # fmt: skip
