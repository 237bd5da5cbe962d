"""Write the README's tables from the newest results that hold their figures: python -m bench.readme [--check]."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from bench.readme_ablations import ablation_tables
from bench.readme_speed import speed_tables
from bench.readme_stability import stability_tables
from bench.readme_tables import peers_section, tables_section
from bench.results_file import RESULTS

README = Path(__file__).parent.parent / "README.md"
TESTS = {"python": "Python source", "prose": "English prose", "copy": "copying an earlier passage"}


def newest_cells() -> dict[tuple[str, str, str, int], dict]:
    """(texts, test, policy, budget) -> cell, of the newest file that holds it."""
    files = [json.loads(path.read_text()) for path in RESULTS.glob("quality-*.json")]
    cells = {}
    for file in sorted(files, key=lambda file: file["date"]):
        for cell in file["cells"]:
            cells[cell["texts"], cell["test"], cell["policy"], cell["budget"]] = cell
    return cells


def table() -> str:
    cells = newest_cells()
    budgets = sorted({budget for *_, budget in cells})
    policies = dict.fromkeys(policy for _, _, policy, _ in cells)
    order = [name for name in ("keys", "attention", "mixed", "streaming", "random") if name in policies]
    lines = []
    for texts, heading in (("frozen", "Texts known by their hash"), ("fresh", "Texts that no option was chosen on")):
        tests = [test for test in TESTS if any(key[:2] == (texts, test) for key in cells)]
        if not tests:
            continue
        lines += [f"{heading}:", ""]
        for test in tests:
            tokens = next(cell["tokens"] for key, cell in cells.items() if key[:2] == (texts, test))
            lines.append(f"| {TESTS[test]}, {tokens} tokens | " + " | ".join(f"budget {b}" for b in budgets) + " |")
            lines.append("|---" * (len(budgets) + 1) + "|")
            for policy in order:
                row = [cells.get((texts, test, policy, budget)) for budget in budgets]
                if any(row):
                    lines.append(f"| `{policy}` | " + " | ".join(_cell(cell) for cell in row) + " |")
            lines.append("")
    return "\n".join(lines)


def _cell(cell: dict | None) -> str:
    if cell is None:
        return "-"
    low, high = cell["top1_interval"]
    return f"{cell['top1']:.3f} ({low:.3f}-{high:.3f}), KL {cell['kl']:.4f}"


def stream_table() -> str:
    """Of the newest results of ``bench.real_text`` for each text, with the files' names."""
    claims: dict[str, tuple[dict, str]] = {}
    files = [(json.loads(path.read_text()), path.name) for path in RESULTS.glob("real_text-*.json")]
    for file, name in sorted(files, key=lambda pair: pair[0]["date"]):
        for row in file["rows"]:
            claims[row["text"]] = file["claims"], name
    order = [text for text in TESTS if text in claims]
    lines = ["| | " + " | ".join(TESTS[text] for text in order) + " |", "|---" * (len(order) + 1) + "|"]

    def line(label: str, form: str, *names: str) -> None:
        cells = [form.format(*(claims[text][0][f"{name}_{text}"] for name in names)) for text in order]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")

    for plan, label in (
        ("keys", "`keys`"),
        ("keys_append512", "`keys`, `append_block=512`"),
        ("attention", "`attention`"),
    ):
        names = [f"{name}_4096_stream_{plan}" for name in ("recall", "recall_behind_sinks", "attended", "budget")]
        line(f"recall, {label}", "{:.3f} ({:.3f}), {:.0f} of {:.0f} tokens", *names)
    for measure, label in (("newest", "sinks and newest tokens"), ("best", "best list of a group")):
        line(
            f"recall, {label}",
            "{:.3f} ({:.3f})",
            *(f"{one}_4096_stream_keys" for one in (measure, f"{measure}_behind_sinks")),
        )
    for source in ("keys", "attention"):
        names = [f"stream_ratio_{one}_{source}" for one in ("reached", "median", "least")]
        line(f"modularity over cold, `{source}`", "{:.0%} of graphs, median {:.3f}, least {:.3f}", *names)
        names = [f"mean_size_reached_{source}", f"connected_{source}"]
        line(f"mean size, connected, `{source}`", "{:.0%}, {:.1%} of graphs", *names)
    files_used = ", ".join(f"`{name}`" for name in dict.fromkeys(claims[text][1] for text in order))
    return "\n".join([*lines, "", f"From {files_used}.", ""])


def newest_policies() -> tuple[list[dict], dict[str, dict], dict, list[str]]:
    """Cells and index costs of ``bench.policies``, of the newest file that holds each; the newest file, and all names."""
    files = [(json.loads(path.read_text()), path.name) for path in RESULTS.glob("policies-*.json")]
    files.sort(key=lambda pair: pair[0]["date"])
    cells: dict[tuple, tuple[dict, str]] = {}
    costs: dict[str, dict] = {}
    for file, name in files:
        costs |= file["costs"]
        for cell in file["cells"]:
            cells[cell["test"], cell["policy"], cell["budget"]] = cell, name
    return [cell for cell, _ in cells.values()], costs, files[-1][0], sorted({name for _, name in cells.values()})


def policies_table() -> str:
    """What ``bench.policies`` measured: of each text, what is attended to, and what is predicted."""
    cells, costs, newest, names = newest_policies()
    budgets = sorted({cell["budget"] for cell in cells})
    lines = []
    for text in [text for text in TESTS if any(cell["test"] == text for cell in cells)]:
        own = {(cell["policy"], cell["budget"]): cell for cell in cells if cell["test"] == text}
        policies = list(dict.fromkeys(policy for policy, _ in own))
        context, tokens = newest["context"], next(iter(own.values()))["tokens"]
        heads = " | ".join(f"{budget} (1/{context // budget})" for budget in budgets)
        lines += [f"| {TESTS[text]}, recall and output error | {heads} | index |", "|---" * (len(budgets) + 2) + "|"]
        for policy in policies:
            row = [own.get((policy, budget)) for budget in budgets]
            shown = [f"{cell['recall']:.3f}, {cell['error']:.3f}" if cell else "-" for cell in row]
            cost = costs[policy]
            index = f"{cost['bytes'] / cost['kv_bytes']:.1%}, {cost['seconds']:.0f} s"
            lines.append(f"| `{policy}` | {' | '.join(shown)} | {index} |")
        lines += ["", f"| {TESTS[text]}, {tokens} tokens | {heads} |", "|---" * (len(budgets) + 1) + "|"]
        for policy in policies:
            lines.append(f"| `{policy}` | " + " | ".join(_cell(own.get((policy, budget))) for budget in budgets) + " |")
        lines += [
            "",
            f"Less KL than communities on {TESTS[text]} (bold: the paired 95 % interval of the difference excludes 0):",
            "",
        ]
        lines += [f"- {budget} tokens: {_ahead(own, policies, budget)}" for budget in budgets]
        lines.append("")
    return "\n".join([*lines, f"From {', '.join(f'`{name}`' for name in names)}.", ""])


def _ahead(own: dict[tuple[str, int], dict], policies: list[str], budget: int) -> str:
    """Policies of less KL than communities at a budget, best first."""
    ours = own["communities", budget]["kl"]
    found = []
    for policy in policies:
        cell = own.get((policy, budget))
        if cell is not None and cell["kl"] < ours:
            sure = cell["communities_kl_gain_interval"][1] < 0
            found.append((cell["kl"], f"**`{policy}`**" if sure else f"`{policy}`"))
    return ", ".join(name for _, name in sorted(found)) or "none"


TASK_MODELS = {
    "smollm2": "SmolLM2-135M",
    "retrieval_llama": "the retrieval model",
    "retrieval_gpt_oss": "the retrieval model with learned sinks",
}


def task_tables() -> str:
    """One table per model and length of prompt; of each task, the newest results of ``bench.tasks`` that hold it."""
    newest: dict[tuple[str, int], dict[str, tuple[dict, str]]] = {}
    files = [(json.loads(path.read_text()), path.name) for path in RESULTS.glob("tasks-*.json")]
    for file, name in sorted(files, key=lambda pair: pair[0]["date"]):
        of_model = newest.setdefault((file["model"], file["prompt_tokens"]), {})
        of_model |= {cell["task"]: (file, name) for cell in file["cells"]}
    lines: list[str] = []
    for (model, length), tasks in sorted(newest.items(), key=lambda item: (item[0][0] != "smollm2", item[0])):
        cells = {
            (task, cell["policy"], cell["budget"]): cell
            for task, (file, _) in tasks.items()
            for cell in file["cells"]
            if cell["task"] == task
        }
        arms = list(dict.fromkeys((policy, budget) for _, policy, budget in cells if policy != "dense"))
        heads = [f"`{policy}`, {budget}" for policy, budget in arms]
        title = TASK_MODELS.get(model, model)
        lines.append(f"| {title}, {length:,} tokens | samples | dense | " + " | ".join(heads) + " |")
        lines.append("|---" * (len(arms) + 3) + "|")
        for task, (file, _) in tasks.items():
            if task not in file["skipped"]:
                row = [cells.get((task, policy, budget)) for policy, budget in [("dense", 0), *arms]]
                kind = "forced" if row[0]["forced_tokens"] else "generated"
                lines.append(f"| {task}, {kind} | {row[0]['samples']} | " + " | ".join(map(_score, row)) + " |")
        lines.append("")
        skipped = [task for task, (file, _) in tasks.items() if task in file["skipped"]]
        if skipped:
            scores = ", ".join(f"{task} ({_score(cells[task, 'dense', 0])})" for task in skipped)
            lines += [f"Dense below {tasks[skipped[0]][0]['least']:.0%}, not compared: {scores}.", ""]
        names = ", ".join(f"`{name}`" for name in dict.fromkeys(name for _, name in tasks.values()))
        lines += [f"From {names}.", ""]
    return "\n".join(lines)


def _score(cell: dict | None) -> str:
    if cell is None:
        return "-"
    low, high = cell["interval"]
    likelihood = f", {cell['log_likelihood']:.2f}" if "log_likelihood" in cell else ""
    return f"{cell['score']:.2f} ({low:.2f}-{high:.2f}){likelihood}"


SECTIONS = {
    "quality": table, "streams": stream_table, "stability": stability_tables, "policies": policies_table,
    "tasks": task_tables, "ablations": ablation_tables, "speed": speed_tables, "tables": tables_section,
    "peers": peers_section,
}  # fmt: skip


def with_table(text: str) -> str:
    for name, made in SECTIONS.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        head, rest = text.split(begin)
        text = head + begin + "\n" + made() + "\n" + end + rest.split(end)[1]
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the README's tables are not those of the results")
    arguments = parser.parse_args()
    text = README.read_text()
    if arguments.check:
        if with_table(text) != text:
            raise SystemExit("README.md does not show the newest results; run python -m bench.readme")
        return
    README.write_text(with_table(text))


if __name__ == "__main__":
    main()
