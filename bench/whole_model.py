"""A whole model of random weights under the backend: its compiled graphs, bare replays of a step, generations and rows.

What ``bench.decode_step`` and ``bench.speed_tables`` share.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from rich.console import Console

import ckv_compile.backend
from bench.decode_layer import fill_index, fill_slab
from bench.dense_step import SHAPES, DenseStep, cache_argument, fastest_form, random_model
from bench.planted import make_ready
from bench.timing import capture, interleaved, synchronize, timing
from ckv_compile.config import CommunityConfig
from ckv_compile.passes.rewrite_plan import AttentionGeometry
from ckv_compile.runtime.registry import REGISTRY
from ckv_compile.runtime.sequence import Sequence
from ckv_compile.runtime.slab import KVSlab

SLACK = 1024  # tokens of room behind a context: every replay appends one
WARM_TOKENS = 8  # of a generation, before the steady state
SMALL_OPTIONS = {"budget": 128, "block_size": 256, "append_block": 64, "recent_window": 16}


class ModelBench:
    """One model and the rows measured on it. Rows are also what is left when a later part fails.

    args: model, layers, graph, device, small, interpret, dense_static, contexts, tail, repetitions, least_ms, new_tokens,
    segments, warm_up_context, wait_index and wait_seconds of a command line. model: that of ``args.model``, if it is there
    already. options: of the backend, further ones.
    """

    def __init__(self, args: argparse.Namespace, console: Console, model: Any = None, **options: Any) -> None:
        self.args, self.console, self.rows = args, console, []
        self.device, shape = args.device, SHAPES[args.model]
        self.layers = args.layers or shape.layers
        self.dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
        self.model = model
        if model is None:
            with self.part("build"):
                self.model = random_model(shape, self.layers, self.dtype, args.device)
        self.options: dict[str, Any] = (dict(SMALL_OPTIONS) if args.small else {}) | options
        if args.graph != "keys":
            self.options["graph"] = args.graph
        self.config = CommunityConfig.from_options(self.options)[0]
        self.geometry = AttentionGeometry(
            shape.full_layers(self.layers), shape.heads, shape.kv_heads, shape.head_dim, self.dtype, self.model.device
        )
        self.heads, self.vocab = shape.heads, shape.vocab
        self.recorder = Recorder()
        self.compiled = torch.compile(self.model, backend="communitykv", options=self.options or None)

    def row(self, kind: str, arm: str, **entries: Any) -> dict:
        whole = self.layers == SHAPES[self.args.model].layers
        row = {"kind": kind, "arm": arm, "model": self.args.model, "layers": self.layers, "whole": whole}
        row |= {"graph": self.args.graph, **entries}
        self.rows.append(row)
        return row

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Times a part of the run; if it fails the run goes on, and a row says why."""
        began = time.perf_counter()
        try:
            yield
        except Exception as error:
            self.console.print(f"[red]{name} failed[/red]: {type(error).__name__}: {str(error)[:400]}")
            traceback.print_exc()
            self.row("failure", name, error=f"{type(error).__name__}: {str(error)[:400]}")
            if name == "build":
                raise
        finally:
            synchronize(self.args.device)
            self.console.print(f"{name}: {time.perf_counter() - began:.1f} s")

    def free(self) -> None:
        gc.collect()
        REGISTRY.free_memory()
        if self.device.startswith("cuda"):
            torch.cuda.empty_cache()

    def prompt(self, tokens: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator(self.device).manual_seed(tokens)
        ids = torch.randint(2, self.vocab, (1, tokens), device=self.device, generator=generator)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def forget_memory(self) -> None:
        """Drop this bench's slab and recorded step, then what nobody uses."""
        self.recorder.forget()
        self.free()

    # ------------------------------------------------------------------ bare steps

    def new_slab(self, context: int) -> KVSlab:
        """Random K and V of every layer that the backend rewrites, with room for some steps behind ``context`` tokens."""
        size = self.geometry
        slab = KVSlab(
            size.num_layers, 1, size.num_kv_heads, size.head_dim, context + SLACK, self.dtype, self.model.device
        )  # fmt: skip
        fill_slab(slab)
        return slab

    def dense_step(
        self, example: list[torch.Tensor], tensors: list[torch.Tensor] | None = None
    ) -> tuple[DenseStep | None, str]:
        """The compiled dense step and the form of its attention, the fastest on ``example``; None if it fails.

        Both are K and V of layer 0, of layer 1, ... each ``[1, H, n, D]``; the step is compiled on ``tensors``, or on the
        example.
        """
        with self.part("dense: compile"):
            form, attend = fastest_form(example, self.heads, self.device)
            dense = DenseStep(self.model, attend, compiled=not self.args.interpret, dynamic=not self.args.dense_static)
            dense.at(tensors or example)()
            return dense, form
        return None, ""

    def adopt(self, slab: KVSlab) -> Sequence:
        """Make the backend know a slab that it did not allocate, until ``disown``."""
        REGISTRY.pool._slabs.append(slab)
        return REGISTRY.attach(slab, self.config, self.geometry, 1)

    def disown(self, slab: KVSlab) -> None:
        self.recorder.forget()
        REGISTRY.pool._slabs[:] = [one for one in REGISTRY.pool._slabs if one is not slab]

    def indexed(self, slab: KVSlab, sequence: Sequence, context: int) -> transformers.DynamicCache:
        """The cache that ``generate`` gets: ``context`` tokens of the slab, in random communities."""
        slab.reserved = True
        sequence.restart([0], context)
        fill_index(sequence, context, self.config.mean_size)
        views = slab.views(context)
        for view in views:
            torch._dynamo.maybe_mark_dynamic(view, 2)
        cache = filled_cache(self.model, views)
        slab.reserved = False
        return cache

    def recorded_step(self, slab: KVSlab, sequence: Sequence, context: int) -> Callable:
        """The backend's decode graph with the arguments of one step of ``generate`` over the slab, as one CUDA graph."""
        cache = {cache_argument(self.model): self.indexed(slab, sequence, context)}
        with self.recorder.recording():
            self.compiled.generate(**self.prompt(context + 1), **cache, max_new_tokens=4, do_sample=False)
        if self.recorder.call is None:
            raise RuntimeError(
                "generate ran no decode graph of the backend: " + str(ckv_compile.explain(self.model, show=False))
            )
        if sequence.length <= context:
            raise RuntimeError("the backend did not recognise the cache")
        function, inputs = self.recorder.call, self.recorder.inputs
        return capture(lambda: function(*inputs), self.device, warm_up=0)

    def time_steps(
        self, context: int, slab: KVSlab, dense: DenseStep | None, form: str, ours: Callable | None,
        sequence: Sequence | None, kind: str = "step",
    ) -> None:  # fmt: skip
        """Rows of one context: replays of the dense step and of ours, in turns. kind "nonattention": no index is made."""
        args, held = self.args, {}
        steps: dict[str, Callable] = {}
        before: dict[str, Callable] = {}
        if dense is not None:
            with self.part(f"dense at {context}: capture"):
                steps["dense"] = capture(dense.at(contiguous(slab, context)), self.device)
        if ours is not None and sequence is not None:
            with self.part(f"ours at {context}: fill the index"):
                sequence.restart([0], context - 1)
                if kind == "step":
                    indexed = max(context - 1 - args.tail, context // 2)
                    held = fill_index(sequence, indexed, self.config.mean_size) | {"indexed": indexed}
                steps["ours"], before["ours"] = ours, lambda: sequence.length_device.fill_(context - 1)
        with self.part(f"steps at {context}"), torch.no_grad():
            times = interleaved(
                steps, args.repetitions, self.device, before=before, least_ms=args.least_ms, most_calls=20
            )
            for arm, values in times.items():
                more = {"dense_form": form} if arm == "dense" else held
                self.row(kind, arm, context=context, **timing(values), **more)

    # ------------------------------------------------------------------ generate

    def generation(
        self, model: Any, context: int, *, new_tokens: int | None = None, planted: Callable | None = None,
        on_token: Callable[[int], None] | None = None, **options: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """One generation: warm prefill, steady state per token, peak memory beyond what was allocated before it.

        planted: called after the first token, in place of a wait for the index. on_token: called after every token, with
        the number of tokens so far. options: of ``generate``.
        """
        args, cuda = self.args, self.device.startswith("cuda")
        self.free()
        make_ready(self.geometry, self.config, context)
        inputs = self.prompt(context)
        ours, tokens = model is self.compiled, new_tokens or args.new_tokens
        before = ckv_compile.explain(self.model, show=False) if ours else None
        segment = (tokens - WARM_TOKENS) // args.segments
        clock = Clock(self.device, args.wait_seconds if ours and args.wait_index else None, segment)
        clock.planted, clock.on_token = planted, on_token
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        synchronize(self.device)
        clock.start()
        began = time.perf_counter()
        model.generate(
            **inputs, max_new_tokens=tokens, do_sample=False,
            stopping_criteria=transformers.StoppingCriteriaList([clock]), **options,
        )  # fmt: skip
        synchronize(self.device)
        result = {
            "prefill_s": clock.prefill_s, **timing(clock.segments), "index_wait_s": clock.wait_s, "new_tokens": tokens,
            "whole_s": time.perf_counter() - began - clock.wait_s,
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
        }  # fmt: skip
        if before is not None:
            after = ckv_compile.explain(self.model, show=False)
            result["decode_steps"] = after.decode_steps - before.decode_steps
            result["sparse_steps"] = after.sparse_steps - before.sparse_steps
            result["index_lag_s"] = after.index_lag_seconds[len(before.index_lag_seconds) :]
            result["partition_cpu_s"] = after.partition_seconds - before.partition_seconds
        return result


def contiguous(slab: KVSlab, tokens: int) -> list[torch.Tensor]:
    """K and V of every layer as ``[1, H, tokens, D]``, contiguous, in the slab's own memory."""
    heads, dim = slab.buffer.shape[3:]
    return [part.view(-1)[: heads * tokens * dim].view(1, heads, tokens, dim) for part in slab.buffer]


def filled_cache(model: torch.nn.Module, tensors: list[torch.Tensor]) -> transformers.DynamicCache:
    """A cache as ``generate`` makes it, so that its graphs serve both, around K and V of layer 0, of layer 1, ...

    tensors: of the layers that see all of the context. Those with a window get random keys and values of their own.
    """
    cache, given = transformers.DynamicCache(config=model.config), iter(tensors)
    for layer in cache.layers:
        if getattr(layer, "is_sliding", False):
            batch, heads, _, dim = tensors[0].shape
            shape = (batch, heads, layer.sliding_window - 1, dim)  # the next token completes the window
            key, value = (torch.randn(shape, dtype=tensors[0].dtype, device=tensors[0].device) for _ in range(2))
            layer.cumulative_length = tensors[0].shape[2]
        else:
            key, value = next(given), next(given)
        layer.lazy_initialization(key, value)
        layer.keys, layer.values = key, value
    return cache


class Clock(transformers.StoppingCriteria):
    """Called by ``generate`` after every token; never stops it. Times in seconds, segments in ms per token.

    wait: seconds, at most, that the second token waits for the index; None: it does not. segment: tokens of one.
    """

    def __init__(self, device: str, wait: float | None, segment: int) -> None:
        self.device, self.wait, self.segment = device, wait, max(1, segment)
        self.calls, self.prefill_s, self.wait_s, self.segments = 0, 0.0, 0.0, []
        self.planted: Callable[[], Any] | None = None
        self.on_token: Callable[[int], None] | None = None

    def start(self) -> None:
        self.began = time.perf_counter()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.calls += 1
        if self.calls == 1:
            synchronize(self.device)
            now = time.perf_counter()
            self.prefill_s = now - self.began
        if self.on_token is not None:
            self.on_token(self.calls)
        if self.calls == 1:
            now = time.perf_counter()
            if self.planted is not None:
                self.planted()
            elif self.wait is not None:
                wait_for_partitions(self.wait)
            self.wait_s = time.perf_counter() - now
        past = self.calls - WARM_TOKENS
        if past >= 0 and past % self.segment == 0:
            synchronize(self.device)
            now = time.perf_counter()
            if past:
                self.segments.append((now - self.began) * 1e3 / self.segment)
            self.began = now
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def wait_for_partitions(seconds: float) -> None:
    """Until no partition of any cache is under way, or for so long; the next step publishes what came back."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        if all(ticket.done for sequence in REGISTRY.sequences() for ticket in list(sequence.work.pending)):
            return
        time.sleep(0.01)


class Recorder:
    """Keeps the compiled decode graph of a dynamic cache, and the arguments of its latest call, while recording."""

    def __init__(self) -> None:
        self.call: Callable | None = None
        self.inputs: tuple = ()
        self._on = False
        original = ckv_compile.backend.GraphRunner
        original = getattr(original, "_bench_original", original)

        def runner(plan: Any, config: Any, compiled: Callable, *rest: Any, **named: Any) -> Any:
            if plan.phase == "decode" and plan.cache.name == "DYNAMIC":
                compiled = _Recorded(compiled, self)
            return original(plan, config, compiled, *rest, **named)

        runner._bench_original = original  # type: ignore[attr-defined]
        ckv_compile.backend.GraphRunner = runner  # type: ignore[assignment,misc]

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        self._on = True
        try:
            yield
        finally:
            self._on = False

    def forget(self) -> None:
        self.call, self.inputs = None, ()


class _Recorded:
    """A compiled graph that tells of its calls; everything else of it shows through."""

    def __init__(self, inner: Callable, recorder: Recorder) -> None:
        self._inner, self._recorder = inner, recorder

    def __call__(self, *inputs: Any) -> Any:
        if self._recorder._on:
            self._recorder.call, self._recorder.inputs = self._inner, inputs
        return self._inner(*inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
