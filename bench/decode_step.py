"""Decode steps of whole models: ours against the strongest dense step, and unmodified ``generate`` against eager.

    python -m bench.decode_step                                                  # Qwen3-8B: steps, then generate at 128k
    python -m bench.decode_step --arms dense ours --contexts 131072              # bare steps only
    python -m bench.decode_step --arms generate eager static                     # generate only
    python -m bench.decode_step --arms generate eager --graph attention --planted-edges   # the paper's graph
    python -m bench.decode_step --arms ours --contexts 1048576 --layers 18       # a million tokens, half of the layers
    python -m bench.decode_step --small --device cpu                             # does it run?
    python -m bench.decode_step --plot bench/results/decode_step-....json

Real configurations, random weights made on the device, batch 1, bfloat16.

Steps (``dense``, ``ours``) are bare replays of one CUDA graph each, in turns. ``dense``: the same transformers model
under Inductor with our linear layers, K and V contiguous and of exactly the context, cuDNN attention without a mask
(bench/dense_step.py).
``ours``: the graph that ``generate`` runs through the backend, over a cache of random K and V in the backend's own slab
with random communities (bench/decode_layer.py), the last ``--tail`` tokens not indexed. Both arms read the same memory.
``nonattention`` is the same replay with a context of 16 tokens.

Generate: a true prefill of ``--generate-context`` random tokens, then ``--new-tokens`` greedy tokens with transformers'
default cache. ``generate`` has the one line ``torch.compile(model, backend="communitykv")``, ``eager`` is the same script
without it. Time per token is that of ``--segments`` equal parts of the steady state, from the ninth token on, each
ended by one synchronisation. With ``--wait-index`` the second token waits until every layer is indexed; the wait is
reported and in no timing. ``static`` and ``dynamic`` compare ``cache_implementation="static"`` with the default, both
through the backend, at ``--static-context``. Compilation is warmed up on short prompts, so prefill times are warm.
Attention of random weights makes graphs unlike any text's: ``--planted-edges`` puts others in their place
(bench/planted.py).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

import ckv_compile.backend
from bench.decode_layer import fill_index, fill_slab
from bench.dense_step import SHAPES, DenseStep, cache_argument, fastest_form, random_model
from bench.planted import planted_edges
from bench.results_file import draw, write_results
from bench.timeline import Timeline
from bench.timing import capture, interleaved, label_contexts, synchronize, timing
from ckv_compile.config import CommunityConfig
from ckv_compile.passes.rewrite_plan import AttentionGeometry
from ckv_compile.runtime.registry import REGISTRY
from ckv_compile.runtime.sequence import Sequence
from ckv_compile.runtime.slab import KVSlab

ARMS = ("dense", "ours", "generate", "eager", "static")
CONTEXTS = (65536, 131072, 262144, 524288, 32768)  # the first compiles; the largest sizes the buffers
LABELS = {32768: "32k", 65536: "64k", 131072: "128k", 262144: "256k", 524288: "512k"}
MILLION = 1_000_000
SLACK = 1024  # tokens of room behind a context: every replay appends one
TINY_CONTEXT = 16
WARM_TOKENS = 8  # of a generation, before the steady state
SMALL_OPTIONS = {"budget": 128, "block_size": 256, "append_block": 64, "recent_window": 16}


class Bench:
    """One model and the rows measured on it. Rows are also what is left when a later part fails."""

    def __init__(self, args: argparse.Namespace, console: Console) -> None:
        self.args, self.console, self.rows = args, console, []
        self.device, shape = args.device, SHAPES[args.model]
        self.layers = args.layers or shape.layers
        self.dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
        with self.part("build"):
            self.model = random_model(shape, self.layers, self.dtype, args.device)
        self.options: dict[str, Any] = dict(SMALL_OPTIONS) if args.small else {}
        if args.graph != "keys":
            self.options["graph"] = args.graph
        self.config = CommunityConfig.from_options(self.options)[0]
        self.geometry = AttentionGeometry(
            self.layers, shape.heads, shape.kv_heads, shape.head_dim, self.dtype, self.model.device
        )
        self.heads, self.vocab = shape.heads, shape.vocab
        self.recorder = Recorder()
        self.compiled = torch.compile(self.model, backend="communitykv", options=self.options or None)

    def row(self, kind: str, arm: str, **entries: Any) -> dict:
        whole = self.layers == SHAPES[self.args.model].layers
        row = {"kind": kind, "arm": arm, "model": self.args.model, "layers": self.layers, "whole": whole}
        row |= {"graph": self.args.graph, "planted_edges": self.args.planted_edges, **entries}
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

    # ------------------------------------------------------------------ bare steps

    def steps(self) -> None:
        args = self.args
        if "ours" in args.arms and "generate" in args.arms:
            # Older transformers would otherwise compile the step of a filled cache, and then that of generate anew.
            with self.part("generate: compile"):
                self.compiled.generate(**self.prompt(args.warm_up_context), max_new_tokens=4, do_sample=False)
            self.free()
        most = max(args.contexts)
        slab = KVSlab(
            self.layers,
            1,
            self.geometry.num_kv_heads,
            self.geometry.head_dim,
            most + SLACK,
            self.dtype,
            self.model.device,
        )
        fill_slab(slab)
        dense, form = self.dense_step(slab) if "dense" in args.arms else (None, "")
        sequence = ours = None
        if "ours" in args.arms:
            with self.part("ours: compile and capture"):
                sequence = self.adopt(slab)
                ours = self.recorded_step(slab, sequence)
        for context in [*args.contexts, TINY_CONTEXT]:
            tiny = context == TINY_CONTEXT
            steps, before, held = {}, {}, {}
            if dense is not None:
                with self.part(f"dense at {context}: capture"):
                    steps["dense"] = capture(dense.at(contiguous(slab, context)), self.device)
            if ours is not None:
                with self.part(f"ours at {context}: fill the index"):
                    sequence.restart([0], context - 1)
                    if not tiny:
                        indexed = max(context - 1 - args.tail, context // 2)
                        held = fill_index(sequence, indexed, self.config.mean_size) | {"indexed": indexed}
                    steps["ours"], before["ours"] = ours, self.length_setter(sequence, context - 1)
            with self.part(f"steps at {context}"), torch.no_grad():
                times = interleaved(
                    steps, args.repetitions, self.device, before=before, least_ms=args.least_ms, most_calls=20
                )
                for arm, values in times.items():
                    more = {"dense_form": form} if arm == "dense" else held
                    self.row("nonattention" if tiny else "step", arm, context=context, **timing(values), **more)
        self.recorder.forget()
        REGISTRY.pool._slabs[:] = [one for one in REGISTRY.pool._slabs if one is not slab]

    def dense_step(self, slab: KVSlab) -> tuple[DenseStep | None, str]:
        """The compiled dense step and the form of its attention, or None if it does not compile."""
        with self.part("dense: compile"):
            context = self.args.contexts[0]
            form, attend = fastest_form(contiguous(slab, context), self.heads, self.device)
            dense = DenseStep(self.model, attend, compiled=not self.args.interpret, dynamic=not self.args.dense_static)
            dense.at(contiguous(slab, context))()
            return dense, form
        return None, ""

    def adopt(self, slab: KVSlab) -> Sequence:
        """Make the backend know a slab that it did not allocate."""
        REGISTRY.pool._slabs.append(slab)
        return REGISTRY.attach(slab, self.config, self.geometry, 1)

    def recorded_step(self, slab: KVSlab, sequence: Sequence) -> Callable:
        """The backend's decode graph with the arguments of one step of ``generate`` over the slab, as one CUDA graph."""
        context = self.args.contexts[0]
        slab.reserved = True
        sequence.restart([0], context)
        fill_index(sequence, context, self.config.mean_size)
        views = slab.views(context)
        for view in views:
            torch._dynamo.maybe_mark_dynamic(view, 2)
        cache = filled_cache(self.model, views)
        del views, view
        slab.reserved = False
        with self.recorder.recording():
            self.compiled.generate(
                **self.prompt(context + 1), **{cache_argument(self.model): cache}, max_new_tokens=4, do_sample=False
            )
        if self.recorder.call is None:
            raise RuntimeError(
                "generate ran no decode graph of the backend: " + str(ckv_compile.explain(self.model, show=False))
            )
        if sequence.length <= context:
            raise RuntimeError("the backend did not recognise the cache")
        function, inputs = self.recorder.call, self.recorder.inputs
        return capture(lambda: function(*inputs), self.device, warm_up=0)

    def length_setter(self, sequence: Sequence, length: int) -> Callable[[], None]:
        return lambda: sequence.length_device.fill_(length)

    # ------------------------------------------------------------------ generate

    def generations(self) -> None:
        """Runs of ``generate`` and ``eager`` in turns, after short ones that compile."""
        args, context = self.args, self.args.generate_context
        models = {"eager": self.model, "generate": self.compiled}
        arms = [arm for arm in ("eager", "generate") if arm in args.arms]
        for arm in arms:
            with self.part(f"{arm}: warm-up"):
                for tokens in (args.warm_up_context, args.warm_up_context * 3 // 2):
                    models[arm].generate(**self.prompt(tokens), max_new_tokens=4, do_sample=False)
        for _ in range(args.generate_runs):
            for arm in arms:
                with self.part(f"{arm} at {context}"):
                    self.row("generate", arm, context=context, **self.generation(models[arm], context))
        if args.timeline and "generate" in arms:
            with self.part("timeline"):
                self.record_timeline(context)

    def record_timeline(self, context: int) -> None:
        """One more prefill and partition, recorded: a trace for Perfetto and, where matplotlib is there, a picture."""
        self.free()
        timeline, clock = Timeline(self.device), Clock(self, wait=True, segment=1 << 30)
        clock.on_first_token = lambda: timeline.mark("end of prefill")
        inputs = self.prompt(context)
        timeline.start()
        clock.start()
        self.compiled.generate(
            **inputs, max_new_tokens=WARM_TOKENS, do_sample=False,
            stopping_criteria=transformers.StoppingCriteriaList([clock]),
        )  # fmt: skip
        timeline.stop()
        timeline.write(self.args.timeline)
        draw(self.console, timeline.plot, self.args.timeline)

    def static(self) -> None:
        """A static against a dynamic cache, both through the backend."""
        context = self.args.static_context
        kinds = {"static": {"cache_implementation": "static"}, "dynamic": {}}
        for kind, options in kinds.items():
            with self.part(f"{kind}: warm-up"):  # of the very same capacity: another one would compile again
                self.generation(self.compiled, context, **options)
        for _ in range(max(1, self.args.static_runs)):
            for kind, options in kinds.items():
                with self.part(f"{kind} at {context}"):
                    self.row("generate", kind, context=context, **self.generation(self.compiled, context, **options))

    def generation(self, model, context: int, **options: Any) -> dict[str, Any]:
        """One generation: warm prefill, steady state per token, peak memory beyond what was allocated before it."""
        args, cuda = self.args, self.device.startswith("cuda")
        self.free()
        inputs = self.prompt(context)
        ours = model is self.compiled
        before = ckv_compile.explain(self.model, show=False) if ours else None
        clock = Clock(self, wait=ours and args.wait_index, segment=(args.new_tokens - WARM_TOKENS) // args.segments)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        synchronize(self.device)
        clock.start()
        model.generate(
            **inputs, max_new_tokens=args.new_tokens, do_sample=False,
            stopping_criteria=transformers.StoppingCriteriaList([clock]), **options,
        )  # fmt: skip
        synchronize(self.device)
        result = {
            "prefill_s": clock.prefill_s, **timing(clock.segments), "index_wait_s": clock.wait_s,
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
        }  # fmt: skip
        if before is not None:
            after = ckv_compile.explain(self.model, show=False)
            result["decode_steps"] = after.decode_steps - before.decode_steps
            result["sparse_steps"] = after.sparse_steps - before.sparse_steps
            result["index_lag_s"] = after.index_lag_seconds[len(before.index_lag_seconds) :]
        return result


def contiguous(slab: KVSlab, tokens: int) -> list[torch.Tensor]:
    """K and V of every layer as ``[1, H, tokens, D]``, contiguous, in the slab's own memory."""
    heads, dim = slab.buffer.shape[3:]
    return [part.view(-1)[: heads * tokens * dim].view(1, heads, tokens, dim) for part in slab.buffer]


def filled_cache(model: torch.nn.Module, tensors: list[torch.Tensor]) -> transformers.DynamicCache:
    """A cache as ``generate`` makes it, so that its graphs serve both, around K and V of layer 0, of layer 1, ..."""
    cache = transformers.DynamicCache(config=model.config)
    for layer, key, value in zip(cache.layers, tensors[::2], tensors[1::2], strict=True):
        layer.lazy_initialization(key, value)
        layer.keys, layer.values = key, value
    return cache


class Clock(transformers.StoppingCriteria):
    """Called by ``generate`` after every token; never stops it. Times in seconds, segments in ms per token."""

    def __init__(self, bench: Bench, wait: bool, segment: int) -> None:
        self.bench, self.wait, self.segment = bench, wait, max(1, segment)
        self.calls, self.prefill_s, self.wait_s, self.segments = 0, 0.0, 0.0, []
        self.on_first_token: Callable[[], None] = lambda: None

    def start(self) -> None:
        self.began = time.perf_counter()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.calls += 1
        if self.calls == 1:
            synchronize(self.bench.device)
            now = time.perf_counter()
            self.prefill_s = now - self.began
            self.on_first_token()
            if self.wait:
                wait_for_partitions(self.bench.args.wait_seconds)
                self.wait_s = time.perf_counter() - now
        past = self.calls - WARM_TOKENS
        if past >= 0 and past % self.segment == 0:
            synchronize(self.bench.device)
            now = time.perf_counter()
            if past:
                self.segments.append((now - self.began) * 1e3 / self.segment)
            self.began = now
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def wait_for_partitions(seconds: float) -> None:
    """Until no partition of any cache is under way; the next step publishes what came back."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        sequences = REGISTRY.sequences()
        for sequence in sequences:
            sequence.wait()
        if not any(
            sequence.pending for sequence in sequences if not all(ticket.done for ticket in list(sequence.pending))
        ):
            return
        time.sleep(0.02)


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


# ---------------------------------------------------------------------- claims


def claims_of(rows: list[dict]) -> dict[str, float]:
    """Figures by name, of whole models only; other models than Qwen3-8B and other graphs than "keys" end in their names."""
    claims: dict[str, float] = {}
    for model, graph in dict.fromkeys((row["model"], row.get("graph", "keys")) for row in rows):
        own = [
            row
            for row in rows
            if (row["model"], row.get("graph", "keys")) == (model, graph) and row["kind"] != "failure"
        ]
        suffix = ("" if model == "qwen3-8b" else f"_{model}") + ("" if graph == "keys" else f"_{graph}")
        named = _million(own) | (_claims_of_model([row for row in own if row["whole"]]))
        claims |= {name + suffix: value for name, value in named.items()}
    return claims


def _median(rows: list[dict], kind: str, arm: str, context: int | None = None, entry: str = "raw_ms") -> float | None:
    """Median over every repetition of the matching rows, or None."""
    values: list[float] = []
    for row in rows:
        if row["kind"] == kind and row["arm"] == arm and context in (None, row["context"]) and row[entry] is not None:
            values += row[entry] if isinstance(row[entry], list) else [row[entry]]
    return statistics.median(values) if values else None


def _million(rows: list[dict]) -> dict[str, float]:
    """A step at a million tokens, with however many layers it ran."""
    long = [row for row in rows if row["kind"] == "step" and row["arm"] == "ours" and row["context"] >= MILLION]
    if not long:
        return {}
    return {"step_1m_ms": long[-1]["median_ms"], "step_1m_layers": long[-1]["layers"]}


def _claims_of_model(rows: list[dict]) -> dict[str, float]:
    found: dict[str, float | None] = {}

    def ratio(above: float | None, below: float | None) -> float | None:
        return above / below if above is not None and below else None

    for context, label in LABELS.items():
        dense, ours = (_median(rows, "step", arm, context) for arm in ("dense", "ours"))
        generate, eager = (_median(rows, "generate", arm, context) for arm in ("generate", "eager"))
        found[f"decode_step_speedup_{label}"] = ratio(dense, ours)
        found[f"decode_step_ms_{label}"] = ours
        found[f"generate_speedup_{label}"] = ratio(eager, generate)
        found[f"generate_over_step_{label}"] = ratio(generate, ours)
        for entry, name in (("peak_gib", "peak"), ("prefill_s", "prefill")):
            parts = (_median(rows, "generate", arm, context, entry) for arm in ("generate", "eager"))
            found[f"{name}_over_eager_{label}"] = ratio(*parts)
    for arm in ("dense", "ours"):
        found[f"nonattention_ms_{arm}"] = _median(rows, "nonattention", arm)
    # tokens per second of one over the other
    found["static_over_dynamic"] = ratio(_median(rows, "generate", "dynamic"), _median(rows, "generate", "static"))
    return {name: value for name, value in found.items() if value is not None}


# ---------------------------------------------------------------------- output


def show(rows: list[dict], claims: dict[str, float], console: Console) -> None:
    table = Table("what", "arm", "context", "layers", "ms", "spread", "prefill s", "index s", "sparse", "peak GiB")
    for row in rows:
        if row["kind"] == "failure":
            table.add_row("failure", row["arm"], row["error"][:60])
            continue
        sparse = f"{row['sparse_steps']}/{row['decode_steps']}" if "sparse_steps" in row else ""
        table.add_row(
            row["kind"], row["arm"], str(row["context"]), str(row["layers"]), f"{row['median_ms']:.3f}",
            f"{row['spread_ms']:.3f}", f"{row['prefill_s']:.2f}" if "prefill_s" in row else "",
            f"{row['index_wait_s']:.2f}" if "index_wait_s" in row else "", sparse,
            f"{row['peak_gib']:.1f}" if row.get("peak_gib") else "",
        )  # fmt: skip
    console.print(table)
    console.print({name: float(f"{value:.4g}") for name, value in claims.items()})


def plot(path: Path) -> Path:
    """Time of a step against the context, from a result file; the picture lies beside it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = json.loads(path.read_text())["rows"]
    figure, axes = plt.subplots(figsize=(6, 4), constrained_layout=True)
    for kind, arm, label, style in (
        ("step", "dense", "dense step", "-s"), ("step", "ours", "communities, step", "-o"),
        ("generate", "eager", "generate, eager", "x"), ("generate", "generate", "generate, communities", "+"),
    ):  # fmt: skip
        points: dict[int, list[float]] = {}
        for row in rows:
            if (row["kind"], row["arm"]) == (kind, arm):
                points.setdefault(row["context"], []).extend(row["raw_ms"])
        contexts = sorted(points)
        if contexts:
            middle = [statistics.median(points[c]) for c in contexts]
            spread = [[m - min(points[c]) for c, m in zip(contexts, middle, strict=True)],
                      [max(points[c]) - m for c, m in zip(contexts, middle, strict=True)]]  # fmt: skip
            axes.errorbar(contexts, middle, spread, fmt=style, label=label, markersize=4, capsize=2)
    label_contexts(axes, {row["context"] for row in rows if row["kind"] in ("step", "generate")})
    axes.set(ylim=(0, None), xlabel="context, tokens", ylabel="ms per token, median and range")
    axes.legend(fontsize=8)
    target = path.with_suffix(".png")
    figure.savefig(target, dpi=150)
    plt.close(figure)
    return target


def arguments_of(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-8b", choices=[name for name in SHAPES if name != "tiny"])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--contexts", nargs="+", type=int, default=list(CONTEXTS), help="of the bare steps, in tokens")
    parser.add_argument("--graph", default="keys", choices=("keys", "attention", "mixed"), help="what ours partitions")
    parser.add_argument("--planted-edges", action="store_true", help="of text, in place of random weights' attention")
    parser.add_argument("--layers", type=int, help="fewer than the model has, where memory does not suffice")
    parser.add_argument("--tail", type=int, default=256, help="last tokens that are not indexed, in bare steps")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--dense-static", action="store_true", help="compile the dense step anew for every context")
    parser.add_argument("--generate-context", type=int, default=131072)
    parser.add_argument("--generate-runs", type=int, default=1, help="of each arm, in turns; each is a whole prefill")
    parser.add_argument("--new-tokens", type=int, default=104)
    parser.add_argument("--segments", type=int, default=3, help="timed parts of a generation")
    parser.add_argument(
        "--warm-up-context", type=int, default=4608, help="more than the budget, so that it compiles all"
    )
    parser.add_argument(
        "--timeline", type=Path, metavar="JSON", help="trace of one more prefill of generate, and a picture"
    )
    parser.add_argument("--static-context", type=int, default=32768)
    parser.add_argument("--static-runs", type=int, default=1)
    parser.add_argument("--wait-index", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--wait-seconds", type=float, default=90, help="at most, for the index of a prefill")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny model, to see that every arm runs")
    parser.add_argument("--interpret", action="store_true", help="run the graphs node by node, without Inductor")
    parser.add_argument("--out", type=Path, help="folder of the result file")
    parser.add_argument("--plot", type=Path, metavar="JSON", help="only draw a result file")
    args = parser.parse_args(argv)
    args.least_ms = 40.0
    if args.small:
        args.model, args.layers, args.contexts = "tiny", None, [400, 800]
        args.generate_context, args.static_context, args.warm_up_context = 600, 600, 300
        args.new_tokens, args.segments, args.tail, args.least_ms = 20, 3, 32, 1.0
        args.repetitions = min(args.repetitions, 3)
    return args


def main(argv: list[str] | None = None) -> dict[str, float]:
    args = arguments_of(argv)
    console = Console(width=None if Console().is_terminal else 160)
    if args.plot:
        console.print(f"drew {plot(args.plot)}")
        return {}
    if args.interpret:
        ckv_compile.backend._compile = lambda gm, *_, **__: gm.forward
    transformers.logging.set_verbosity_error()
    edges = planted_edges() if args.planted_edges else contextlib.nullcontext()
    with (
        edges,
        torch._dynamo.config.patch(recompile_limit=64),
    ):  # dense, dynamic, static, prefill, decode: one code object
        return run(args, console)


def run(args: argparse.Namespace, console: Console) -> dict[str, float]:
    bench = Bench(args, console)
    path = None

    def write() -> Path:
        previous, new = path, write_results(
            "decode_step", bench.rows, claims_of(bench.rows), device=args.device, label=args.model, folder=args.out
        )  # fmt: skip
        if previous:
            previous.unlink()
        return new

    parts = (("steps", {"dense", "ours"}), ("generations", {"generate", "eager"}), ("static", {"static"}))
    for name, arms in parts:
        if arms & set(args.arms):
            with bench.part(name):
                getattr(bench, name)()
            bench.free()
            path = write()  # after every part, so that a run that is stopped leaves what it has
    if "ours" in args.arms or "generate" in args.arms:
        ckv_compile.explain(bench.model)
    claims = claims_of(bench.rows)
    show(bench.rows, claims, console)
    console.print(f"wrote {path}")
    draw(console, plot, path)
    return claims


if __name__ == "__main__":
    main()
