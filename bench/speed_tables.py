"""The paper's speed tables: whole requests of three models, where their time goes, the curve to 512k, and gpt-oss.

    python -m bench.speed_tables                                     # what fits into --seconds, in order of worth
    python -m bench.speed_tables --models qwen3-4b qwen3-14b --curve --moe-context 0    # two models of table 5 alone
    python -m bench.speed_tables --models --moe-context 0            # the curve alone
    python -m bench.speed_tables --full-tokens 32768                 # besides, the paper's number of generated tokens
    python -m bench.speed_tables --small --device cpu                # does it run?
    python -m bench.speed_tables --plot bench/results/speed_tables-....json

Real configurations, random weights made on the device, batch 1, bfloat16. Parts run in processes of their own
(bench/part_processes.py): they compile side by side, and are measured one after the other.

Table 5: a true prefill of random tokens, then greedy tokens with transformers' default cache. ``eager`` is the script as
it is, over ``--eager-tokens`` tokens; ``dense`` is that prefill and replays of one CUDA graph of the compiled model with
cuDNN attention (bench/dense_step.py), stronger than what ``generate`` makes of it; ``keys``, ``group`` and ``head`` are
``torch.compile(model, backend="communitykv")`` with graph "keys", and with "attention" per KV group and per query head,
over ``--new-tokens`` tokens. Random weights attend to everything alike, and such graphs have no communities: with
``--plant edges`` the lists of "attention" are replaced by lists like those of text (bench/planted.py) on their way to
the partition, with ``communities`` the partition besides, of "keys" too, by random communities right after the prefill;
rows say so. The second token waits until every layer is indexed; that wait stands beside the times, in none of them.

Table 10: one more generation of each arm but ``head``, its own partition (of planted edges, with "attention") and all,
watched by a profiler: busy time of kernels by what they do, in the prefill
and in a decode step, and what workers and publication took. ``curve``: bare steps of the Qwen2.5-7B configuration,
dense and ours in turns. gpt-oss-20b's shape: steps behind a cache of random K and V, what of them experts and attention
take, and the attention of one layer alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bench.dense_step import SHAPES
from bench.part_processes import Limits, Row, run_apart, run_here
from bench.results_file import draw, write_results
from bench.speed_cells import TABLE_ARMS, newest, requests
from bench.speed_parts import ARMS, parts_of
from bench.timing import label_contexts

MODELS = ("qwen3-8b", "qwen3-4b", "qwen3-14b")
CURVE = (32768, 65536, 131072, 262144, 524288)
PUBLISHED_TOKENS = 32768  # generated, in the paper's table 5
SHORT = {"qwen3-4b": "4b", "qwen3-8b": "8b", "qwen3-14b": "14b", "tiny": "tiny"}


def k(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


# ---------------------------------------------------------------------- claims


def claims_of(rows: list[Row]) -> dict[str, float]:
    """Figures by name. table5_speedup: of a whole request, over the dense step in a CUDA graph behind eager's prefill."""
    claims: dict[str, float] = {}
    table = requests(rows)
    for row in table:
        if row["arm"] not in ARMS:
            continue
        suffix = "" if row["new_tokens"] < PUBLISHED_TOKENS else "_full"
        name = f"{SHORT.get(row['model'], row['model'])}_{k(row['context'])}_{row['arm']}{suffix}"
        same = {
            one["arm"]: one for one in table
            if all(one[entry] == row[entry] for entry in ("model", "context", "new_tokens"))
        }  # fmt: skip
        for arm, label in (("dense", "table5_speedup"), ("eager", "table5_speedup_eager")):
            if arm in same:
                claims[f"{label}_{name}"] = same[arm]["whole_s"] / row["whole_s"]
        if "eager" in same:
            claims[f"ttft_over_eager_{name}"] = row["prefill_s"] / same["eager"]["prefill_s"]
            if row.get("peak_gib") and same["eager"].get("peak_gib"):
                claims[f"peak_over_eager_{name}"] = row["peak_gib"] / same["eager"]["peak_gib"]
        if row.get("cache_gib"):
            claims[f"aux_over_kv_percent_{name}"] = 100 * row["index_gib"] / row["cache_gib"]
    for context in sorted({row["context"] for row in rows if row.get("part") == "curve" and row["kind"] == "step"}):
        own = [row for row in rows if row.get("part") == "curve"]
        dense, ours = (newest(own, "step", arm, None, context) for arm in ("dense", "ours"))
        if dense and ours:
            claims[f"curve_speedup_{k(context)}"] = dense["median_ms"] / ours["median_ms"]
    eager, ours = newest(rows, "moe", "eager"), newest(rows, "moe", "ours")
    bare, short = newest(rows, "moe", "ours, bare step"), newest(rows, "moe", "ours, 16 tokens")
    if eager and ours:
        claims["gpt_oss_generate_speedup"] = eager["median_ms"] / ours["median_ms"]
    if bare and short:
        claims["gpt_oss_context_share_percent"] = 100 * (1 - short["median_ms"] / bare["median_ms"])
    layers = {row["arm"]: row["median_ms"] for row in rows if row["kind"] == "layer"}
    if {"ours", "transformers"} <= set(layers):
        claims["gpt_oss_layer_speedup"] = layers["transformers"] / layers["ours"]
    return claims


# ---------------------------------------------------------------------- output


def show(rows: list[Row], claims: dict[str, float], console: Console) -> None:
    table = Table(
        "model", "context", "arm", "tokens", "tok/s", "with wait", "decode tok/s", "first token s", "ms", "wait s",
        "index GiB", "peak GiB", title="table 5: whole requests",
    )  # fmt: skip
    for row in requests(rows):
        shown = [f"{row[name]:.1f}" for name in ("tokens_per_s", "request_per_s", "decode_per_s")]
        sizes = [f"{row[name]:.2f}" if row.get(name) else "" for name in ("index_gib", "peak_gib")]
        table.add_row(
            row["model"], k(row["context"]), row["arm"], str(row["new_tokens"]), *shown, f"{row['prefill_s']:.2f}",
            f"{row['median_ms']:.2f}", f"{row['index_wait_s']:.1f}", *sizes,
        )  # fmt: skip
    console.print(table)
    table = Table("model", "arm", "what", "of a prefill, s", "of a decode step, ms", title="table 10: where time goes")
    for row in rows:
        if row["kind"] == "table10":
            prefill, decode = row["prefill"], row["decode"]
            table.add_row(row["model"], row["arm"], "wall", f"{prefill['wall_s']:.2f}", f"{decode['wall_ms']:.2f}")
            for kind in dict.fromkeys([*prefill["busy_s"], *decode["busy_ms"]]):
                table.add_row(
                    "", "", kind, f"{prefill['busy_s'].get(kind, 0):.3f}", f"{decode['busy_ms'].get(kind, 0):.3f}"
                )
            for name in ("partition_busy_s", "publication_s", "outbox_s", "index_after_s"):
                table.add_row("", "", name, f"{prefill[name]:.2f}", "")
    console.print(table)
    table = Table("part", "what", "context", "ms", "spread", title="steps and layers")
    for row in rows:
        if row["kind"] in ("step", "moe", "layer"):
            what = f"{row['kind']}, {row['arm']}"
            table.add_row(row["part"], what, k(row["context"]), f"{row['median_ms']:.3f}", f"{row['spread_ms']:.3f}")
        elif row["kind"] == "moe_share":
            parts = ", ".join(f"{kind} {ms:.2f}" for kind, ms in row["parts_ms"].items())
            table.add_row(row["part"], f"of a step, {row['arm']}", k(row["context"]), parts, "")
    console.print(table)
    for row in rows:
        if row["kind"] in ("failure", "skipped"):
            console.print(f"{row['kind']}: {row['part']} {row.get('arm', '')}: {row['error'][:200]}", markup=False)
    console.print({name: float(f"{value:.4g}") for name, value in claims.items()})


def plot(path: Path) -> Path:
    """The curve and the requests of table 5, from a result file; the picture lies beside it."""
    from matplotlib.figure import Figure

    rows = json.loads(path.read_text())["rows"]
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    curve = [row for row in rows if row.get("part") == "curve" and row["kind"] == "step"]
    for arm, style in (("dense", "-s"), ("ours", "-o")):
        points = {row["context"]: row["raw_ms"] for row in curve if row["arm"] == arm}
        contexts = sorted(points)
        middle = [statistics.median(points[c]) for c in contexts]
        spread = [[m - min(points[c]) for c, m in zip(contexts, middle, strict=True)],
                  [max(points[c]) - m for c, m in zip(contexts, middle, strict=True)]]  # fmt: skip
        if contexts:
            left.errorbar(contexts, middle, spread, fmt=style, label=arm, markersize=4, capsize=2)
    if curve:
        label_contexts(left, {row["context"] for row in curve})
        left.legend(fontsize=8)
    left.set(ylim=(0, None), xlabel="context, tokens", ylabel="ms per step, median and range", title="Qwen2.5-7B shape")
    table = requests(rows)
    cells = list(dict.fromkeys((row["model"], row["context"], row["new_tokens"]) for row in table))
    for place, arm in enumerate(TABLE_ARMS):
        own = [
            (cells.index((row["model"], row["context"], row["new_tokens"])), row["tokens_per_s"])
            for row in table if row["arm"] == arm
        ]  # fmt: skip
        right.bar([cell + 0.16 * (place - 2) for cell, _ in own], [value for _, value in own], 0.15, label=arm)
    names = [f"{model}\n{k(context)}, {tokens}" for model, context, tokens in cells]
    right.set_xticks(range(len(cells)), labels=names, fontsize=7)
    right.set(ylabel="tokens/s, prefill included", title="whole requests")
    if cells:
        right.legend(fontsize=8)
    target = path.with_suffix(".png")
    figure.savefig(target, dpi=150)
    return target


# ---------------------------------------------------------------------- command line


def arguments_of(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [name for name in SHAPES if name.startswith("qwen3")]
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=known, help="of table 5")
    arms = ("dense", *ARMS)
    parser.add_argument(
        "--arms", nargs="+", default=list(arms), choices=arms, help="of table 5; dense has eager with it"
    )
    parser.add_argument("--contexts", nargs="+", type=int, default=[131072, 65536], help="of table 5, in tokens")
    parser.add_argument("--new-tokens", type=int, default=1024)
    parser.add_argument("--eager-tokens", type=int, default=72, help="that eager generates, for its time per token")
    parser.add_argument(
        "--full-tokens", type=int, default=0, help="besides, at the shortest context: 32768 in the paper"
    )
    parser.add_argument("--plant", default="communities", choices=("edges", "communities", "none"), help="see above")
    parser.add_argument("--breakdown-models", nargs="*", default=["qwen3-8b"], choices=known, help="of table 10")
    parser.add_argument("--breakdown-context", type=int, default=131072, help="of table 10; 0: none")
    parser.add_argument("--curve", nargs="*", type=int, default=list(CURVE), help="contexts of the curve")
    parser.add_argument("--moe-context", type=int, default=32768, help="of gpt-oss; 0: none")
    parser.add_argument("--seconds", type=float, default=470, help="after which nothing more is begun")
    parser.add_argument("--prepare-seconds", type=float, default=300, help="after which parts that still compile end")
    parser.add_argument("--processes", type=int, help="that compile at a time; 0, as with --small: all in this process")
    parser.add_argument("--gib", type=float, help="of GPU memory that may be used; 0.93 of it if not given")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--segments", type=int, default=4, help="timed parts of a generation")
    parser.add_argument("--tail", type=int, default=256, help="last tokens that are not indexed, in bare steps")
    parser.add_argument("--prepare-context", type=int, default=8192, help="that bare steps are compiled at")
    parser.add_argument("--warm-up-context", type=int, default=4608, help="more than the budget, so that all compiles")
    parser.add_argument("--wait-seconds", type=float, default=75, help="at most, for the index of a prefill")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny models, to see that every part runs")
    parser.add_argument("--interpret", action="store_true", help="run the graphs node by node, without Inductor")
    parser.add_argument("--out", type=Path, help="folder of the result file")
    parser.add_argument("--plot", type=Path, metavar="JSON", help="only draw a result file")
    args = parser.parse_args(argv)
    args.layers, args.dense_static, args.wait_index, args.least_ms = None, False, True, 40.0
    if args.small:
        args.models, args.breakdown_models = args.models[:1], args.models[:1]
        args.contexts, args.breakdown_context, args.curve, args.moe_context = [600, 400], 400, [400, 800], 400
        args.new_tokens, args.eager_tokens, args.segments, args.tail, args.least_ms = 20, 12, 2, 32, 1.0
        args.prepare_context, args.warm_up_context, args.repetitions = 300, 200, min(args.repetitions, 3)
        args.full_tokens = min(args.full_tokens, 24)
    if args.processes is None:
        args.processes = 0 if args.small else 5
    return args


def main(argv: list[str] | None = None) -> dict[str, float]:
    args = arguments_of(argv)
    console = Console(width=None if Console().is_terminal else 160)
    if args.plot:
        console.print(f"drew {plot(args.plot)}")
        return {}
    gib = args.gib
    if gib is None:
        gib = 0.93 * torch.cuda.mem_get_info()[1] / 2**30 if args.device.startswith("cuda") else 1e3
    limits = Limits(args.seconds, args.prepare_seconds, gib, max(1, args.processes))
    rows: list[Row] = []
    path = None

    def say(text: str) -> None:
        console.print(f"[{args.seconds - limits.left():5.0f} s] {text}", markup=False, highlight=False)

    parts = parts_of(args)
    running = run_apart(parts, limits, say) if args.processes else run_here(parts, limits)
    for _, row in running:
        rows.append(row)
        say(told(row))
        new = write_results(
            "speed_tables", rows, claims_of(rows), device=args.device, label="small" if args.small else "",
            folder=args.out, planted=args.plant,
        )  # fmt: skip
        if path is not None and path != new:
            path.unlink()
        path = new
    claims = claims_of(rows)
    show(rows, claims, console)
    console.print(f"wrote {path}")
    if path is not None:
        draw(console, plot, path)
    return claims


def told(row: Row) -> str:
    """A row in a line, while the bench runs."""
    figures = {
        name: row[name] for name in ("median_ms", "prefill_s", "whole_s", "index_wait_s", "seconds") if name in row
    }
    shown = ", ".join(f"{name} {value:.2f}" for name, value in figures.items())
    where = " ".join(str(row[name]) for name in ("part", "kind", "arm", "context") if name in row)
    return f"{where}: {row['error'][:200] if 'error' in row else shown}"


if __name__ == "__main__":
    main()
