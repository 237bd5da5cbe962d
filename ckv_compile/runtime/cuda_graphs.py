"""CUDA graphs of compiled graphs: what Inductor recorded or why not, and what runs while the caller captures.

Inductor's cudagraph trees cannot run inside a capture of the caller's (torch/_inductor/cudagraph_trees.py of 2.11 and
2.13, ``CUDAGraphTreeManager._run``): a first call warms up on the tree's own stream, a second one synchronises and
begins a capture of its own, a later one launches a recorded graph. None asks whether the stream is capturing, and CUDA
refuses all three then. But the trees wrap a callable that launches the same kernels one by one; it is kept, and it is
what runs under capture. So one compilation serves both.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ckv_compile.errors import CaptureError

_WATCHED_CALLS = 3  # warm-up, recording, replay: by then Inductor has decided
_LOGGER = "torch._inductor.cudagraph_utils.__cudagraphs"  # where Inductor says why it skips


def capturing() -> bool:
    """Whether the caller records the current stream into a CUDA graph: no synchronisation, no work for the host."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def require_no_capture(what: str) -> None:
    """Raise CaptureError if the current stream is being captured."""
    if capturing():
        raise CaptureError(
            f"{what} cannot be captured in a CUDA graph; run one decode step on the same cache, outside of "
            "torch.cuda.graph, before capturing one"
        )


class CudaGraphs:
    """What became of one compiled graph.

    refusal: why Inductor is not asked to record it, or None. outputs: outputs of the graph that the caller keeps, as
    (position, position of the input of which it may be a view, or None).
    """

    def __init__(self, refusal: str | None = None, outputs: Sequence[tuple[int, int | None]] = ()) -> None:
        self.refusal, self.outputs = refusal, outputs
        self.parts = 0  # functions that were handed to the trees: more than one if an operator cannot be recorded
        self.skipped: list[str] = []  # Inductor's reasons

    def verdict(self) -> str:
        """One phrase for the report."""
        if self.refusal is not None:
            return f"not captured: {self.refusal}"
        if self.skipped:
            return f"not captured: {'; '.join(self.skipped)}"
        if not self.parts:
            return "not captured: Inductor found nothing to record"
        return "captured" if self.parts == 1 else f"captured in {self.parts} parts"

    def compile(self, function: Callable[[], Callable]) -> Callable:
        """What ``function`` compiles, made fit for a caller's capture; the calls in which Inductor decides are watched.

        Runs under dynamo's compile lock, so no other compilation sees the changed ``cudagraphify``.
        """
        from torch._inductor import compile_fx

        original = compile_fx.cudagraphify

        def cudagraphify(model: Callable, static_input_idxs: Sequence[int] = (), **kwargs: Any) -> Callable:
            self.parts += 1
            return _stepping_aside(model, original(model, static_input_idxs, **kwargs), static_input_idxs)

        compile_fx.cudagraphify = cudagraphify
        try:
            with self._watching():
                compiled = function()
        finally:
            compile_fx.cudagraphify = original
        return compiled if self.refusal is not None else self._watched(compiled)

    def _watched(self, compiled: Callable) -> Callable:
        left = _WATCHED_CALLS

        def run(*args: Any) -> Any:
            nonlocal left
            if left <= 0:
                return compiled(*args)
            left -= 1
            with self._watching():
                return compiled(*args)

        return run

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        from torch._dynamo.utils import counters

        logger, handler = logging.getLogger(_LOGGER), _Reasons(self.skipped)
        skips = counters["inductor"]["cudagraph_skips"]
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            if counters["inductor"]["cudagraph_skips"] > skips and not self.skipped:
                self.skipped.append("Inductor skipped it; TORCH_LOGS=cudagraphs says why")

    def keep(self, results: Sequence[Any], args: Sequence[Any]) -> Sequence[Any]:
        """``results`` that stay what they are: the next replay overwrites the memory of a recorded graph's outputs.

        That these clones are all that lives on is also why no step has to be marked: with no live output of an earlier
        step a tree starts anew by itself, and a mark in the middle of a model with graph breaks would free what its
        other graphs still need.
        """
        if self.refusal is not None or not self.parts:
            return results
        kept = list(results)
        for position, source in self.outputs:
            result = kept[position]
            if source is None or _memory(result) != _memory(args[source]):
                kept[position] = result.clone()
        return kept


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _stepping_aside(model: Callable, replay: Callable, static_input_idxs: Sequence[int]) -> Callable:
    """``replay``, or ``model`` itself while the caller captures."""
    from torch._inductor.compile_fx import get_input_idxs_to_check
    from torch._inductor.utils import copy_misaligned_inputs

    def run(inputs: list) -> Any:
        if not capturing():
            return replay(inputs)
        copy_misaligned_inputs(inputs, get_input_idxs_to_check(inputs, static_input_idxs))  # as the trees do
        return model(inputs)

    return run


class _Reasons(logging.Handler):
    """Collects what the calling thread logs."""

    def __init__(self, reasons: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.reasons, self.thread = reasons, threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == self.thread:
            reason = " ".join(record.getMessage().removeprefix("skipping cudagraphs due to ").split())
            if reason not in self.reasons:
                self.reasons.append(reason)
