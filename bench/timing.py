"""Timing of competing functions: CUDA graphs, interleaved repetitions, what the memory can do."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

Action = Callable[[], Any]


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def capture(function: Action, device: str, warm_up: int = 2) -> Action:
    """A replay of the function as one CUDA graph, after ``warm_up`` calls; on other devices the function itself."""
    if not device.startswith("cuda"):
        for _ in range(min(warm_up, 1)):
            function()
        return function
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_up):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()

    def replay(_kept: Action = function) -> None:  # the graph reads tensors that only the function may hold
        graph.replay()

    return replay


def time_calls(function: Action, calls: int, device: str) -> float:
    """Milliseconds per call, back to back."""
    if device.startswith("cuda"):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for _ in range(calls):
            function()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / calls
    began = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - began) * 1e3 / calls


def interleaved(
    arms: Mapping[str, Action],
    repetitions: int,
    device: str,
    *,
    before: Mapping[str, Action] | None = None,
    least_ms: float = 4.0,
    most_calls: int = 50,
) -> dict[str, list[float]]:
    """Milliseconds per call of every arm, ``repetitions`` times round robin, so that a disturbance meets all.

    Each timing spans at least ``least_ms`` or ``most_calls`` calls. ``before`` holds what resets an arm's state first.
    """
    before = before or {}

    def reset(name: str) -> None:
        if name in before:
            before[name]()

    calls = {}
    for name, function in arms.items():
        reset(name)
        calls[name] = max(2, min(most_calls, round(least_ms / max(time_calls(function, 2, device), 1e-4))))
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(repetitions):
        for name, function in arms.items():
            reset(name)
            times[name].append(time_calls(function, calls[name], device))
    return times


def timing(times: list[float]) -> dict[str, Any]:
    """The entries of a row: median, spread and every repetition, in ms."""
    return {
        "median_ms": statistics.median(times), "spread_ms": max(times) - min(times), "raw_ms": times,
    }  # fmt: skip


def copy_ceiling(device: str, nbytes: int = 4 << 30) -> float:
    """TB/s, read and written bytes together, of a large copy on the device."""
    source = torch.empty(nbytes, dtype=torch.uint8, device=device).zero_()
    target = torch.empty_like(source)
    best = min(time_calls(lambda: target.copy_(source), 5, device) for _ in range(3))
    return 2 * nbytes / best / 1e9


def label_contexts(axes: Any, contexts: Iterable[int]) -> None:
    """A logarithmic axis whose ticks are these context lengths."""
    axes.set_xscale("log")
    ticks = sorted(contexts)
    axes.set_xticks(ticks, labels=[f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in ticks])
    axes.minorticks_off()
