"""What becomes of communities while a real model reads on: SmolLM2-135M over Python source and English prose.

A prompt is followed by further tokens of the same text, teacher-forced and dense; the lists, keys and queries that
attention saw are streamed through the runtime's own publications and operators on the CPU.

    stream   modularity of the streamed partition against a cold one of all tokens at the same gamma (eq. 5)
    recall   share of the attention that lies on what a decode step attends to, at 1/16 of the context (bench/recall.py)
    sizes    mean size of the communities of the whole text, and whether each is connected

A graph is listed where it misses: its ratio below 0.99, or its mean size further than 25 % from the target.

    python -m bench.real_text
    python -m bench.real_text --texts prose --parts recall --layers 0 10 20
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench import texts
from bench.capture import SINKS, Captured, capture
from bench.partition_stream import ratio, stream_attention, stream_keys
from bench.recall import NAMES, stream_recall
from bench.results_file import read_runs, rows_and_texts, write_results
from ckv_compile.community.graph import key_graph
from ckv_compile.community.leiden import is_connected
from ckv_compile.community.partition import Partition, partition_attention, partition_keys_block
from ckv_compile.community.resolution import ResolutionMemory
from ckv_compile.config import CommunityConfig
from ckv_compile.smollm2 import load_smollm2

PARTS = ("stream", "recall", "sizes")
RATIO, MISS = 0.99, 0.25  # what a graph should reach
ATTENTION_EVERY = 3  # layers whose recall is measured with attention graphs, where every step assigns a token


def config_of(graph: str, budget: int, **options) -> CommunityConfig:
    return CommunityConfig(graph=graph, budget=budget, min_context=0, workers=0, deterministic=True, **options)


def heads_of(captured: Captured, layer: int, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Lists and probabilities of the query heads of a group: [H, n, kappa]."""
    size = captured.ids.shape[1] // captured.keys.shape[2]
    heads = slice(group * size, (group + 1) * size)
    return captured.ids[layer, heads], captured.alphas[layer, heads]


def graphs_of(captured: Captured) -> list[tuple[int, int]]:
    return [(layer, group) for layer in range(len(captured.layers)) for group in range(captured.keys.shape[2])]


def streams(captured: Captured, tokens: int, advance: Callable[[], object]) -> list[dict]:
    """Rows of ``stream_attention`` and ``stream_keys`` for every KV group."""
    rows = []
    keys = CommunityConfig(min_context=0, workers=0, deterministic=True)
    for layer, group in graphs_of(captured):
        name = f"layer {captured.layers[layer]}, group {group}"
        lists = heads_of(captured, layer, group)
        attention = stream_attention(name, *lists, captured.start, tokens, CommunityConfig(graph="attention"))
        own = captured.keys[layer, :, group : group + 1][None]
        rows.append({"source": "attention"} | attention)
        rows.append({"source": "keys"} | stream_keys(name, own, captured.start, tokens, keys))
        advance()
    return rows


def size_row(source: str, partition: Partition, graph, mean_size: int, nodes: int, **where) -> dict:
    """Mean size, and whether the communities of nodes with an edge are connected: the others are grouped by position."""
    labels = partition.labels[-graph.num_nodes :].copy()
    labels[np.diff(graph.indptr) == 0] = -1
    mean = float(partition.size.mean())
    return {
        "source": source, **where, "nodes": nodes, "target": mean_size, "mean_size": mean,
        "max_size": int(partition.size.max()),
        "gamma": partition.gamma, "within": abs(mean / mean_size - 1) <= MISS, "connected": is_connected(graph, labels),
    }  # fmt: skip


def sizes(captured: Captured, advance: Callable[[], object]) -> list[dict]:
    """A row per graph of the whole text: attention of a KV group, and each of its blocks of keys."""
    rows, keys, attention = [], CommunityConfig(), CommunityConfig(graph="attention")
    memory = {source: ResolutionMemory() for source in ("keys", "attention")}
    n, block = captured.ids.shape[2], keys.block_size
    none = torch.zeros(1, dtype=torch.int32)
    for layer, group in graphs_of(captured):
        where = {"layer": captured.layers[layer], "group": group}
        place = {"layer": layer, "graph": group}
        partition = partition_attention(
            *heads_of(captured, layer, group), SINKS, config=attention, memory=memory["attention"], **place
        )
        rows.append(size_row("attention", partition, partition.graph, attention.mean_size, n - SINKS, **where))
        key = captured.keys[layer, :, group : group + 1]
        near = torch.ops.ckv.key_neighbors(key, none, 0, n, keys.kappa, SINKS, False, block).numpy()[0]
        for begin in range(0, n, block):
            own, first = near[:, begin : begin + block], max(0, SINKS - begin)
            common = {"config": keys, "memory": memory["keys"], "layer": 100 * layer + group}
            (partition,) = partition_keys_block(own, first, **common)
            graph = key_graph(own[0], first=first)
            nodes = own.shape[1] - first
            rows.append(size_row("keys", partition, graph, keys.mean_size, nodes, **where, block=begin // block))
        advance()
    return rows


def every_nth(captured: Captured, step: int) -> Captured:
    """The same text through every ``step``-th of the layers."""
    return Captured(
        captured.layers[::step], captured.keys[::step], captured.queries[::step], captured.ids[::step],
        captured.alphas[::step], captured.start, captured.scale,
    )  # fmt: skip


def recall_rows(captured: Captured, tokens: int, share: int, every: int, advance: Callable[[], object]) -> list[dict]:
    budget = (captured.start + tokens) // share
    plans = {
        "keys": config_of("keys", budget),
        "keys, append_block 512": config_of("keys", budget, append_block=512),
        "attention": config_of("attention", budget),
    }
    rows = []
    for plan, config in plans.items():
        own = every_nth(captured, ATTENTION_EVERY) if config.graph == "attention" else captured
        found = stream_recall(own, tokens, config, share=share, every=every, advance=advance)
        rows += [{"plan": plan, "append_block": config.append_block, **row} for row in found]
    return rows


def mean_recall(rows: list[dict], plan: str) -> dict[str, float]:
    """Means over layers, heads and steps."""
    own = [row for row in rows if row.get("plan") == plan]
    return {name: float(np.mean([np.mean(row[name]) for row in own])) for name in (*NAMES, "attended", "budget")}


def claims_of(rows: list[dict]) -> dict[str, float]:
    """Shares of graphs that reach their targets, medians and worst ratios, and recalls, by text."""
    claims: dict[str, float] = {}
    for text in dict.fromkeys(row["text"] for row in rows):
        for source in ("keys", "attention"):
            own = [row for row in rows if row["text"] == text and row.get("source") == source]
            ratios = [row["ratio"] for row in own if row["part"] == "stream"]
            sized = [row for row in own if row["part"] == "sizes"]
            name = f"{source}_{text}"
            if ratios:
                claims[f"stream_ratio_median_{name}"] = statistics.median(ratios)
                claims[f"stream_ratio_least_{name}"] = min(ratios)
                claims[f"stream_ratio_reached_{name}"] = float(np.mean(np.array(ratios) >= RATIO))
            if sized:
                claims[f"mean_size_reached_{name}"] = float(np.mean([row["within"] for row in sized]))
                claims[f"connected_{name}"] = float(np.mean([row["connected"] for row in sized]))
        recalled = [row for row in rows if row["text"] == text and row["part"] == "recall"]
        for plan in dict.fromkeys(row["plan"] for row in recalled):
            short = plan.replace(", append_block ", "_append").replace(" ", "_")
            for measure, value in mean_recall(recalled, plan).items():
                claims[f"{measure}_4096_stream_{short}_{text}"] = round(value, 4)
    return claims


def missed(rows: list[dict]) -> list[str]:
    """Graphs that miss a target, in words."""
    lines = []
    for row in rows:
        where = f"{row['text']} {row.get('source')}"
        if row["part"] == "stream" and row["ratio"] < RATIO:
            lines.append(
                f"{where}, {row['graph']}: modularity {row['modularity']:.4f}, cold {row['cold_modularity']:.4f}"
            )
        if row["part"] == "sizes" and not row["within"]:
            lines.append(f"{where}, layer {row['layer']}, group {row['group']}: mean size {row['mean_size']:.1f}")
        if row["part"] == "sizes" and not row["connected"]:
            lines.append(f"{where}, layer {row['layer']}, group {row['group']}: communities that are not connected")
    return lines


def show(rows: list[dict], console: Console) -> None:
    recalled = [row for row in rows if row["part"] == "recall"]
    table = Table("text", "plan", "recall", "behind sinks", "newest", "best", "attended", "budget")
    for text in dict.fromkeys(row["text"] for row in recalled):
        own = [row for row in recalled if row["text"] == text]
        for plan in dict.fromkeys(row["plan"] for row in own):
            mean = mean_recall(own, plan)
            names = "recall", "recall_behind_sinks", "newest", "best"
            table.add_row(
                text, plan, *(f"{mean[name]:.3f}" for name in names), f"{mean['attended']:.0f}", f"{mean['budget']:.0f}"
            )
    if recalled:
        console.print(table)
    for line in missed(rows):
        console.print(line)
    console.print(claims_of(rows))


def captured_text(text: str, args: argparse.Namespace, progress: Progress) -> Captured:
    """``capture``, or what the folder of ``--captured`` kept of it."""
    kept = args.captured and args.captured / f"{text}.pt"
    if kept and kept.exists():
        return torch.load(kept, weights_only=False, mmap=True)
    tokenizer, model = load_smollm2()
    ids = texts.frozen_text(text, tokenizer)
    task = progress.add_task(f"{text}: capturing", total=model.config.num_hidden_layers)
    found = capture(model, ids, args.layers, start=args.prompt, advance=lambda: progress.advance(task))
    if kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
        torch.save(found, kept)
    return found


def merge(paths: list[Path], out: Path | None, console: Console) -> dict[str, float]:
    """One file of the rows of several, such as one for each text."""
    files, runs = read_runs(paths)
    rows, _ = rows_and_texts(files)
    for row in rows:
        if row["part"] == "stream":
            row["ratio"] = ratio(row["modularity"], row["cold_modularity"])
    claims = claims_of(rows)
    show(rows, console)
    more = {"prompt": files[0]["prompt"], "missed": missed(rows), "runs": runs}
    console.print(f"wrote {write_results('real_text', rows, claims, folder=out, label='smollm2', **more)}")
    return claims


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", nargs="+", default=["python", "prose"], choices=("python", "prose"))
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--layers", nargs="+", type=int, help="layers that are captured: all of them")
    parser.add_argument("--prompt", type=int, default=3584, help="tokens before those that are streamed")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens that are streamed")
    parser.add_argument("--share", type=int, default=16, help="context over budget")
    parser.add_argument("--every", type=int, default=32, help="steps from one that is measured to the next")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads")
    parser.add_argument("--captured", type=Path, help="folder to keep what was captured in, read when it exists")
    parser.add_argument(
        "--merge", nargs="+", type=Path, help="join the rows of earlier runs, with claims anew, instead"
    )
    parser.add_argument("--out", type=Path, help="folder of the result file")
    args = parser.parse_args(argv)
    if args.prompt + args.tokens > texts.LENGTH:
        parser.error(f"--prompt and --tokens must be at most {texts.LENGTH} together, got {args.prompt + args.tokens}")
    console = Console()
    if args.merge:
        return merge(args.merge, args.out, console)
    torch.set_num_threads(args.threads)
    rows: list[dict] = []
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        for text in args.texts:
            captured = captured_text(text, args, progress)
            steps = {"stream": len(graphs_of(captured)), "recall": 3 * args.tokens, "sizes": len(graphs_of(captured))}
            for part in args.parts:
                task = progress.add_task(f"{text}: {part}", total=steps[part])

                def advance(task=task) -> None:
                    progress.advance(task)

                if part == "stream":
                    found = streams(captured, args.tokens, advance)
                elif part == "sizes":
                    found = sizes(captured, advance)
                else:
                    found = recall_rows(captured, args.tokens, args.share, args.every, advance)
                rows += [{"text": text, "part": part} | row for row in found]
    claims = claims_of(rows)
    show(rows, console)
    path = write_results(
        "real_text", rows, claims, folder=args.out, label="smollm2", prompt=args.prompt, missed=missed(rows)
    )
    console.print(f"wrote {path}")
    return claims


if __name__ == "__main__":
    main()
