"""Decode attention of one layer: append, route, retrieve and attend against dense attention, as CUDA graphs.

    python -m bench.sparse_decode                                      # everything, about five minutes on an H200
    python -m bench.sparse_decode --cells 131072x1 --scores max --assign on --mean-sizes 16
    python -m bench.sparse_decode --cells 65536x1 131072x1 262144x1 524288x1 1048576x1 --scores max --assign off \
        --hierarchy off auto                                           # what groups of communities save, 64k to 1M
    python -m bench.sparse_decode --count --hierarchy off auto         # the bytes of that, without a GPU
    python -m bench.sparse_decode --small --device cpu                 # does it run?
    python -m bench.sparse_decode --plot bench/results/sparse_decode-....json

Shapes of Qwen3-8B: 32 query and 8 KV heads, head_dim 128, budget 4096. Keys, values and queries are random, communities
are random within blocks of 2,048 positions, with sizes like those of real graphs (log-normal, at most 64). One CUDA
graph runs several layers, each with K, V and index of its own, so that nothing waits in the L2 cache for the next
replay; times are per layer. All arms of a cell take turns, and medians are compared.

Arms: ``ours`` is the whole step's attention; with assignment the new token also gets its edges and community, without it
the last ``--tail`` tokens are not indexed yet. ``not_ready`` is the same graph over an empty index, dense through our
operators. ``cudnn`` and ``flash`` are torch's SDPA over contiguous K and V of exactly the context, ``_packed`` with the
heads of a group as queries of one head; comparisons take the faster. Stages are graphs of their own. Floors are useful
bytes (``useful_bytes``) over the copy rate measured in the run. ``--hierarchy`` is the option of that name; with "auto" a
step scores groups of communities first where these are many (``ckv::route_coarse``).

Before any timing the attention's output is compared with float64 over the same tokens, with and without learned sink
logits; if it is wrong, nothing is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
import math
import statistics
import traceback
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.decode_layer import STAGES, CompiledStage, DecodeAttention, DecodeCache, dense_forms, is_op, random_slab
from bench.results_file import draw, write_results
from bench.timing import capture, copy_ceiling, interleaved, label_contexts, timing
from ckv_compile.config import (
    GROUP,
    Append,
    CommunityConfig,
    Hierarchy,
    coarse_from,
    is_hierarchical,
    least_groups,
)
from ckv_compile.index_layout import coarse_parts, num_groups, shortlist_slots
from ckv_compile.passes.rewrite_plan import AttentionGeometry
from ckv_compile.reference.route_coarse import part_quota
from ckv_compile.reference.sparse_attention import sparse_attention

CELLS = ("32768x1", "65536x1", "131072x1", "262144x1", "524288x1", "131072x4")
HIERARCHIES = {"off": "", "auto": "_groups", "on": "_groups_on"}  # and how the names of claims end
LABELS = {(131072, 1): "131k_b1", (524288, 1): "524k_b1", (131072, 4): "131k_b4"}
SLACK = 2048  # tokens of room behind the context: every replay appends one
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 2e-2}  # relative L2, far above rounding: a wrong kernel misses it


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What does not change within a run."""

    query_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    layers: int = 6
    options: tuple = (("budget", 4096),)
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"

    def geometry(self, dtype: torch.dtype | None = None, layers: int | None = None) -> AttentionGeometry:
        return AttentionGeometry(
            layers or self.layers, self.query_heads, self.kv_heads, self.head_dim, dtype or self.dtype,
            torch.device(self.device, 0) if self.device == "cuda" else torch.device(self.device),
        )  # fmt: skip

    def config(
        self, mean_size: int = 16, score: str = "max", assign: bool = False, hierarchy: Hierarchy = "off"
    ) -> CommunityConfig:
        append: Append = "assign" if assign else "attend"
        return CommunityConfig(
            mean_size=mean_size, score=score, append=append, hierarchy=hierarchy, **dict(self.options)
        )


SMALL = Sizes(
    4, 2, 16, layers=2, device="cpu", dtype=torch.float32,
    options=(("budget", 96), ("block_size", 256), ("append_block", 64), ("recent_window", 16)),
)  # fmt: skip


def visited(config: CommunityConfig, communities: int) -> tuple[int, int]:
    """(communities, groups of them) whose scores a step computes, of so many communities (``ckv::route_coarse``)."""
    if not is_hierarchical(config) or communities <= coarse_from(config):
        return communities, 0
    least, groups = least_groups(config), num_groups(communities)
    parts = coarse_parts(least)
    return min(communities, GROUP * parts * part_quota(groups, 0, least, parts)), groups


def useful_bytes(
    sizes: Sizes, config: CommunityConfig, batch: int, context: int, communities: int, centroid_bytes: int
) -> dict[str, int]:
    """Bytes of one layer that must move at least once, by arm: K and V, centroids, ids and scores.

    A group of communities has a mean and a spread, each as large as a centroid, and its communities' scores are reset.
    """
    element = sizes.dtype.itemsize
    graphs = batch * sizes.kv_heads
    dense = 2 * graphs * context * sizes.head_dim * element
    scored, groups = visited(config, communities)
    route = graphs * (scored * (centroid_bytes + 4) + groups * (2 * centroid_bytes + 4 * GROUP + 8))  # a size, a score
    retrieve = graphs * (scored * 12 + config.budget * 8)  # scores, start and size; members read, list written
    attend = graphs * min(config.budget, context) * (2 * sizes.head_dim * element + 4)
    return {
        "dense": dense, "not_ready": dense, "route": route, "retrieve": retrieve, "attend": attend,
        "ours": route + retrieve + attend,
        "append": 2 * graphs * sizes.head_dim * 2 * element,
    }  # fmt: skip


# ---------------------------------------------------------------------- accuracy


def accuracy_rows(sizes: Sizes, context: int, dtype: torch.dtype, interpret: bool) -> list[dict]:
    """Relative L2 distance of the compiled attention's output to float64 over the same tokens, per case."""
    rows = []
    geometry, config = sizes.geometry(dtype, layers=2), sizes.config()
    cache = DecodeCache(config, geometry, 2, random_slab(geometry, 2, context + 64))
    cache.index(context - 1, context - 1 - 40, config.mean_size)
    restore, lists = cache.saver(), None
    for learned in (False, True):
        logits = torch.linspace(-4, 4, sizes.query_heads, device=geometry.device) if learned else None
        step = DecodeAttention(config, geometry, 2, sink_logits=logits)
        whole = step.compile(interpret=interpret)
        lists = lists or step.compile("route_retrieve", interpret=interpret)
        for scale in (1.0, 4.0):
            restore()
            step.scale_queries(scale)
            rows.append({
                "kind": "accuracy", "dtype": str(dtype).split(".")[1], "sink_logits": learned, "query_scale": scale,
                "context": context, "batch": 2, **_distances(step, cache, whole, lists, restore),
            })  # fmt: skip
            step.scale_queries(1 / scale)
    return rows


@torch.no_grad()
def _distances(step: DecodeAttention, cache: DecodeCache, whole: CompiledStage, lists: CompiledStage, restore) -> dict:
    """Largest distance of a layer, ours and eager PyTorch's in the same dtype."""
    out = whole.function(*step.arguments(whole, cache))
    restore()
    found = dict(zip(lists.outputs, lists.function(*step.arguments(lists, cache)), strict=True))
    restore()
    errors: dict[str, list[float]] = {"rel_l2": [], "eager_rel_l2": []}
    for layer in range(step.geometry.num_layers):
        tokens, count = step.lists(layer, found)
        exact, eager = (
            _reference(step, cache, layer, tokens, count, kind) for kind in (torch.float64, cache.slab.buffer.dtype)
        )
        for name, value in (("rel_l2", out[layer].view(exact.shape)), ("eager_rel_l2", eager)):
            errors[name].append(float((value.double() - exact).norm() / exact.norm()))
    return {name: max(values) for name, values in errors.items()}


def _reference(step: DecodeAttention, cache: DecodeCache, layer: int, tokens, count, dtype: torch.dtype):
    """The layer's attention over these tokens in eager PyTorch: [B, Hq, 1, D]."""
    config, state = cache.config, cache.state
    key, value = (cache.slab.buffer[2 * layer + i].permute(1, 2, 0, 3).to(dtype) for i in range(2))
    return sparse_attention(
        step.query(layer).to(dtype), key, value, tokens, count, state["n_indexed"], state["capacity_0"],
        state["length"].clone(), state["first"],
        step.sink_logits, layer, step.geometry.head_dim**-0.5, config.num_sink_tokens, config.recent_window,
    )  # fmt: skip


# ---------------------------------------------------------------------- speed


@dataclasses.dataclass
class Compiled:
    """One step's attention for a batch size, score and way of appending; no context is compiled in."""

    step: DecodeAttention
    whole: CompiledStage
    stages: dict[str, CompiledStage]


def count_rows(sizes: Sizes, args: argparse.Namespace) -> list[dict]:
    """Bytes and communities of a step by arithmetic, at the target mean size, for every cell of the run."""
    rows = []
    for (context, batch), mean_size, hierarchy in itertools.product(args.cells, args.mean_sizes, args.hierarchy):
        config = sizes.config(mean_size, hierarchy=hierarchy)
        communities, centroid = context // mean_size, sizes.head_dim + 4
        scored, groups = visited(config, communities)
        needed = useful_bytes(sizes, config, batch, context, communities, centroid)
        rows.append({
            "kind": "count", "context": context, "batch": batch, "mean_size": mean_size, "hierarchy": hierarchy,
            "communities": communities, "scored_communities": scored, "scored_groups": groups,
            **{f"{arm}_bytes": needed[arm] for arm in ("dense", "route", "retrieve", "attend", "ours")},
        })  # fmt: skip
    return rows


def show_counts(rows: list[dict], console: Console) -> None:
    parts = ("route", "retrieve", "attend", "ours", "dense")
    table = Table(
        "context", "b", "mean", "hierarchy", "communities", "scored", "groups", *parts, title="bytes of a layer, MB"
    )
    for row in rows:
        if row["kind"] == "count":
            table.add_row(
                f"{row['context']:,}", str(row["batch"]), str(row["mean_size"]), row["hierarchy"],
                f"{row['communities']:,}", f"{row['scored_communities']:,}", f"{row['scored_groups']:,}",
                *(f"{row[f'{part}_bytes'] / 1e6:.2f}" for part in parts),
            )  # fmt: skip
    console.print(table)


def compile_step(config: CommunityConfig, sizes: Sizes, batch: int, stages: bool, interpret: bool) -> Compiled:
    step = DecodeAttention(config, sizes.geometry(), batch)
    names = [
        name for name, operators in STAGES.items()
        if stages and name != "route_retrieve" and any(is_op(node, *operators) for node in step.gm.graph.nodes)
    ]  # fmt: skip
    return Compiled(
        step, step.compile(interpret=interpret), {name: step.compile(name, interpret=interpret) for name in names}
    )


def compiled_key(config: CommunityConfig) -> tuple:
    """Mean sizes that compile alike share a step."""
    groups = (least_groups(config), coarse_from(config)) if is_hierarchical(config) else None
    return config.score, config.append, shortlist_slots(config), groups


def flex_attention_arm(sizes: Sizes, queries, contiguous, context: int):
    """One layer after another through flex_attention with a block mask that excludes nothing."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, q, k: q >= 0, None, None, 1, context, device=sizes.device)
    call = torch.compile(flex_attention, dynamic=False)

    def run() -> None:
        for layer, query in enumerate(queries):
            call(query, contiguous[2 * layer], contiguous[2 * layer + 1], block_mask=mask, enable_gqa=True)

    return run


@torch.no_grad()
def measure(
    sizes: Sizes,
    compiled: Compiled,
    slab,
    cell: dict[str, Any],
    args: argparse.Namespace,
    ceiling: float,
    console: Console,
) -> list[dict]:
    """Rows of one cell, one per arm; an arm that fails is a row with its error."""
    context, batch, mean_size = cell["context"], cell["batch"], cell["mean_size"]
    config = sizes.config(mean_size, cell["score"], cell["assign"], cell["hierarchy"])
    cache = DecodeCache(config, sizes.geometry(), batch, slab)
    length = context - 1  # the step appends the last token of the context
    indexed = length if cell["assign"] else max(length - args.tail, length // 2)
    held = cache.index(length, indexed, mean_size)
    step, device = compiled.step, sizes.device
    restore, empty = cache.saver(), cache.saver(ready=False)
    queries = [step.query(layer) for layer in range(sizes.layers)]
    contiguous = cache.contiguous(context)
    failed: dict[str, str] = {}
    arms: dict[str, Any] = {}
    before = {}

    def add(name: str, function, reset=restore) -> None:
        reset()
        try:
            arms[name], before[name] = capture(function, device), reset
        except Exception as error:  # the other arms go on
            failed[name] = f"{type(error).__name__}: {str(error)[:300]}"
            console.print(f"[red]{name} failed[/red]: {failed[name]}")
            if args.verbose:
                traceback.print_exc()

    arguments = step.arguments(compiled.whole, cache)
    add("ours", lambda: compiled.whole.function(*arguments))
    if not cell["assign"]:
        add("not_ready", lambda: compiled.whole.function(*arguments), empty)
    for name, form in dense_forms(device).items():
        add(name, lambda form=form: [
            form(query, contiguous[2 * layer], contiguous[2 * layer + 1]) for layer, query in enumerate(queries)
        ])  # fmt: skip
    if context == args.flex:
        add("flex", flex_attention_arm(sizes, queries, contiguous, context))
    given: dict[str, torch.Tensor] = {}
    for name, stage in compiled.stages.items():
        if not set(stage.given) <= set(given):
            continue  # what it needs failed
        restore()
        inputs = step.arguments(stage, cache, given)
        try:
            given |= dict(zip(stage.outputs, stage.function(*inputs), strict=True))
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {str(error)[:300]}"
            continue
        add(name, lambda stage=stage, inputs=inputs: stage.function(*inputs))

    attended = None
    if "attend" in arms:
        attended = float(torch.stack([step.lists(layer, given)[1].float() for layer in range(sizes.layers)]).mean())
    times = interleaved(arms, args.repetitions, device, before=before, most_calls=args.most_calls)
    floors = useful_bytes(sizes, config, batch, context, held["communities"], held["centroid_bytes"])
    rows = []
    for name, values in times.items():
        per_layer = [value / sizes.layers for value in values]
        floor = floors.get(name, floors["dense"]) / (ceiling * 1e9)
        rows.append({
            "kind": "speed", "arm": name, **cell, **timing(per_layer), "floor_ms": floor, "layers": sizes.layers,
            "retrieved_tokens": attended, **held,
        })  # fmt: skip
    rows += [{"kind": "speed", "arm": name, **cell, "error": error} for name, error in failed.items()]
    restore()
    return rows


# ---------------------------------------------------------------------- claims


def fastest(rows: list[dict], arms: tuple[str, ...]) -> dict | None:
    timed = [row for row in rows if row["arm"] in arms and "median_ms" in row]
    return min(timed, key=lambda row: row["median_ms"], default=None)


DENSE = ("cudnn", "cudnn_packed", "math")  # what speedups are over: the faster form of torch's best kernel


def claims_of(rows: list[dict]) -> dict[str, float]:
    """Figures by name. The plain ones: mean size 16, score max, assignment included; ``_attend``: without assignment.

    With groups they end in ``_groups``, with them for short contexts too in ``_groups_on``. ``growth``: the exponent of
    the context that the time (bytes: the traffic, by arithmetic) of a step grows with, from the shortest to the longest.
    """
    claims: dict[str, float] = {}
    for dtype, name in (("float32", "fp32"), ("bfloat16", "bf16")):
        errors = [row["rel_l2"] for row in rows if row["kind"] == "accuracy" and row["dtype"] == dtype]
        if errors:
            claims[f"decode_rel_l2_{name}"] = max(errors)
    cells: dict[tuple, list[dict]] = {}
    for row in rows:
        if row["kind"] == "speed" and row["score"] == "max":
            key = row["context"], row["batch"], row["mean_size"], row["assign"], row.get("hierarchy", "off")
            cells.setdefault(key, []).append(row)
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row["kind"] == "count" and row["batch"] == 1:
            name = f"bytes_growth{HIERARCHIES[row['hierarchy']]}_mean{row['mean_size']}"
            curves.setdefault(name, []).append((row["context"], row["ours_bytes"]))
    for (context, batch, mean_size, assign, hierarchy), cell in cells.items():
        label, dense = LABELS.get((context, batch)), fastest(cell, DENSE)
        ours, not_ready = fastest(cell, ("ours",)), fastest(cell, ("not_ready",))
        if ours and batch == 1 and not assign:
            name = f"time_growth{HIERARCHIES[hierarchy]}_mean{mean_size}"
            curves.setdefault(name, []).append((context, ours["median_ms"]))
        if label is None or dense is None:
            continue
        suffix = (
            ("" if mean_size == 16 else f"_mean{mean_size}") + ("" if assign else "_attend") + HIERARCHIES[hierarchy]
        )
        if ours:
            claims[f"decode_attention_speedup_{label}{suffix}"] = dense["median_ms"] / ours["median_ms"]
        if not_ready and label == "131k_b1" and mean_size == 16:
            claims["not_ready_over_dense"] = not_ready["median_ms"] / dense["median_ms"]
    for name, points in curves.items():
        (short, least), (long, most) = min(points), max(points)
        if long >= 4 * short:
            claims[name] = math.log(most / least) / math.log(long / short)
    return claims


def show(rows: list[dict], claims: dict[str, float], console: Console) -> None:
    speed = [row for row in rows if row["kind"] == "speed"]
    names = list(dict.fromkeys(row["arm"] for row in speed))
    table = Table("context", "b", "mean", "score", "assign", "hierarchy", *names, title="µs per layer (floor)")
    cells: dict[tuple, dict[str, dict]] = {}
    for row in speed:
        key = row["context"], row["batch"], row["mean_size"], row["score"], "yes" if row["assign"] else "no"
        key = *key, row["hierarchy"]
        cells.setdefault(key, {})[row["arm"]] = row

    def text(row: dict | None) -> str:
        if row is None:
            return ""
        return f"{row['median_ms'] * 1e3:.1f} ({row['floor_ms'] * 1e3:.1f})" if "median_ms" in row else "failed"

    for key, arms in cells.items():
        table.add_row(*map(str, key), *(text(arms.get(name)) for name in names))
    if cells:
        console.print(table)
    show_counts(rows, console)
    for row in rows:
        if row["kind"] == "accuracy":
            console.print(
                f"{row['dtype']}, queries x {row['query_scale']:g}{', sink logits' if row['sink_logits'] else ''}: "
                f"rel L2 {row['rel_l2']:.2e} (eager {row['eager_rel_l2']:.2e})"
            )
    console.print({name: float(f"{value:.4g}") for name, value in claims.items()})


def plot(path: Path) -> Path:
    """Time of a layer against the context, from a result file; the picture lies beside it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in json.loads(path.read_text())["rows"] if row["kind"] == "speed" and "median_ms" in row]
    figure, axes = plt.subplots(figsize=(7, 4.5), constrained_layout=True)
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row["batch"] == 1 and row["score"] == "max":
            name = row["arm"]
            if name == "ours":
                name = f"ours, mean size {row['mean_size']}{', assigning' if row['assign'] else ''}"
                name += {"off": "", "auto": ", groups"}.get(row.get("hierarchy", "off"), ", groups always")
            lines.setdefault(name, []).append((row["context"], row["median_ms"]))
            if row["arm"] in DENSE:
                lines.setdefault("dense floor", []).append((row["context"], row["floor_ms"]))
    for name, points in lines.items():
        by_context: dict[int, list[float]] = {}
        for context, value in points:
            by_context.setdefault(context, []).append(value * 1e3)
        contexts = sorted(by_context)
        style = ":" if "floor" in name else "-o" if name.startswith("ours") else "--x"
        axes.plot(contexts, [statistics.median(by_context[c]) for c in contexts], style, label=name, markersize=3)
    axes.set(xscale="log", yscale="log", xlabel="context, tokens", ylabel="attention of one layer, µs")
    label_contexts(axes, {row["context"] for row in rows})
    axes.legend(fontsize=7)
    target = path.with_suffix(".png")
    figure.savefig(target, dpi=150)
    plt.close(figure)
    return target


# ----------------------------------------------------------------------


def cell_of(text: str) -> tuple[int, int]:
    context, _, batch = text.partition("x")
    return int(context), int(batch or 1)


def arguments_of(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", type=cell_of, default=list(map(cell_of, CELLS)), help="CONTEXTxBATCH")
    parser.add_argument("--mean-sizes", nargs="+", type=int, default=[16, 8])
    parser.add_argument("--scores", nargs="+", default=["max", "softmax"], choices=("max", "softmax"))
    parser.add_argument(
        "--assign", default="both", choices=("both", "on", "off"), help="of the new token to a community"
    )
    parser.add_argument("--hierarchy", nargs="+", default=["off"], choices=tuple(HIERARCHIES))
    parser.add_argument("--count", action="store_true", help="only count bytes, by arithmetic")
    parser.add_argument("--layers", type=int, default=6, help="different layers in one CUDA graph")
    parser.add_argument("--tail", type=int, default=256, help="tokens not yet indexed where none is assigned")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument(
        "--flex", type=int, default=0, metavar="CONTEXT", help="time flex_attention at this context too"
    )
    parser.add_argument("--ceiling", type=float, help="TB/s for the floors; measured by default")
    parser.add_argument("--accuracy-context", type=int, default=8192)
    parser.add_argument("--no-accuracy", action="store_true")
    parser.add_argument("--no-stages", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a small shape, to see that everything runs")
    parser.add_argument("--interpret", action="store_true", help="run graphs node by node, without Inductor")
    parser.add_argument("--verbose", action="store_true", help="tracebacks of arms that fail")
    parser.add_argument("--out", type=Path, help="folder of the result file")
    parser.add_argument("--plot", type=Path, metavar="JSON", help="only draw a result file")
    args = parser.parse_args(argv)
    args.most_calls = 50
    if args.count and args.cells == list(map(cell_of, CELLS)):
        args.cells = [(2**power, 1) for power in range(16, 21)]
    if args.small:
        args.cells, args.layers, args.accuracy_context, args.tail = [(1000, 1), (1000, 2)], 2, 600, 32
        args.repetitions, args.most_calls = min(args.repetitions, 3), 3
    return args


def main(argv: list[str] | None = None) -> dict[str, float]:
    args = arguments_of(argv)
    console = Console(width=None if Console().is_terminal else 200)
    if args.plot:
        console.print(f"drew {plot(args.plot)}")
        return {}
    sizes = dataclasses.replace(SMALL if args.small else Sizes(), device=args.device, layers=args.layers)
    if args.small and args.device.startswith("cuda"):
        sizes = dataclasses.replace(sizes, dtype=torch.bfloat16)
    rows: list[dict] = count_rows(sizes, args)
    if args.count:
        show(rows, claims_of(rows), console)
        return claims_of(rows)
    if not args.no_accuracy:
        for dtype in TOLERANCE:
            try:
                rows += accuracy_rows(sizes, args.accuracy_context, dtype, args.interpret)
            except Exception as error:
                traceback.print_exc()
                rows.append({"kind": "failure", "arm": f"accuracy {dtype}", "error": str(error)[:300]})
        for row in rows:
            if row["kind"] == "accuracy" and not row["rel_l2"] <= TOLERANCE[getattr(torch, row["dtype"])]:
                raise SystemExit(f"the attention is wrong, nothing was timed: {row}")
    if args.ceiling is None:
        args.ceiling = copy_ceiling(args.device, (4 << 30) if args.device.startswith("cuda") else (64 << 20))
    console.print(f"copy {args.ceiling:.2f} TB/s")
    appends = {"both": (False, True), "on": (True,), "off": (False,)}[args.assign]
    variants = list(itertools.product(args.scores, appends, args.hierarchy))
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    path = None

    def write() -> Path:
        return write_results(
            "sparse_decode", rows, claims_of(rows), device=args.device, label="small" if args.small else "",
            folder=args.out, copy_tb_per_s=args.ceiling, not_ready_over="the faster cuDNN SDPA form",
            unit="ms per layer",
        )  # fmt: skip

    with Progress(*columns, console=console) as progress:
        task = progress.add_task("cells", total=len(args.cells) * len(variants) * len(args.mean_sizes))
        for batch in dict.fromkeys(batch for _, batch in args.cells):
            compiled = {}
            for score, assign, hierarchy in variants:
                progress.update(task, description=f"compiling: batch {batch}, {score}{', assign' if assign else ''}")
                stages = score == args.scores[0] and not args.no_stages
                try:
                    for mean_size in args.mean_sizes:
                        config = sizes.config(mean_size, score, assign, hierarchy)
                        key = compiled_key(config)
                        if key not in compiled:
                            compiled[key] = compile_step(config, sizes, batch, stages, args.interpret)
                except Exception as error:
                    console.print(f"[red]compilation failed[/red]: {error}")
                    rows.append({
                        "kind": "failure", "batch": batch, "score": score, "assign": assign, "hierarchy": hierarchy,
                        "error": f"{type(error).__name__}: {str(error)[:300]}",
                    })  # fmt: skip
                    traceback.print_exc()
            for context in (context for context, of in args.cells if of == batch):
                slab = random_slab(sizes.geometry(), batch, context + SLACK)
                for (score, assign, hierarchy), mean_size in itertools.product(variants, args.mean_sizes):
                    cell = {
                        "context": context, "batch": batch, "mean_size": mean_size, "score": score, "assign": assign,
                        "hierarchy": hierarchy,
                    }  # fmt: skip
                    progress.update(task, description=f"{context} x {batch}")
                    key = compiled_key(sizes.config(mean_size, score, assign, hierarchy))
                    if key in compiled:
                        rows += measure(sizes, compiled[key], slab, cell, args, args.ceiling, console)
                    progress.advance(task)
                previous, path = path, write()  # after every cell, so that a run that is stopped leaves what it has
                if previous:
                    previous.unlink()
                del slab
                gc.collect()
                if args.device.startswith("cuda"):
                    torch.cuda.empty_cache()
    claims = claims_of(rows)
    show(rows, claims, console)
    console.print(f"wrote {path}")
    draw(console, plot, path)
    return claims


if __name__ == "__main__":
    main()
