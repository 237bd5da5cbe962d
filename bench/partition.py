"""Leiden engines on this package's graphs: CPU seconds from neighbour lists to labels, and the modularity reached.

Graphs: planted blocks; lists captured from SmolLM2-135M over Python source (8k tokens: one head, one KV group, nearest
keys); and long contexts assembled from such windows. Every engine gets the same graph and gamma, no size limit, and two
passes (the default of igraph and leidenalg, the plan of attention graphs). One pass, the plan of key graphs, and the
paper's cap of floor(log10 n) iterations for igraph are rows of their own. CPU time is this process's
(time.process_time); igraph and leidenalg run in this process, without any pipe, and are charged for building their own
graph object from a ready edge list. ``attention_graph`` (lists to CSR) is charged to both sides, because eq. 2-4 have
to be evaluated either way; ``*_without_lists`` claims leave it out for igraph.

    python -m bench.partition --nodes 131072
    python -m bench.partition --stream 4096       # instead: partitions that follow generated tokens, against cold ones
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import math
import statistics
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.capture import KAPPA, SINKS, capture
from bench.partition_stream import causal, claims_of_stream, drifting_keys, stream_attention, stream_keys
from bench.results_file import write_results
from ckv_compile.community.engine_process import partition_edges
from ckv_compile.community.engines import edge_list
from ckv_compile.community.graph import TokenGraph, attention_graph, key_graph
from ckv_compile.community.leiden import is_connected, leiden, modularity
from ckv_compile.community.partition import partition_attention
from ckv_compile.community.resolution import ResolutionMemory, SearchPlan, search_gamma
from ckv_compile.config import CommunityConfig
from ckv_compile.smollm2 import load_smollm2

WINDOW = 8192  # tokens of one captured forward
LAYERS = (8, 14, 20)  # a layer of hub keys, and two with local heads
LONG_LAYER, LONG_GROUP = 14, 1
NEAR = 64  # a key further away than this may move to another window when windows are assembled
LEIDENALG_MOST_NODES = 4096
PASSES = 2


def python_text(tokenizer, tokens: int, seed: int) -> list[int]:
    """Token ids of Python's standard library, files in an order that depends on the seed."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    ids: list[int] = []
    for index in np.random.default_rng(seed).permutation(len(files)):
        text = files[index].read_text(errors="ignore")
        if len(text) >= 2000:
            ids += tokenizer(f"# file: {files[index].name}\n{text}\n")["input_ids"]
        if len(ids) >= tokens:
            break
    return ids[:tokens]


def capture_windows(windows: int, progress: Progress) -> dict[str, np.ndarray]:
    """By layer: attention lists and probabilities [windows, H, n, kappa], key lists [windows, KV heads, n, kappa].

    And the keys themselves, float16 [windows, KV heads, n, D].
    """
    import torch

    tokenizer, model = load_smollm2()
    lists: dict[str, list] = {}
    task = progress.add_task("capturing", total=windows * model.config.num_hidden_layers)
    for seed in range(windows):
        text = python_text(tokenizer, WINDOW, seed)
        found = capture(model, text, LAYERS, advance=lambda: progress.advance(task))
        for number, layer in enumerate(LAYERS):
            key = found.keys[number]
            none = torch.zeros(1, dtype=torch.int32)
            near = torch.ops.ckv.key_neighbors(key, none, 0, key.shape[2], KAPPA, SINKS, False).numpy()[0]
            own = found.ids[number], found.alphas[number], near, key[0].half().numpy()
            for name, array in zip(("ids", "alphas", "keys", "vectors"), own, strict=True):
                lists.setdefault(f"{name}{layer}", []).append(array)
    return {name: np.stack(value) for name, value in lists.items()}


def assemble_long(ids: np.ndarray, alphas: np.ndarray, nodes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Lists of ``nodes`` tokens out of captured windows [windows, H, n, kappa]: an approximation of a long context.

    Windows repeat; half of the far keys (beyond NEAR tokens) move to the same place of a window drawn among the earlier
    ones and this one, so that the graph is connected across windows and its edges repeat as little as text does.
    """
    rng = np.random.default_rng(seed)
    windows, _, n, _ = ids.shape
    out_ids, out_alphas = [], []
    for w in range(-(-nodes // n)):
        part = ids[w % windows]
        far = (part >= 0) & (np.arange(n)[None, :, None] - part > NEAR) & (rng.random(part.shape) < 0.5)
        target = np.where(far, rng.integers(0, w + 1, part.shape), w)
        out_ids.append(np.where(part >= 0, part + target * n, -1).astype(np.int32))
        out_alphas.append(alphas[w % windows])
    return (
        np.ascontiguousarray(np.concatenate(out_ids, 1)[:, :nodes]),
        np.ascontiguousarray(np.concatenate(out_alphas, 1)[:, :nodes]),
    )


def planted_lists(nodes: int, block: int, inside: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Lists [1, n, kappa] in which a slot stays inside the token's block with a given probability."""
    rng = np.random.default_rng(seed)
    own = np.arange(nodes)[:, None] // block * block
    within = own + rng.integers(0, block, (nodes, KAPPA))
    ids = np.where(rng.random((nodes, KAPPA)) < inside, within, rng.integers(0, nodes, (nodes, KAPPA)))
    ids = np.minimum(ids, nodes - 1).astype(np.int32)
    return ids[None], rng.random((1, nodes, KAPPA), np.float32) / KAPPA


def repeat(action, repetitions: int) -> tuple[list[float], object]:
    seconds, result = [], None
    for _ in range(repetitions):
        gc.collect()
        begin = time.process_time()
        result = action()
        seconds.append(time.process_time() - begin)
    return seconds, result


def stated_gamma(graph: TokenGraph, mean_size: int, passes: int) -> float:
    """A gamma near the one of a mean community size of connected nodes, from a few evaluations without a size limit."""
    linked = int((np.diff(graph.indptr) > 0).sum())

    def evaluate(gamma: float) -> tuple[np.ndarray, float]:
        labels = leiden(graph, gamma=gamma, passes=passes)
        return labels, linked / max(1, int(labels.max()) + 1 - (graph.num_nodes - linked))

    return round(search_gamma(evaluate, graph.num_nodes / 128, mean_size, tolerance=0.1, corrections=6)[1], 3)


def measure(name: str, build, source: str, mean_size: int, args: argparse.Namespace, engines: list[str]) -> list[dict]:
    graph = build()
    passes = PASSES
    planned = SearchPlan.of(CommunityConfig(graph=source)).passes
    gamma = stated_gamma(graph, mean_size, passes)
    edges, weights = edge_list(graph)
    linked = np.diff(graph.indptr) > 0

    def native(passes: int = PASSES) -> np.ndarray:
        return leiden(graph, gamma=gamma, passes=passes)

    def other(engine: str, iterations: int):
        def run() -> np.ndarray:
            return partition_edges(engine, graph.num_nodes, edges, weights, gamma, iterations, None, 0)

        return run

    most = max(1, int(math.log10(max(10, graph.num_nodes))))
    runs = {"native": (native, args.repetitions, passes)}
    if planned != passes:
        runs[f"native, {planned} pass"] = (lambda: native(planned), args.repetitions, planned)
    if "igraph" in engines:
        runs["igraph"] = (other("igraph", PASSES), args.repetitions, PASSES)
        runs[f"igraph, floor(log10 n) = {most} iterations"] = (other("igraph", most), 1, most)
    if "leidenalg" in engines and graph.num_nodes <= LEIDENALG_MOST_NODES:
        runs["leidenalg"] = (other("leidenalg", PASSES), args.repetitions, PASSES)
    rows = {
        engine: {
            "graph": name, "engine": engine, "nodes": graph.num_nodes, "edges": graph.num_edges,
            "edges_before_pruning": build(0.0).num_edges, "gamma": gamma,
            "passes": count, "lists_cpu_s": [], "run_cpu_s": [],
        }
        for engine, (_, _, count) in runs.items()
    }  # fmt: skip
    for repetition in range(args.repetitions):  # interleaved, so that a disturbance meets every engine
        for engine, (action, repetitions, _) in runs.items():
            if repetition >= repetitions:
                continue
            row = rows[engine]
            row["lists_cpu_s"] += repeat(build, 1)[0]
            seconds, labels = repeat(action, 1)
            row["run_cpu_s"] += seconds
            if repetition == 0:
                sizes = np.bincount(np.unique(labels[linked], return_inverse=True)[1])
                row |= {
                    "modularity": modularity(graph, labels, gamma), "mean_size": float(sizes.mean()),
                    "max_size": int(sizes.max()), "connected": is_connected(graph, labels),
                }  # fmt: skip
                rows[engine] = row
    for row in rows.values():
        totals = [a + b for a, b in zip(row["lists_cpu_s"], row["run_cpu_s"], strict=True)]
        row["median_cpu_s"] = statistics.median(totals)
        row["median_run_cpu_s"] = statistics.median(row["run_cpu_s"])
        row["spread_cpu_s"] = max(totals) - min(totals)
    return list(rows.values())


def claims_of(rows: list[dict]) -> dict[str, float]:
    claims, ratios, capped, planned = {}, {}, {}, {}
    for row in rows:
        if row["engine"] != "native":
            continue
        peers = {other["engine"]: other for other in rows if other["graph"] == row["graph"]}
        if "igraph" not in peers:
            continue
        peer = peers["igraph"]
        ratios[row["graph"]] = row["modularity"] / peer["modularity"]
        for engine, other in peers.items():
            if engine.startswith("igraph,"):
                capped[row["graph"]] = row["modularity"] / other["modularity"]
            elif engine.startswith("native,"):
                planned[row["graph"]] = other["modularity"] / peer["modularity"]
        for kind, suffix in (("head", ""), ("group", "_group")):
            if row["graph"] == f"long {kind}" and row["nodes"] >= 131072 - SINKS:
                claims[f"leiden_cpu_ratio_igraph_131k{suffix}"] = row["median_cpu_s"] / peer["median_cpu_s"]
                claims[f"leiden_cpu_ratio_igraph_131k{suffix}_without_lists"] = (
                    row["median_cpu_s"] / peer["median_run_cpu_s"]
                )
    if ratios:
        claims["leiden_modularity_ratio_igraph"] = min(ratios.values())
    if planned:
        claims["leiden_modularity_ratio_igraph_keys_one_pass"] = min(planned.values())
    if capped:
        claims["leiden_modularity_ratio_igraph_log10n"] = min(capped.values())
    return claims


def warm_up() -> None:
    """Compile the kernels outside of every timing."""
    ids, alphas = planted_lists(256, 16, 0.8, 0)
    graph = attention_graph(ids, alphas, lam=0.5, prune=0.03)
    key_graph(ids[0])
    leiden(graph, gamma=8.0, passes=2)
    modularity(graph, leiden(graph, gamma=8.0), 8.0)
    config = CommunityConfig(graph="attention", max_community_size=64)
    partition_attention(ids, alphas, 0, config=config, memory=ResolutionMemory(), layer=0, graph=0)


def captured_lists(args: argparse.Namespace, progress: Progress) -> dict[str, np.ndarray]:
    """``capture_windows``, or what the file of ``--captured`` kept of it."""
    if args.captured and args.captured.exists():
        with np.load(args.captured) as file:
            return dict(file)
    lists = capture_windows(args.windows, progress)
    if args.captured:
        args.captured.parent.mkdir(parents=True, exist_ok=True)
        np.savez(args.captured, **lists)
    return lists


def stream(args: argparse.Namespace, console: Console) -> None:
    """The mode ``--stream``: print and write how modularity holds while tokens are generated."""
    import torch

    total = args.prompt + args.stream
    ids, alphas = planted_lists(total, 32, 0.8, 0)
    cells = {"planted, 0.8 inside": (causal(ids), alphas)}
    with Progress(console=console) as progress:
        if args.windows:
            if total > WINDOW:
                raise SystemExit(f"--prompt and --stream must be at most {WINDOW} tokens together, got {total}")
            lists = captured_lists(args, progress)
            for layer in LAYERS:
                ids, alphas = lists[f"ids{layer}"][0], lists[f"alphas{layer}"][0]
                cells[f"8k head, layer {layer}"] = ids[:1], alphas[:1]
                cells[f"8k group, layer {layer}"] = ids[:3], alphas[:3]
        default = CommunityConfig(graph="attention")
        never = total + 1
        plans = {
            "repairs and warm passes": default,
            "warm passes": dataclasses.replace(default, repair_interval=0),
            "repairs": dataclasses.replace(default, refresh_interval=never),
        }
        warm_up()
        rows = [
            stream_attention(name, *lists, args.prompt, args.stream, config) | {"plan": plan}
            for name, lists in progress.track(list(cells.items()))
            for plan, config in plans.items()
        ]
        keys = CommunityConfig(min_context=0, workers=0, deterministic=True)
        vectors = {"drifting keys": drifting_keys(total, 32, 0)}
        if args.windows:
            vectors |= {
                f"8k keys, layer {layer}": torch.from_numpy(lists[f"vectors{layer}"][:1])[None] for layer in LAYERS
            }
        rows += [
            stream_keys(name, tensor.float(), args.prompt, args.stream, keys) | {"plan": "small blocks, joined"}
            for name, tensor in vectors.items()
        ]
    table = Table("graph", "plan", "gamma", "modularity", "cold", "ratio", "repair CPU s", "warm CPU s")
    for row in rows:
        spent = [row.get(f"{kind}_cpu_s") for kind in ("repair", "warm")]
        table.add_row(
            row["graph"], row["plan"], f"{row['gamma']:g}", f"{row['modularity']:.5f}", f"{row['cold_modularity']:.5f}",
            f"{row['ratio']:.4f}", *("" if value is None else f"{value:.4f}" for value in spent),
        )  # fmt: skip
    console.print(table)
    claims = claims_of_stream(rows)
    console.print(claims)
    path = write_results("partition_stream", rows, claims, folder=args.out, unit="modularity, eq. 5")
    console.print(f"wrote {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=131072, help="tokens of the long graphs; 0 leaves them out")
    parser.add_argument("--device", default="cpu", choices=("cpu",), help="the engines are host code")
    parser.add_argument("--windows", type=int, default=2, help=f"captured windows of {WINDOW} tokens; 0: planted only")
    parser.add_argument("--captured", type=Path, help="npz to keep the captured lists in, read when it exists")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--engines", default="igraph,leidenalg", help="engines beside the native one")
    parser.add_argument("--out", type=Path, help="folder of the result file")
    parser.add_argument("--stream", type=int, default=0, metavar="TOKENS", help="tokens that are generated")
    parser.add_argument("--prompt", type=int, default=3584, help="tokens before those of --stream")
    args = parser.parse_args()
    console = Console() if sys.stdout.isatty() else Console(width=160)
    engines = args.engines.split(",")
    lam, prune = CommunityConfig(graph="attention").lam, CommunityConfig(graph="attention").prune

    def attention(ids, alphas):
        return lambda prune=prune: attention_graph(ids, alphas, lam=lam, prune=prune, first=SINKS)

    if args.stream:
        stream(args, console)
        return
    rows: list[dict] = []
    with Progress(console=console) as progress:
        warm_up()
        cells = {}
        for nodes, inside in ((4096, 0.8), (16384, 0.6)):
            cells[f"planted {nodes}, {inside} inside"] = (
                attention(*planted_lists(nodes, 32, inside, 0)),
                "attention",
                32,
            )
        if args.windows:
            lists = captured_lists(args, progress)
            for layer in LAYERS:
                ids, alphas, keys = (lists[f"{name}{layer}"] for name in ("ids", "alphas", "keys"))
                cells[f"8k head, layer {layer}"] = (attention(ids[0, :1], alphas[0, :1]), "attention", 16)
                cells[f"8k group, layer {layer}"] = (attention(ids[0, :3], alphas[0, :3]), "attention", 16)
                cells[f"8k keys, layer {layer}"] = (
                    lambda prune=0.0, keys=keys: key_graph(keys[0, 0], first=SINKS),
                    "keys",
                    8,
                )
            if args.nodes:
                heads = slice(3 * LONG_GROUP, 3 * LONG_GROUP + 3)
                ids, alphas = lists[f"ids{LONG_LAYER}"][:, heads], lists[f"alphas{LONG_LAYER}"][:, heads]
                long_ids, long_alphas = assemble_long(ids, alphas, args.nodes, 0)
                cells["long head"] = (attention(long_ids[:1], long_alphas[:1]), "attention", 16)
                cells["long group"] = (attention(long_ids, long_alphas), "attention", 16)
        task = progress.add_task("partitioning", total=len(cells))
        for name, (build, source, mean_size) in cells.items():
            progress.update(task, description=name)
            rows += measure(name, build, source, mean_size, args, engines)
            progress.advance(task)

    table = Table("graph", "engine", "edges", "gamma", "lists s", "run s", "modularity", "mean", "max", "connected")
    for row in rows:
        table.add_row(
            row["graph"], row["engine"], f"{row['edges']:,}", f"{row['gamma']:g}",
            f"{statistics.median(row['lists_cpu_s']):.3f}", f"{row['median_run_cpu_s']:.3f}",
            f"{row['modularity']:.5f}", f"{row['mean_size']:.1f}", str(row["max_size"]), str(row["connected"]),
        )  # fmt: skip
    console.print(table)
    claims = claims_of(rows)
    console.print(claims)
    path = write_results("partition", rows, claims, folder=args.out, unit="CPU seconds, time.process_time")
    console.print(f"wrote {path}")


if __name__ == "__main__":
    main()
