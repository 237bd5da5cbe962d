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
import json
import statistics
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

import ckv_compile.backend
from bench.dense_step import SHAPES
from bench.planted import planted_edges
from bench.results_file import draw, write_results
from bench.timeline import Timeline
from bench.timing import label_contexts
from bench.whole_model import WARM_TOKENS, ModelBench, contiguous

ARMS = ("dense", "ours", "generate", "eager", "static")
CONTEXTS = (65536, 131072, 262144, 524288, 32768)  # the first compiles; the largest sizes the buffers
LABELS = {32768: "32k", 65536: "64k", 131072: "128k", 262144: "256k", 524288: "512k"}
MILLION = 1_000_000
TINY_CONTEXT = 16


class Bench(ModelBench):
    """The arms of this bench."""

    def row(self, kind: str, arm: str, **entries: Any) -> dict:
        return super().row(kind, arm, planted_edges=self.args.planted_edges, **entries)

    # ------------------------------------------------------------------ bare steps

    def steps(self) -> None:
        args = self.args
        if "ours" in args.arms and "generate" in args.arms:
            # Older transformers would otherwise compile the step of a filled cache, and then that of generate anew.
            with self.part("generate: compile"):
                self.compiled.generate(**self.prompt(args.warm_up_context), max_new_tokens=4, do_sample=False)
            self.free()
        slab, context = self.new_slab(max(args.contexts)), args.contexts[0]
        dense, form = self.dense_step(contiguous(slab, context)) if "dense" in args.arms else (None, "")
        sequence = ours = None
        if "ours" in args.arms:
            with self.part("ours: compile and capture"):
                sequence = self.adopt(slab)
                ours = self.recorded_step(slab, sequence, context)
        for context in args.contexts:
            self.time_steps(context, slab, dense, form, ours, sequence)
        self.time_steps(TINY_CONTEXT, slab, dense, form, ours, sequence, "nonattention")
        self.disown(slab)

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
        timeline = Timeline(self.device)

        def marked(tokens: int) -> None:
            if tokens == 1:
                timeline.mark("end of prefill")

        timeline.start()
        self.generation(self.compiled, context, new_tokens=WARM_TOKENS + 1, on_token=marked)
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
    parser.add_argument("--model", default="qwen3-8b", choices=[name for name in SHAPES if not name.startswith("tiny")])
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
