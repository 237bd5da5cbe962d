"""Write the README's table of quality from the newest results that hold its figures: python -m bench.readme [--check]."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from bench.results_file import RESULTS

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- quality -->\n", "<!-- /quality -->"
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


def with_table(text: str) -> str:
    head, rest = text.split(BEGIN)
    return head + BEGIN + "\n" + table() + "\n" + END + rest.split(END)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the README's table is not that of the results")
    arguments = parser.parse_args()
    text = README.read_text()
    if arguments.check:
        if with_table(text) != text:
            raise SystemExit("README.md does not show the newest results; run python -m bench.readme")
        return
    README.write_text(with_table(text))


if __name__ == "__main__":
    main()
