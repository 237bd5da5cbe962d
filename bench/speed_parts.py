"""The parts of ``bench.speed_tables``: what each builds and compiles, and the cells that it measures then.

Every part has one model of random weights. ``prepare`` compiles all that ``measure`` needs; a cell that fails, or for
which no time is left, is a row that says so.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from rich.console import Console

import ckv_compile.backend
from bench.breakdown import Breakdown, ModuleClock, by_kind, code_with
from bench.decode_layer import DecodeAttention, DecodeCache, dense_forms, fill_index, random_slab
from bench.dense_step import SHAPES, cache_argument
from bench.part_processes import Part, Row
from bench.planted import planted_edges
from bench.timeline import Timeline
from bench.timing import capture, interleaved, synchronize, timing
from bench.whole_model import WARM_TOKENS, Clock, ModelBench, contiguous, filled_cache
from ckv_compile.runtime.registry import REGISTRY
from ckv_compile.runtime.sequence import Sequence

CELL_SECONDS = 25.0  # that a cell is not begun without
MARGIN_GIB = 2.0  # of a process beside its tensors
CURVE_MODEL, MOE_MODEL = "qwen2.5-7b", "gpt-oss-20b"
SMALL_MODELS = {"qwen2.5-7b": "tiny-qwen2", "gpt-oss-20b": "tiny-gpt-oss"}  # the others are "tiny"
WINDOW_SOURCES = r".*(cumulative_length|attention_mask).*"  # what differs from step to step where layers have a window
PROMPT_SOURCES = r".*(input_ids|attention_mask|position_ids).*"  # whose sizes differ from prompt to prompt
ARMS = {  # of table 5: options of the backend
    "keys": {"graph": "keys"},
    "group": {"graph": "attention", "graph_aggregation": "group"},
    "head": {"graph": "attention", "graph_aggregation": "head"},
}


class PartBench(ModelBench):
    """Rows go to whoever collects them as soon as they are there, and tell the part."""

    def __init__(self, part: Part, send: Callable[[Row], None], args: argparse.Namespace, **options: Any) -> None:
        self._name, self._send = part.name, send
        super().__init__(args, Console(width=160), **options)

    def row(self, kind: str, arm: str, **entries: Any) -> dict:
        row = super().row(kind, arm, part=self._name, **entries)
        self._send(row)
        return row

    @contextlib.contextmanager
    def cell(self, arm: str, context: int, left: Callable[[], float]) -> Iterator[bool]:
        """Gives whether there is time; what goes wrong inside becomes a row."""
        if left() < min(CELL_SECONDS, self.args.seconds / 4):
            self.row("skipped", arm, context=context, error=f"the limit of {self.args.seconds:.0f} s was near")
            yield False
            return
        with self.part(f"{arm} at {context}"):
            yield True


class ModelPart:
    """One part: a model, its command line, and rows on their way."""

    def __init__(self, part: Part, send: Callable[[Row], None]) -> None:
        self.description, self.send = part, send
        self.arm, self.args = part.arguments
        transformers.logging.set_verbosity_error()
        if self.args.interpret:
            ckv_compile.backend._compile = lambda gm, *_, **__: gm.forward

    def bench_of(self, model: str, graph: str = "keys", **options: Any) -> PartBench:
        args = copy.copy(self.args)
        args.model, args.graph = (SMALL_MODELS.get(model, "tiny") if args.small else model), graph
        return PartBench(self.description, self.send, args, **options)

    def prepare(self) -> None:
        with many_graphs():
            self.compile()

    def measure(self, left: Callable[[], float]) -> None:
        with many_graphs(), torch.no_grad():
            self.cells(left)

    def compile(self) -> None:
        raise NotImplementedError

    def cells(self, left: Callable[[], float]) -> None:
        raise NotImplementedError


def many_graphs() -> contextlib.AbstractContextManager:
    """Dense, prefill and decode graphs of one code object."""
    return torch._dynamo.config.patch(recompile_limit=64)


def dynamic_at_once(sources: str) -> contextlib.AbstractContextManager:
    """Sizes of inputs of these names (a regular expression) are symbols at the first compilation, not the second."""
    if hasattr(torch.compiler.config, "dynamic_sources"):
        return torch.compiler.config.patch(dynamic_sources=sources)
    return contextlib.nullcontext()


# ---------------------------------------------------------------------- table 5 and table 10


class DenseModel(ModelPart):
    """Eager ``generate``, and replays of the compiled dense step."""

    def compile(self) -> None:
        model, _ = self.arm
        bench = self.bench = self.bench_of(model)
        context = self.args.prepare_context
        slab = bench.new_slab(context)
        self.dense, self.form = bench.dense_step(
            example_layer(bench, max(self.args.contexts)), contiguous(slab, context)
        )
        bench.model.generate(**bench.prompt(64), max_new_tokens=4, do_sample=False)
        bench.free()

    def cells(self, left: Callable[[], float]) -> None:
        bench, args = self.bench, self.args
        for context in args.contexts:
            with bench.cell("eager", context, left) as begins:
                if begins:
                    found = bench.generation(bench.model, context, new_tokens=args.eager_tokens)
                    bench.row("table5", "eager", context=context, **found)
        slab = None
        if self.dense is not None:
            with bench.cell("dense steps", max(args.contexts), left) as begins:
                slab = bench.new_slab(max(args.contexts)) if begins else None
            for context in args.contexts:
                if slab is not None:
                    bench.time_steps(context, slab, self.dense, self.form, None, None)
        slab = None
        bench.free()
        if breakdown_wanted(args, self.arm[0]):
            context = args.breakdown_context
            with bench.cell("eager breakdown", context, left) as begins:
                if begins:
                    bench.row("table10", "eager", context=context, **broken_down(bench, bench.model, context))


class OurModel(ModelPart):
    """``generate`` through the backend, with one graph and one way to aggregate it."""

    def compile(self) -> None:
        model, arm = self.arm
        options = dict(ARMS[arm])
        bench = self.bench = self.bench_of(model, options.pop("graph"), **options)
        prompt = bench.prompt(self.args.warm_up_context)
        with self.planting():
            # A prefill of any length at once, instead of one of this length first.
            with dynamic_at_once(PROMPT_SOURCES):
                bench.compiled.generate(**prompt, max_new_tokens=1, do_sample=False)
            bench.compiled.generate(**prompt, max_new_tokens=4, do_sample=False)
            longer = bench.prompt(self.args.warm_up_context * 3 // 2)
            bench.compiled.generate(**longer, max_new_tokens=4, do_sample=False)
            least = -(-(1 << 31) // SHAPES[bench.args.model].intermediate)
            if max(self.args.contexts) >= least:  # Inductor compiles tensors of more than 2^31 elements anew
                bench.compiled.generate(**bench.prompt(least), max_new_tokens=1, do_sample=False)
        bench.free()

    def planting(self) -> contextlib.AbstractContextManager:
        """Lists like those of text; edges of keys are those of the model."""
        return planted_edges() if self.args.plant != "none" else contextlib.nullcontext()

    def edges(self) -> str:
        """What the partition is of."""
        return "planted" if self.args.plant != "none" and self.bench.args.graph != "keys" else "the model's"

    def cells(self, left: Callable[[], float]) -> None:
        bench, args = self.bench, self.args
        for context in args.contexts:
            with bench.cell(self.arm[1], context, left) as begins:
                if begins:
                    self.measure_generation(context, args.new_tokens)
        if breakdown_wanted(args, self.arm[0]) and self.arm[1] != "head":
            context = args.breakdown_context
            with bench.cell(f"{self.arm[1]} breakdown", context, left) as begins, self.planting():
                if begins:
                    found = broken_down(bench, bench.compiled, context)
                    bench.row(
                        "table10", self.arm[1], context=context, edges=self.edges(), communities="partition", **found
                    )
        if args.full_tokens:
            context = min(args.contexts)
            with bench.cell(f"{self.arm[1]}, all tokens", context, left) as begins:
                if begins:
                    self.measure_generation(context, args.full_tokens)

    def planted(self) -> Callable[[], None] | None:
        if self.args.plant != "communities":
            return None

        def plant() -> None:
            sequence = max(REGISTRY.sequences(), key=lambda one: one.length)
            fill_index(sequence, sequence.length, sequence.config.mean_size)
            sequence.refreshed_at = 1 << 60  # no partition takes their place

        return plant

    def measure_generation(self, context: int, tokens: int) -> None:
        held: dict[str, float] = {}

        def on_token(number: int) -> None:
            if number == tokens - 1:
                held.update(memory_of(REGISTRY.sequences()))

        with self.planting():
            found = self.bench.generation(
                self.bench.compiled, context, new_tokens=tokens, planted=self.planted(), on_token=on_token
            )
        communities = "planted" if self.args.plant == "communities" else "partition"
        row = {"edges": self.edges(), "communities": communities, **found, **held}
        self.bench.row("table5", self.arm[1], context=context, **row)


def example_layer(bench: ModelBench, context: int) -> list[torch.Tensor]:
    """K and V of one layer, contiguous: what forms of dense attention are chosen on."""
    shape = (1, bench.geometry.num_kv_heads, context, bench.geometry.head_dim)
    return [torch.randn(shape, dtype=bench.dtype, device=bench.model.device) for _ in range(2)]


def memory_of(sequences: list[Sequence]) -> dict[str, float]:
    """GiB of the newest cache: its index on the device, edges and graphs on the host, its K and V so far."""
    sequence = max(sequences, key=lambda one: (one.length, one.identifier), default=None)
    if sequence is None:
        return {}
    host = 0
    for edges in sequence.edges:
        for piece in edges.pieces:
            for lists in (piece.neighbor, piece.weight, piece.key_neighbor):
                host += getattr(lists, "nbytes", 0)
        for row in edges.kept or ():
            for partition in row:
                parts = vars(partition.graph).values() if partition.graph is not None else ()
                host += sum(getattr(value, "nbytes", 0) for value in parts)
    size = sequence.geometry
    cached = 2 * size.num_layers * sequence.batch * size.num_kv_heads * sequence.length * size.head_dim
    return {
        "index_gib": sequence.index.nbytes() / 2**30, "host_gib": host / 2**30,
        "cache_gib": cached * size.dtype.itemsize / 2**30,
    }  # fmt: skip


def breakdown_wanted(args: argparse.Namespace, model: str) -> bool:
    return args.breakdown_context > 0 and model in args.breakdown_models


def broken_down(bench: ModelBench, model: Any, context: int, planted: Callable | None = None) -> dict[str, Any]:
    """One more generation, watched: the entries of a row of table 10."""
    watched = Breakdown(bench.device)
    watched.begin()
    found = bench.generation(
        model, context, new_tokens=max(watched.tokens, WARM_TOKENS + bench.args.segments + 1), planted=planted,
        on_token=watched.on_token,
    )  # fmt: skip
    more = {name: found[name] for name in ("index_lag_s", "partition_cpu_s", "index_wait_s") if name in found}
    return {"prefill": watched.prefill(), "decode": watched.decode(), **more}


# ---------------------------------------------------------------------- the curve


class Curve(ModelPart):
    """Bare steps, dense and ours in turns, from the shortest to the longest context."""

    def compile(self) -> None:
        bench = self.bench = self.bench_of(self.arm[0])
        context = self.args.prepare_context
        slab = bench.new_slab(context)
        self.dense, self.form = bench.dense_step(example_layer(bench, 4 * context), contiguous(slab, context))
        self.ours = False
        with bench.part("ours: compile"):
            bench.recorded_step(slab, bench.adopt(slab), context)
            self.ours = True
        bench.disown(slab)
        del slab
        bench.free()

    def cells(self, left: Callable[[], float]) -> None:
        bench, args = self.bench, self.args
        slab = bench.new_slab(max(args.curve))
        sequence = step = None
        if self.ours:
            with bench.part("ours: capture"):
                sequence = bench.adopt(slab)
                step = bench.recorded_step(slab, sequence, min(args.curve))
        for context in args.curve:
            with bench.cell("curve", context, left) as begins:
                if begins:
                    bench.time_steps(context, slab, self.dense, self.form, step, sequence, "step")
        bench.disown(slab)


# ---------------------------------------------------------------------- mixture of experts


class MixtureOfExperts(ModelPart):
    """gpt-oss: a step of transformers and of the backend, what of it is attention and what experts; one layer alone."""

    def compile(self) -> None:
        bench = self.bench = self.bench_of(self.arm[0])
        context = self.args.prepare_context
        self.layers: tuple[DecodeAttention, Any] | None = None
        with bench.part("attention layers: compile"):  # first: it resets dynamo
            geometry = dataclasses.replace(bench.geometry, num_layers=min(4, bench.geometry.num_layers))
            logits = torch.ones(bench.heads, dtype=bench.dtype, device=bench.model.device)
            step = DecodeAttention(bench.config, geometry, 1, sink_logits=logits)
            self.layers = step, step.compile(interpret=self.args.interpret)
        bench.model.generate(**bench.prompt(32), max_new_tokens=4, do_sample=False)
        slab = bench.new_slab(context)
        self.ours = False
        with bench.part("ours: compile"), dynamic_at_once(WINDOW_SOURCES):
            bench.recorded_step(slab, bench.adopt(slab), context)
            self.ours = True
        bench.disown(slab)
        del slab
        bench.free()

    def cells(self, left: Callable[[], float]) -> None:
        bench, context = self.bench, self.args.moe_context
        with bench.cell("attention layer", context, left) as begins:
            if begins and self.layers is not None:
                self.layers_alone(context)
        bench.free()
        with bench.cell("eager", context, left) as begins:
            if begins:
                self.eager(context)
        bench.free()
        slab = bench.new_slab(context)
        with bench.cell("ours", context, left) as begins:
            if begins and self.ours:
                self.ours_at(slab, context)
        bench.disown(slab)

    def layers_alone(self, context: int) -> None:
        """One layer's attention: ours, transformers' own, and torch's kernels without the learned sinks."""
        bench, args = self.bench, self.args
        step, whole = self.layers
        cache = DecodeCache(bench.config, step.geometry, 1, random_slab(step.geometry, 1, context + 1024))
        cache.index(context - 1, max(context - 1 - args.tail, context // 2), bench.config.mean_size)
        restore, arguments = cache.saver(), step.arguments(whole, cache)
        queries = [step.query(layer) for layer in range(step.geometry.num_layers)]
        tensors = cache.contiguous(context)
        pairs = list(zip(queries, tensors[::2], tensors[1::2], strict=True))
        arms: dict[str, Callable] = {"ours": capture(lambda: whole.function(*arguments), bench.device)}
        before = {"ours": restore}
        restore()
        attention = next(m for m in bench.model.modules() if type(m).__name__ == "GptOssAttention")
        from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

        def written_out() -> list[torch.Tensor]:
            return [eager_attention_forward(attention, *one, None, attention.scaling)[0] for one in pairs]

        forms = {"transformers": written_out}
        for name, form in dense_forms(bench.device).items():
            forms[f"{name}, no sinks"] = lambda form=form: [form(*one) for one in pairs]
        for name, form in forms.items():
            with bench.part(f"attention layer, {name}"):
                arms[name] = capture(form, bench.device)
        for name, values in interleaved(arms, args.repetitions, bench.device, before=before).items():
            per_layer = [value / step.geometry.num_layers for value in values]
            bench.row("layer", name, context=context, **timing(per_layer))

    def eager(self, context: int) -> None:
        bench, tokens = self.bench, self.args.eager_tokens

        def cache() -> transformers.DynamicCache:
            size = bench.geometry
            shape = (1, size.num_kv_heads, context, size.head_dim)
            tensors = [
                torch.randn(shape, dtype=size.dtype, device=size.device) for _ in range(2 * size.num_layers)
            ]  # fmt: skip
            return filled_cache(bench.model, tensors)

        bench.row("moe", "eager", context=context, **timing(self.steps_of(bench.model, cache(), context, tokens)))
        clock = ModuleClock(
            bench.model, {"MLP": "moe", "Attention": "attention", "DecoderLayer": "layers"}, bench.device
        )
        try:
            self.steps_of(bench.model, cache(), context, WARM_TOKENS + self.args.segments + 1, clock.forget)
            parts = clock.total_ms()
            calls = max(1, sum(kind == "moe" for kind, *_ in clock.spans) // bench.layers)
        finally:
            clock.remove()
        bench.row("moe_share", "eager", context=context, parts_ms={kind: ms / calls for kind, ms in parts.items()})

    def steps_of(
        self, model: Any, cache: Any, context: int, tokens: int, after_first: Callable | None = None
    ) -> list[float]:  # fmt: skip
        """Milliseconds a token in the steady state of ``generate`` behind a filled cache."""
        bench = self.bench
        clock = Clock(bench.device, None, max(1, (tokens - WARM_TOKENS) // self.args.segments))
        if after_first is not None:
            clock.on_token = lambda number: after_first() if number == WARM_TOKENS else None
        clock.start()
        model.generate(
            **bench.prompt(context + 1), **{cache_argument(bench.model): cache}, max_new_tokens=tokens, do_sample=False,
            stopping_criteria=transformers.StoppingCriteriaList([clock]),
        )  # fmt: skip
        return clock.segments

    def ours_at(self, slab: Any, context: int) -> None:
        bench, args = self.bench, self.args
        sequence = bench.adopt(slab)
        step = bench.recorded_step(slab, sequence, context)

        def reset(length: int = context - 1) -> None:
            sequence.length_device.fill_(length)

        times = interleaved(
            {"ours": step}, args.repetitions, bench.device, before={"ours": reset}, least_ms=args.least_ms
        )  # fmt: skip
        bench.row("moe", "ours, bare step", context=context, **timing(times["ours"]))
        timeline, calls = Timeline(bench.device), 16
        reset()
        timeline.start()
        for _ in range(calls):
            step()
        timeline.stop()
        kinds, costliest = by_kind(
            [event for event in timeline.events if event["lane"] == "GPU"], code_with({"append", "route", "retrieve"})
        )
        parts = {kind: ms / calls for kind, ms in kinds.items()}
        bench.row("moe_share", "ours", context=context, parts_ms=parts, kernels=costliest)
        with bench.part("ours at 16 tokens"):
            sequence.restart([0], 15)
            times = interleaved(
                {"ours": step}, args.repetitions, bench.device, before={"ours": lambda: reset(15)},
                least_ms=args.least_ms,
            )  # fmt: skip
            bench.row("moe", "ours, 16 tokens", context=16, **timing(times["ours"]))
        bench.recorder.forget()
        cache = bench.indexed(slab, sequence, context)
        times_ms = self.steps_of(bench.compiled, cache, context, args.eager_tokens)
        synchronize(bench.device)
        bench.row("moe", "ours", context=context, **timing(times_ms))


# ---------------------------------------------------------------------- all of them


def parts_of(args: argparse.Namespace) -> list[Part]:
    """The parts that a command line asks for, in the order in which they are worth their time."""
    found: list[Part] = []
    longest = max([*args.contexts, args.breakdown_context])

    def add(name: str, start: Callable, model: str, arm: str, more_gib: float) -> None:
        rest = SHAPES[model].gib() + MARGIN_GIB
        found.append(Part(name, start, ((model, arm), args), rest, rest + more_gib))

    def add_model(model: str, arms: list[str]) -> None:
        shape = SHAPES[model]
        cache, inner = shape.cache_gib(longest), 8 * longest * shape.intermediate / 2**30  # of a prefill
        for arm in arms:
            start = DenseModel if arm == "dense" else OurModel
            add(f"table5/{model}/{arm}", start, model, arm, 1.2 * cache + inner + (6 if arm == "head" else 2))

    first, later = args.models[:1], args.models[1:]
    for model in first:
        add_model(model, [arm for arm in args.arms if arm != "head"])
    if args.curve:
        add("curve", Curve, CURVE_MODEL, "curve", 1.2 * SHAPES[CURVE_MODEL].cache_gib(max(args.curve)))
    for model in first:
        add_model(model, [arm for arm in args.arms if arm == "head"])
    if args.moe_context:
        add("gpt-oss", MixtureOfExperts, MOE_MODEL, "moe", 4 * SHAPES[MOE_MODEL].cache_gib(args.moe_context) + 2)
    for model in later:
        add_model(model, args.arms)
    return found
