"""Where the time of a prefill and of decode steps goes: kernels of a GPU by what they do, and what the host does beside.

Kernels that Inductor made of our templates are known by the arguments that their sources take, those that are launched
between graphs by their names, those of libraries by parts of theirs. Busy time of kernels is not wall time: kernels of
different streams overlap, and gaps between them belong to none.
"""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from bench.timeline import Event, Timeline

DECODE_KINDS = ("append", "route", "retrieve", "attend", "assign", "linear", "attention", "moe", "copy", "rest")
PREFILL_KINDS = ("attention", "lists", "graph", "linear", "copy", "rest")

# A kernel of ours is the first of these of which it takes all arguments.
BY_ARGUMENTS = (
    ({"KEY_NEW", "VALUE_NEW"}, "append"),
    ({"DOUBTFUL", "NEIGHBOR"}, "lists"),
    ({"CELL", "VALUE"}, "attention"),  # of a prefill; it keeps the strongest cells besides
    ({"CELL"}, "lists"),
    ({"QUERY", "VALUE"}, "attend"),
    ({"TOTAL", "TOP", "MASS"}, "attend"),  # merge_splits
    ({"PLAN"}, "assign"),
    ({"LABEL", "NEIGHBOR"}, "assign"),
    ({"CANDIDATE_SCORE"}, "assign"),
    ({"CANDIDATE", "REST"}, "assign"),
    ({"COARSE"}, "route"),
    ({"MEAN_VALUE"}, "attend"),
    ({"CENTROID"}, "route"),
    ({"MEMBER"}, "retrieve"),
    ({"WEIGHT_0", "INPUT"}, "linear"),
)  # fmt: skip
BY_NAME = (
    (r"^ckv_key_|^ckv_topk_(repair|neighbors)", "lists"),
    (r"^ckv_(place_communities|community_means|coarse_centroids)", "publication"),
    (r"^ckv_topk_prefill|flash|fmha|sdpa|mha_|cudnn.*attention|attention", "attention"),
    (r"group(ed)?_?(gemm|mm)|groupproblem|moe|expert", "moe"),
    (r"gemm|gemv|nvjet|cutlass|xmma|cublas|splitk|dot_kernel", "linear"),
    (r"memcpy|memset", "copy"),
    (r"radix|deviceradix|sort|scatter|index_put|segment|unique|scan", "graph"),  # only beside the prefill's own stream
)  # fmt: skip


def kind_of_arguments(arguments: Iterable[str]) -> str | None:
    """What a kernel with these arguments, as its template calls them, is for; None if it is none of ours."""
    given = set(arguments)
    return next((kind for marks, kind in BY_ARGUMENTS if marks <= given), None)


def kinds_of_code(code: str) -> dict[str, str]:
    """Kernel -> kind, of our kernels in the code that Inductor wrote for a graph."""
    found = {}
    for text in code.split("async_compile.triton('")[1:]:
        signature = re.search(r"'signature': ({.*?})", text)
        if signature is not None:
            names = (name.removeprefix("arg_") for name in ast.literal_eval(signature[1]))
            kind = kind_of_arguments(names)
            if kind is not None:
                found[text.split("'")[0]] = kind
    return found


def loaded_codes() -> list[str]:
    """The code of every graph that Inductor has loaded in this process, oldest first."""
    from torch._inductor.codecache import PyCodeCache

    paths = [getattr(module, "__file__", None) for module in PyCodeCache.modules]
    return [Path(path).read_text() for path in paths if path and Path(path).exists()]


def code_with(kinds: set[str], codes: Iterable[str] | None = None) -> dict[str, str]:
    """Kernel -> kind of the newest graph that has kernels of all these kinds; empty if there is none."""
    for code in reversed(list(loaded_codes() if codes is None else codes)):
        found = kinds_of_code(code)
        if kinds <= set(found.values()):
            return found
    return {}


def kind_of(name: str, ours: dict[str, str], *, beside: bool = False) -> str:
    """What a kernel is for. ours: of the graph that launched it. beside: on another stream than the model's."""
    if name in ours:
        return ours[name]
    for pattern, kind in BY_NAME:
        if re.search(pattern, name, re.IGNORECASE) and (kind != "graph" or beside):
            return kind
    return "graph" if beside else "rest"


def by_kind(
    events: Iterable[Event], ours: dict[str, str], main: int | None = None
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Busy ms of the kernels by kind; the costliest kernels, name -> [calls, ms], with their kinds before the names.

    main: the stream of the model; on others, kernels build graphs and copy. None: all streams are the model's.
    """
    kinds: dict[str, float] = {}
    kernels: dict[str, list[float]] = {}
    for event in events:
        name = event["name"]
        kind = kind_of(name, ours, beside=main is not None and event["thread"] != main)
        ms = (event["end"] - event["begin"]) / 1e6
        kinds[kind] = kinds.get(kind, 0.0) + ms
        entry = kernels.setdefault(f"{kind}: {name}", [0, 0.0])
        entry[0], entry[1] = entry[0] + 1, entry[1] + ms
    costliest = dict(sorted(kernels.items(), key=lambda item: -item[1][1])[:40])
    return kinds, costliest


def busiest_stream(events: Iterable[Event]) -> int | None:
    busy: dict[int, int] = {}
    for event in events:
        busy[event["thread"]] = busy.get(event["thread"], 0) + event["end"] - event["begin"]
    return max(busy, key=busy.__getitem__) if busy else None


class Breakdown:
    """Watches one generation: ``on_token`` is to be called after each of its tokens, ``begin`` before it begins.

    The prefill and everything until the fourth token, when the index has been published, is recorded by a ``Timeline``;
    ``steps`` decode steps after the eighth token by a profiler of their own. Both cost time: read shares from here, and
    times from a generation without it.
    """

    PUBLISHED, STEADY = 4, 8

    def __init__(self, device: str, steps: int = 16) -> None:
        self.device, self.steps = device, steps
        self.timeline = Timeline(device)
        self.steps_timeline = Timeline(device)

    def begin(self) -> None:
        self.timeline.start()

    def on_token(self, tokens: int) -> None:
        if tokens == 1:
            self.timeline.mark("end of prefill")
        if tokens == self.PUBLISHED:
            self.timeline.stop()
        if tokens == self.STEADY:
            self.steps_timeline.start()
        if tokens == self.STEADY + self.steps:
            self.steps_timeline.stop()

    @property
    def tokens(self) -> int:
        """That the generation must have."""
        return self.STEADY + self.steps + 2

    def prefill(self) -> dict[str, Any]:
        """Of the watched prefill: seconds of wall time, busy seconds of kernels by kind, and what the host did beside.

        publication_s: on the caller's thread, between steps. partition_busy_s: of the workers, summed over them.
        index_after_s: from the end of the prefill until the last partition was back.
        """
        timeline = self.timeline
        end = timeline.marks["end of prefill"]
        kernels = [event for event in timeline.events if event["lane"] == "GPU"]
        main = busiest_stream(kernels)
        within = [event for event in kernels if event["begin"] < end or event["thread"] != main]
        ours = code_with({"lists"}) or code_with({"attention"})
        kinds, costliest = by_kind(within, ours, main)
        host = {
            lane: [event for event in timeline.events if event["lane"] == lane]
            for lane in ("outbox", "publish", "partition")
        }

        def busy(lane: str) -> float:
            return sum(event["end"] - event["begin"] for event in host[lane]) / 1e9

        last = max((event["end"] for event in host["partition"]), default=end)
        return {
            "wall_s": (end - timeline.marks["start"]) / 1e9,
            "busy_s": {kind: ms / 1e3 for kind, ms in kinds.items()},
            "partition_busy_s": busy("partition"), "partitions": len(host["partition"]),
            "publication_s": busy("publish"), "outbox_s": busy("outbox"),
            "index_after_s": max(0.0, (last - end) / 1e9), "kernels": costliest,
        }  # fmt: skip

    def decode(self) -> dict[str, Any]:
        """Per decode step: wall ms while it was watched, busy ms of kernels by kind, and kernels launched."""
        timeline = self.steps_timeline
        kernels = [event for event in timeline.events if event["lane"] == "GPU"]
        kinds, costliest = by_kind(kernels, code_with({"append", "route", "retrieve"}))
        wall = (timeline.marks["stop"] - timeline.marks["start"]) / 1e6
        return {
            "wall_ms": wall / self.steps, "busy_ms": {kind: ms / self.steps for kind, ms in kinds.items()},
            "kernels_a_step": len(kernels) / self.steps, "steps": self.steps, "kernels": costliest,
        }  # fmt: skip


class ModuleClock:
    """Milliseconds that some modules of a model take in its forward calls, launches and gaps included (CUDA events)."""

    def __init__(self, model: torch.nn.Module, kinds: dict[str, str], device: str) -> None:
        """kinds: suffix of a module's class name -> kind."""
        self.device, self.spans = device, []  # (kind, begin, end)
        self._hooks: list[Any] = []
        for module in model.modules():
            kind = next((kind for suffix, kind in kinds.items() if type(module).__name__.endswith(suffix)), None)
            if kind is not None:
                opened: list[Any] = []
                self._hooks += [
                    module.register_forward_pre_hook(lambda *_, opened=opened: opened.append(self._now())),
                    module.register_forward_hook(
                        lambda *_, opened=opened, kind=kind: self.spans.append((kind, opened.pop(), self._now()))
                    ),
                ]

    def _now(self) -> Any:
        if not self.device.startswith("cuda"):
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def forget(self) -> None:
        self.spans.clear()

    def total_ms(self) -> dict[str, float]:
        """By kind, since the last ``forget``."""
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()
        between: Callable[[Any, Any], float] = lambda begin, end: (  # noqa: E731
            begin.elapsed_time(end) if self.device.startswith("cuda") else (end - begin) * 1e3
        )
        totals: dict[str, float] = {}
        for kind, begin, end in self.spans:
            totals[kind] = totals.get(kind, 0.0) + between(begin, end)
        return totals

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
