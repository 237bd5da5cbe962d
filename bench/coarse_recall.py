"""Does scoring groups of communities first lose attention? Recall with and without, at equal budget, on real keys.

SmolLM2-135M reads windows of 8,192 tokens of one kind of text; contexts of several windows are their keys one behind the
other, each window with the positions that it was read with, and the queries are the last of the last window. An index of
the context is built and read by the runtime's own publications and operators on the CPU, as ``bench.recall`` does:
recall is the share of the softmax over all keys (``_behind_sinks``: over all but the leading 10) that lies on what a step
attends to, at a budget of 1 / ``share`` of the context; means over heads, layers and steps.

With hierarchy "on" a step scores at least as many communities as its budget has tokens, more for small shares
(``ckv::route_coarse``); "auto" scores all of up to four times as many, so that only shares above 4 mean sizes say what it
loses: the others are harder than what it does.

    python -m bench.coarse_recall                                   # some forty minutes on two cores
    python -m bench.coarse_recall --texts prose --contexts 8192 --layers 0 10 20
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench import texts
from bench.capture import Captured, capture
from bench.recall import stream_recall
from bench.results_file import write_results
from ckv_compile.config import GROUP, CommunityConfig, coarse_from, least_groups
from ckv_compile.index_layout import coarse_parts
from ckv_compile.reference.route_coarse import part_quota
from ckv_compile.smollm2 import load_smollm2

ARMS = ("off", "on")


def window(kind: str, number: int, tokenizer) -> list[int]:
    """Tokens of a window: the frozen text, then fresh ones."""
    return texts.frozen_text(kind, tokenizer) if number == 0 else texts.fresh_text(kind, tokenizer, number)


def captured_window(kind: str, number: int, layers: list[int], folder: Path | None, loaded: list) -> Captured:
    """Keys of a window and the queries of its last quarter, from ``folder`` where they are kept there."""
    path = folder and folder / f"{kind}-{number}-{'-'.join(map(str, layers))}.pt"
    if path and path.exists():
        return torch.load(path, weights_only=False)
    if not loaded:
        loaded += load_smollm2()
    tokenizer, model = loaded
    tokens = window(kind, number, tokenizer)
    found = capture(model, tokens, layers, start=3 * len(tokens) // 4, lists=False, advance=lambda: None)
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(found, path)
    return found


def joined(windows: list[Captured], steps: int) -> Captured:
    """Keys of all windows and the last queries of the last one, as one text."""
    keys, last = torch.cat([one.keys for one in windows], 3), windows[-1]
    return dataclasses.replace(last, keys=keys, queries=last.queries[..., -steps:, :], start=keys.shape[3] - steps)


def scored_share(config: CommunityConfig, context: int) -> float:
    """Communities that a step scores over those of the context, groups counted as two, at the target mean size."""
    communities = context // config.mean_size
    if config.hierarchy == "off" or communities <= coarse_from(config):
        return 1.0
    groups = -(-communities // GROUP)
    least = least_groups(config)
    parts = coarse_parts(least)
    visited = GROUP * parts * part_quota(groups, 0, least, parts)
    return (min(visited, communities) + 2 * groups) / communities


def rows_of(captured: Captured, kind: str, share: int, mean_size: int, steps: int, every: int) -> list[dict]:
    context, rows = captured.keys.shape[3], []
    for arm in ARMS:
        config = CommunityConfig(
            hierarchy=arm, budget=context // share, mean_size=mean_size, min_context=0, workers=0, deterministic=True,
            recent_window=16 if context // share < 256 else 64,
        )  # fmt: skip
        found = stream_recall(captured, steps, config, share=share, every=every, advance=lambda: None)
        rows += [
            {"text": kind, "context": context, "share": share, "mean_size": mean_size, "hierarchy": arm,
             "scored": scored_share(config, context), **row}
            for row in found
        ]  # fmt: skip
    return rows


def mean_of(rows: list[dict], name: str) -> float:
    return float(np.mean([np.mean(row[name]) for row in rows]))


def cells_of(rows: list[dict]) -> dict[tuple, dict[str, list[dict]]]:
    cells: dict[tuple, dict[str, list[dict]]] = {}
    for row in rows:
        key = row["text"], row["context"], row["share"], row["mean_size"]
        cells.setdefault(key, {arm: [] for arm in ARMS})[row["hierarchy"]].append(row)
    return cells


def claims_of(rows: list[dict]) -> dict[str, float]:
    """Recall that is lost, in points of 100, by text, context, budget share and mean size; and the largest loss."""
    claims = {}
    for (text, context, share, mean_size), arms in cells_of(rows).items():
        lost = mean_of(arms["off"], "recall") - mean_of(arms["on"], "recall")
        claims[f"coarse_recall_lost_{text}_{context // 1024}k_share{share}_mean{mean_size}"] = 100 * lost
    if claims:
        claims["coarse_recall_lost_most"] = max(claims.values())
    return claims


def show(rows: list[dict], console: Console) -> None:
    table = Table(
        "text", "context", "mean", "share", "scored", *(f"recall {arm}" for arm in ARMS), "lost", "worst layer"
    )
    for (text, context, share, mean_size), arms in cells_of(rows).items():
        found = {arm: mean_of(own, "recall") for arm, own in arms.items()}
        behind = {arm: mean_of(own, "recall_behind_sinks") for arm, own in arms.items()}
        by_layer = [
            np.mean(off["recall"]) - np.mean(on["recall"]) for off, on in zip(arms["off"], arms["on"], strict=True)
        ]
        table.add_row(
            text, f"{context:,}", str(mean_size), f"1/{share}", f"{arms['on'][0]['scored']:.0%}",
            *(f"{found[arm]:.4f} ({behind[arm]:.4f})" for arm in ARMS), f"{100 * (found['off'] - found['on']):.2f}",
            f"{100 * max(by_layer):.2f}",
        )  # fmt: skip
    console.print(table)


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", nargs="+", default=["python", "prose"], choices=("python", "prose"))
    parser.add_argument("--contexts", nargs="+", type=int, default=[8192, 32768], help="multiples of 8,192 tokens")
    parser.add_argument("--shares", nargs="+", type=int, default=[16, 64], help="context over budget")
    parser.add_argument("--mean-sizes", nargs="+", type=int, default=[8, 16])
    parser.add_argument("--layers", nargs="+", type=int, default=list(range(0, 30, 3)))
    parser.add_argument("--steps", type=int, default=1024, help="decode steps behind the prompt, at most 2048")
    parser.add_argument("--every", type=int, default=32, help="steps from one that is measured to the next")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads")
    parser.add_argument("--captured", type=Path, help="folder to keep what was captured in, read when it exists")
    parser.add_argument("--out", type=Path, help="folder of the result file")
    args = parser.parse_args(argv)
    for context in args.contexts:
        if context <= 0 or context % texts.LENGTH:
            parser.error(f"--contexts must be multiples of {texts.LENGTH}, got {context}")
    torch.set_num_threads(args.threads)
    console, rows, loaded = Console(), [], []  # type: ignore[var-annotated]
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        for kind in args.texts:
            count = max(args.contexts) // texts.LENGTH
            task = progress.add_task(f"{kind}: reading", total=count)
            windows = []
            for number in reversed(range(count)):  # the frozen text is the last, whose queries are measured
                windows.append(captured_window(kind, number, args.layers, args.captured, loaded))
                progress.advance(task)
            cells = [(c, s, m) for c in args.contexts for s in args.shares for m in args.mean_sizes]
            task = progress.add_task(f"{kind}: recall", total=len(cells))
            for context, share, mean_size in cells:
                text = joined(windows[count - context // texts.LENGTH :], args.steps)
                rows += rows_of(text, kind, share, mean_size, args.steps, args.every)
                progress.advance(task)
    show(rows, console)
    claims = claims_of(rows)
    path = write_results("coarse_recall", rows, claims, folder=args.out, label="smollm2")
    console.print(f"wrote {path}")
    return claims


if __name__ == "__main__":
    main()
