"""The README's tables of what was measured on a GPU, from the newest results."""

from __future__ import annotations

import json
import statistics

from bench.results_file import RESULTS

# what rows of several arms share that took turns
CELL = ("kind", "context", "batch", "mean_size", "score", "assign", "heads", "kv_heads", "data", "model", "graph")


def speed_tables() -> str:
    """Of the newest results on a GPU: attention of a decode step, whole steps, attention of a prefill."""
    parts = []
    for bench, made in (
        ("sparse_decode", _decode_table),
        ("decode_step", _step_table),
        ("topk_prefill", _prefill_table),
    ):
        rows, names, where = newest_rows(bench)
        if rows:
            parts += [made(rows), "", f"From {', '.join(f'`{name}`' for name in names)} ({where}).", ""]
    return "\n".join(parts)


def newest_rows(bench: str) -> tuple[list[dict], list[str], str]:
    """Rows of a bench on a GPU, those of one cell from the newest file that has it; the files' names; the device."""
    cells: dict[tuple, tuple[list[dict], str]] = {}
    where = ""
    files = [(json.loads(path.read_text()), path.name) for path in RESULTS.glob(f"{bench}-*.json")]
    for file, name in sorted(files, key=lambda pair: pair[0]["date"]):
        if file["bench"] != bench or "cpu" in file["device"].lower():
            continue
        where = f"{file['device']}, torch {file['versions']['torch']}"
        own: dict[tuple, list[dict]] = {}
        for row in file["rows"]:
            if row["kind"] in ("speed", "step", "generate") and row.get("hierarchy", "off") == "off":
                own.setdefault(tuple(row.get(entry) for entry in CELL), []).append(row)
        for cell, rows in own.items():
            if len({row["arm"] for row in rows}) > 1:
                cells[cell] = rows, name
    rows = [row for rows, _ in cells.values() for row in rows]
    return rows, sorted({name for _, name in cells.values()}), where


def _contexts(rows: list[dict]) -> list[int]:
    return sorted({row["context"] for row in rows})


def _k(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def _decode_table(rows: list[dict]) -> str:
    speeds = [row for row in rows if row["kind"] == "speed" and row["score"] == "max" and "median_ms" in row]
    ways = [(16, False), (16, True), (8, False), (8, True)]
    lines = [
        "| decode attention of a layer, us | dense, cuDNN | "
        + " | ".join(f"mean size {size}{', assigning' if assigns else ''}" for size, assigns in ways) + " |",
        "|---" * (len(ways) + 2) + "|",
    ]  # fmt: skip
    for context, batch in sorted({(row["context"], row["batch"]) for row in speeds}):
        own = [row for row in speeds if (row["context"], row["batch"]) == (context, batch)]
        cells, dense = [], min(row["median_ms"] for row in own if row["arm"] == "cudnn")
        for way in ways:
            ours = [
                row["median_ms"] for row in own if row["arm"] == "ours" and (row["mean_size"], row["assign"]) == way
            ]
            beside = [
                row["median_ms"] for row in own if row["arm"] == "cudnn" and (row["mean_size"], row["assign"]) == way
            ]
            cells.append(f"{ours[0] * 1e3:.1f} ({beside[0] / ours[0]:.2f}x)" if ours and beside else "-")
        lines.append(f"| {_k(context)} tokens, batch {batch} | {dense * 1e3:.1f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _step_table(rows: list[dict]) -> str:
    lines = [
        "| Qwen3-8B, batch 1 | dense step, ms | step, ms | eager `generate`, ms a token | `generate`, ms a token |",
        "|---" * 5 + "|",
    ]
    whole = [
        row for row in rows if row.get("whole") and row["model"] == "qwen3-8b" and row.get("graph", "keys") == "keys"
    ]

    def median(kind: str, arm: str, context: int) -> float | None:
        values = [
            value for row in whole
            if (row["kind"], row["arm"], row["context"]) == (kind, arm, context) for value in row["raw_ms"]
        ]  # fmt: skip
        return statistics.median(values) if values else None

    def pair(kind: str, dense: str, ours: str, context: int) -> list[str]:
        before, after = median(kind, dense, context), median(kind, ours, context)
        first = "-" if before is None else f"{before:.2f}"
        if after is None:
            return [first, "-"]
        return [first, f"{after:.2f} ({before / after:.2f}x)" if before else f"{after:.2f}"]

    for context in _contexts([row for row in whole if row["kind"] in ("step", "generate")]):
        cells = pair("step", "dense", "ours", context) + pair("generate", "eager", "generate", context)
        lines.append(f"| {_k(context)} tokens | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _prefill_table(rows: list[dict]) -> str:
    speeds = [row for row in rows if row["kind"] == "speed" and row["data"] == "normal"]
    arms = [
        ("flash", "FlashAttention 2"),
        ("cudnn", "cuDNN"),
        ("alone", "ours"),
        ("fast", "`fast`"),
        ("exact", "`exact`"),
    ]
    lines = [
        "| causal attention of a layer, ms | " + " | ".join(label for _, label in arms) + " |",
        "|---" * (len(arms) + 1) + "|",
    ]
    for heads, kv_heads, context in sorted({(row["heads"], row["kv_heads"], row["context"]) for row in speeds}):
        own = {
            row["arm"]: row["median_ms"] for row in speeds
            if (row["heads"], row["kv_heads"], row["context"]) == (heads, kv_heads, context)
        }  # fmt: skip
        cells = [f"{own[arm]:.2f}" if arm in own else "-" for arm, _ in arms]
        lines.append(f"| {_k(context)} tokens, {heads}/{kv_heads} heads | " + " | ".join(cells) + " |")
    return "\n".join(lines)
