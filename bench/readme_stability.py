"""The README's tables of ``bench.stability``, from the newest results that hold each cell."""

from __future__ import annotations

import json

from bench.results_file import RESULTS

KINDS = {"python": "Python", "prose": "prose"}
# CommunityKV, appendix B.2, per horizon: KL of Incremental and Refresh, agreement of both in percent. Qwen3-8B, prompts of
# 65,536 tokens and a budget of 4,096; its prose is PG-19.
PUBLISHED = {
    ("fixed", "python"): {
        2048: (0.0600, 0.0311, 94.34, 95.63), 4096: (0.0694, 0.0369, 94.53, 95.59),
        8192: (0.1372, 0.0418, 92.30, 95.59),
    },
    ("fixed", "prose"): {
        2048: (0.1525, 0.1144, 82.81, 86.48), 4096: (0.1991, 0.0857, 79.30, 86.80),
        8192: (0.2880, 0.1109, 75.23, 84.61),
    },
    ("sampled", "python"): {
        2048: (0.0290, 0.0150, 98.13, 99.01), 4096: (0.0146, 0.0105, 99.21, 99.11),
        8192: (0.0163, 0.0053, 99.03, 99.61),
    },
    ("sampled", "prose"): {
        2048: (0.0519, 0.0521, 93.96, 93.91), 4096: (0.0083, 0.0196, 99.34, 97.87),
        8192: (0.0045, 0.0097, 99.75, 99.13),
    },
}  # fmt: skip
TITLES = {"fixed": "The text itself goes on", "sampled": "Sampled generations, replayed"}


def newest_cells() -> tuple[dict[tuple, dict], list[str]]:
    """(context, budget, YaRN's factor, mode, text, arm, horizon) -> cell, of the newest file; and the files' names."""
    cells: dict[tuple, tuple[dict, str]] = {}
    paths = [path for path in RESULTS.glob("stability-*.json") if "partial" not in path.name]
    files = [(json.loads(path.read_text()), path.name) for path in paths]
    for file, name in sorted(files, key=lambda pair: pair[0]["date"]):
        for cell in file["cells"]:
            run = cell["context"], cell["budget"], file.get("yarn", 1.0), cell["mode"]
            cells[*run, cell["test"], cell["arm"], cell["horizon"]] = cell, name
    return {key: cell for key, (cell, _) in cells.items()}, sorted({name for _, name in cells.values()})


def stability_tables() -> str:
    """A table for each length of prompt, budget, YaRN's factor and mode: arms by text and horizon.

    Besides, what the paper publishes of its models.
    """
    cells, names = newest_cells()
    if not cells:
        return "Not measured yet.\n"
    lines: list[str] = []
    for run in dict.fromkeys(key[:4] for key in sorted(cells, key=lambda key: key[:4])):
        context, budget, yarn, mode = run
        own = {key[4:]: cell for key, cell in cells.items() if key[:4] == run}
        columns = [
            (text, horizon)
            for text in KINDS
            for horizon in sorted({key[2] for key in own if key[0] == text})
        ]  # fmt: skip
        heads = [f"{KINDS[text]}, {horizon:,}" for text, horizon in columns]
        title = f"{TITLES[mode]}, behind {context:,} tokens, budget {budget}" + (f", YaRN {yarn:g}" if yarn > 1 else "")
        lines += [f"| {title} | {' | '.join(heads)} | attended |", "|---" * (len(columns) + 2) + "|"]
        for arm in dict.fromkeys(key[1] for key in own):
            row = [own.get((text, arm, horizon)) for text, horizon in columns]
            attended = [cell["attended"] for cell in row if cell]
            lines.append(f"| {arm} | {' | '.join(map(_cell, row))} | {sum(attended) / len(attended):.1%} |")
        for place, label in ((0, "the paper's models, incremental"), (1, "the paper's models, refresh")):
            shown = []
            for text, horizon in columns:
                found = PUBLISHED[mode, text].get(horizon)
                shown.append(f"{found[2 + place] / 100:.3f}, KL {found[place]:.4f}" if found else "-")
            if any(one != "-" for one in shown):
                lines.append(f"| {label} | {' | '.join(shown)} | |")
        prompts = sorted({cell["prompts"] for cell in own.values()})
        tokens = sorted({cell["tokens"] for cell in own.values()})
        lines += ["", f"{_span(prompts)} prompts of a text, {_span(tokens)} predictions a cell.", ""]
    return "\n".join([*lines, f"From {', '.join(f'`{name}`' for name in names)}.", ""])


def _span(values: list[int]) -> str:
    return f"{values[0]:,}" if len(values) == 1 else f"{values[0]:,} to {values[-1]:,}"


def _cell(cell: dict | None) -> str:
    if cell is None:
        return "-"
    low, high = cell["top1_interval"]
    more = f", NLL {cell['nll'] - cell['dense_nll']:+.4f}" if cell["mode"] == "fixed" else ""
    return f"{cell['top1']:.3f} ({low:.3f}-{high:.3f}), KL {cell['kl']:.4f}{more}"
