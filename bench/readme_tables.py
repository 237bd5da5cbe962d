"""The README's tables of ``bench.speed_tables`` and ``bench.peers``, from the newest results; what was never measured
says so.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

from bench.results_file import RESULTS
from bench.speed_cells import PUBLISHED_TABLE_5, TABLE_ARMS, newest, requests

NOT_MEASURED = "not measured"
MODELS = {"qwen3-4b": "Qwen3-4B", "qwen3-8b": "Qwen3-8B", "qwen3-14b": "Qwen3-14B"}
CONTEXTS = (65536, 131072)
CURVE = (32768, 65536, 131072, 262144, 524288)
ARM_NAMES = {
    "eager": "eager `generate`", "dense": "dense step, CUDA graph", "keys": '`graph="keys"`',
    "head": '`graph="attention"`, per head', "group": '`graph="attention"`, per group',
}  # fmt: skip
BREAKDOWN = {"eager": "eager", "keys": '`graph="keys"`', "group": '`graph="attention"`'}
PREFILL_ROWS = {
    "attention": "attention, with lists where they come with it", "lists": "lists, apart from it",
    "linear": "linear layers", "rest": "the rest", "graph": "graphs, on a stream beside", "copy": "copies",
}  # fmt: skip
DECODE_ROWS = {
    "append": "append", "route": "route", "retrieve": "retrieve", "attend": "attend and merge", "assign": "assign",
    "attention": "attention of a library", "linear": "linear layers", "copy": "copies", "rest": "the rest",
}  # fmt: skip


def tables_section() -> str:
    rows, names, where = measured_rows("speed_tables")
    parts = [request_table(rows), breakdown_table(rows), curve_table(rows), moe_table(rows)]
    return "\n".join(line for part in parts for line in (part, "")) + _source(names, where)


def measured_rows(bench: str) -> tuple[list[dict], list[str], str]:
    """Rows of a bench on a GPU, oldest first, so that the last that fits is the newest; the files' names; the device."""
    rows: list[dict] = []
    names: list[str] = []
    where = ""
    files = [(json.loads(path.read_text()), path.name) for path in RESULTS.glob(f"{bench}-*.json")]
    for file, name in sorted(files, key=lambda pair: pair[0]["date"]):
        if file["bench"] == bench and "cpu" not in file["device"].lower() and "core" not in file["device"].lower():
            rows += file["rows"]
            names.append(name)
            where = f"{file['device']}, torch {file['versions']['torch']}"
    return rows, names, where


def _source(names: list[str], where: str) -> str:
    return f"From {', '.join(f'`{name}`' for name in names)} ({where}).\n" if names else ""


def _k(tokens: int) -> str:
    return f"{tokens // 1024}k"


def _number(row: dict | None, entry: str, form: str = "{:.1f}") -> str:
    value = None if row is None else row.get(entry)
    return NOT_MEASURED if row is None else "-" if value is None else form.format(value)


def _table(*lines: list[str]) -> str:
    head, *body = lines
    return "\n".join(["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *body)])


def request_table(rows: list[dict]) -> str:
    """Whole requests; the paper's speedups beside ours."""
    table = requests(rows)
    lines = [[
        "whole requests", "tokens", "tokens/s", "over the dense step", "the paper's", "without prefill",
        "first token, s", "wait for the index, s", "index, GiB (of KV)", "peak, GiB",
    ]]  # fmt: skip
    for model, name in MODELS.items():
        for context in CONTEXTS:
            cells = [row for row in table if (row["model"], row["context"]) == (model, context)]
            if not cells:
                published = [(arm, PUBLISHED_TABLE_5.get((model, context, arm))) for arm in TABLE_ARMS]
                paper = ", ".join(f"{speedup:.2f}x per {arm}" for arm, speedup in published if speedup)
                lines.append([f"{name}, {_k(context)}", "-", NOT_MEASURED, NOT_MEASURED, paper, *[NOT_MEASURED] * 5])
            for tokens in sorted({row["new_tokens"] for row in cells}):
                own = {row["arm"]: row for row in cells if row["new_tokens"] == tokens}
                dense = own.get("dense")
                for arm in TABLE_ARMS:
                    row = own.get(arm)
                    speedup = NOT_MEASURED if row is None else "-"
                    if row is not None and dense is not None:
                        speedup = f"{dense['whole_s'] / row['whole_s']:.2f}x"
                    published = PUBLISHED_TABLE_5.get((model, context, arm))
                    index = _number(row, "index_gib", "{:.2f}")
                    if row is not None and row.get("cache_gib"):
                        index += f" ({row['index_gib'] / row['cache_gib']:.0%})"
                    wait = _number(row, "index_wait_s") if arm in ("keys", "group", "head") else "-"
                    if row is not None and row.get("communities") == "planted":
                        wait = "planted"
                    lines.append([
                        f"{name}, {_k(context)}, {ARM_NAMES[arm]}", f"{tokens:,}",
                        _number(row, "tokens_per_s"), speedup, f"{published:.2f}x" if published else "-",
                        _number(row, "decode_per_s"), _number(row, "prefill_s", "{:.2f}"), wait, index,
                        _number(row, "peak_gib"),
                    ])  # fmt: skip
    return _table(*lines)


def breakdown_table(rows: list[dict]) -> str:
    found = {arm: newest(rows, "table10", arm) for arm in BREAKDOWN}
    where = next((row for row in found.values() if row is not None), None)
    title = "" if where is None else f" ({MODELS.get(where['model'], where['model'])}, {_k(where['context'])})"

    def cell(arm: str, part: str, *path: str, form: str = "{:.2f}") -> str:
        row = found[arm]
        if row is None:
            return NOT_MEASURED
        value: Any = row[part]
        for name in path:
            value = value.get(name) if value is not None else None
        return "-" if value is None else form.format(value)

    def line(label: str, part: str, *path: str, form: str = "{:.2f}") -> list[str]:
        return [label, *(cell(arm, part, *path, form=form) for arm in BREAKDOWN)]

    lines = [[f"where the time goes{title}", *BREAKDOWN.values()]]
    lines.append(line("prefill while watched, s", "prefill", "wall_s"))
    lines += [line(f"- {label}", "prefill", "busy_s", kind, form="{:.3f}") for kind, label in PREFILL_ROWS.items()]
    lines += [
        line("partition, seconds of workers", "prefill", "partition_busy_s"),
        line("partition, s after the prefill", "prefill", "index_after_s"),
        line("publication, s of the caller", "prefill", "publication_s"),
        line("decode step while watched, ms", "decode", "wall_ms"),
    ]
    lines += [line(f"- {label}", "decode", "busy_ms", kind, form="{:.3f}") for kind, label in DECODE_ROWS.items()]
    return _table(*lines)


def curve_table(rows: list[dict]) -> str:
    own = [row for row in rows if row.get("part") == "curve"]
    lines = [["Qwen2.5-7B's shape, a step", *(_k(context) for context in CURVE)]]
    cells = {arm: [newest(own, "step", arm, None, context) for context in CURVE] for arm in ("dense", "ours")}
    for arm, label in (("dense", "dense, ms"), ("ours", "communities, ms")):
        lines.append([label, *(_number(row, "median_ms", "{:.2f}") for row in cells[arm])])
    both = zip(cells["dense"], cells["ours"], strict=True)
    lines.append([
        "dense over ours",
        *(NOT_MEASURED if dense is None or ours is None else f"{dense['median_ms'] / ours['median_ms']:.2f}x"
          for dense, ours in both),
    ])  # fmt: skip
    return _table(*lines)


def moe_table(rows: list[dict]) -> str:
    lines = [["gpt-oss-20b's shape, 32k", "ms"]]
    for arm, label in (
        ("eager", "eager `generate`, a token"), ("ours", "`generate`, a token"), ("ours, bare step", "bare step"),
        ("ours, 16 tokens", "bare step behind 16 tokens"),
    ):  # fmt: skip
        lines.append([label, _number(newest(rows, "moe", arm), "median_ms", "{:.2f}")])
    for arm, label in (("eager", "eager"), ("ours", "bare step")):
        share = newest(rows, "moe_share", arm)
        parts = NOT_MEASURED
        if share is not None:
            parts = ", ".join(f"{kind} {ms:.2f}" for kind, ms in share["parts_ms"].items()) or "-"
        lines.append([f"of it, {label}", parts])
    layers = {row["arm"]: row for row in rows if row["kind"] == "layer"}
    alone = ", ".join(f"{arm} {statistics.median(row['raw_ms']):.3f}" for arm, row in layers.items())
    lines.append(["attention of a full layer", alone or NOT_MEASURED])
    return _table(*lines)


# ---------------------------------------------------------------------- other packages

PEER_TEXTS = {"python": "Python source", "prose": "English prose"}
# What papers report of their own systems and baselines; none of it was run here.
PUBLISHED = (
    ("CommunityKV, a decode step at 131k of Qwen3-4B, 8B and 14B on an H100, over FlashAttention-2 under transformers' "
     "dynamic cache", "1.69x, 1.86x, 1.39x", "CommunityKV, table 10"),
    ("clusters in Triton, a decode step at 128k of Qwen2.5-7B-Instruct-1M on an RTX PRO 6000, over transformers' "
     "flex_attention", "1.92x", "the notebook on sparse decoding, not peer-reviewed"),
    ("the same at 512k", "5.37x", "the same"),
    ("the same kernel, a decode step at 32k of gpt-oss-20b", "1.45x", "the same"),
)  # fmt: skip


def peers_section() -> str:
    """Of the newest results on a GPU for speed, and of the newest of any kind for quality."""
    rows, names, where = measured_rows("peers")
    quality: list[dict] = []
    files = [(json.loads(path.read_text()), path.name) for path in RESULTS.glob("peers-*.json")]
    for file, name in sorted(files, key=lambda pair: pair[0]["date"]):
        own = [row for row in file["rows"] if row["kind"] == "quality"]
        quality += own
        names = [*names, name] if own and name not in names else names
    speed = [row for row in rows if row["kind"] != "quality"]
    return peer_tables(speed + quality) + "\n\n" + published_table() + "\n\n" + _source(names, where or "a CPU")


def peer_tables(rows: list[dict]) -> str:
    ours = newest(rows, "layer", "ours")
    lines = [["decode attention of a layer, 128k", "time"]]
    arms = dict.fromkeys(row["arm"] for row in rows if row["kind"] == "layer")
    for arm in arms or ("ours", "flash-attn", "flashinfer-python"):
        row = newest(rows, "layer", arm)
        if row is None or "error" in row:
            lines.append([arm, NOT_MEASURED if row is None else row["error"]])
            continue
        text = f"{row['median_ms'] * 1e3:.1f} us"
        if arm != "ours" and ours is not None and "median_ms" in ours:
            text += f" ({row['median_ms'] / ours['median_ms']:.2f}x ours)"
        lines.append([arm, text])
    parts = [_table(*lines)]
    lines = [["whole requests, Qwen3-8B's shape, 128k", "first token, s", "ms a token", "peak, GiB"]]
    arms = dict.fromkeys(row["arm"] for row in rows if row["kind"] == "generate")
    for arm in arms or ("transformers", "ours", "kvpress"):
        row = newest(rows, "generate", arm)
        if row is not None and "error" in row:
            lines.append([arm, row["error"], "-", "-"])
        else:
            cells = (("prefill_s", "{:.2f}"), ("median_ms", "{:.2f}"), ("peak_gib", "{:.1f}"))
            lines.append([arm, *(_number(row, entry, form) for entry, form in cells)])
    parts.append(_table(*lines))
    quality = [row for row in rows if row["kind"] == "quality"]
    lines = [["top-1 agreement with dense, KL, SmolLM2-135M", *PEER_TEXTS.values()]]
    for arm in dict.fromkeys(row["arm"] for row in quality) or ("communities, keys", "kvpress"):
        cells, budget = [], ""
        for text in PEER_TEXTS:
            row = next((row for row in reversed(quality) if (row["arm"], row["text"]) == (arm, text)), None)
            budget = budget or (f", budget {row['budget']}" if row is not None and "budget" in row else "")
            if row is None or "error" in row:
                cells.append(NOT_MEASURED if row is None else row["error"])
            else:
                cells.append(f"{row['top1']:.3f}, KL {row['kl']:.4f}")
        lines.append([arm + budget, *cells])
    parts.append(_table(*lines))
    return "\n\n".join(parts)


def published_table() -> str:
    return _table(["published, not measured here", "ratio", "by"], *(list(row) for row in PUBLISHED))
