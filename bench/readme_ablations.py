"""The README's tables of ``bench.ablations``, from the newest results that hold each arm."""

from __future__ import annotations

import json

from bench.results_file import RESULTS

ARM = ("family", "factor", "value", "role", "test")
SETTINGS = {"prompt": "defaults", "stream": "defaults, tokens follow", "layer 0": "defaults, layer 0"}


def newest_arms() -> tuple[dict[tuple, dict], list[str]]:
    """(family, factor, value, role, test) -> cell, of the newest file that holds it; and the files' names.

    Arms whose recall on held-out texts is not known are left out.
    """
    cells: dict[tuple, tuple[dict, str]] = {}
    files = [(json.loads(path.read_text()), path.name) for path in RESULTS.glob("ablations-*.json")]
    for file, name in sorted(files, key=lambda pair: pair[0]["date"]):
        for cell in file["cells"]:
            cells[tuple(cell[part] for part in ARM)] = cell, name
    known = {key[:3] for key, (cell, _) in cells.items() if key[3:] == ("held_out", "both") and "recall" in cell}
    cells = {key: pair for key, pair in cells.items() if key[:3] in known}
    return {key: cell for key, (cell, _) in cells.items()}, sorted({name for _, name in cells.values()})


def ablation_tables() -> str:
    """Of each family, a table of what was measured and a list of what it says about each factor."""
    cells, names = newest_arms()
    lines: list[str] = []
    for family in dict.fromkeys(key[0] for key in cells):
        lines += [*_table(cells, family), "", *_verdicts(cells, family), ""]
    layers = {cell["setting"]: ", ".join(map(str, cell["layers"])) for cell in cells.values() if cell["default"]}
    where = "; ".join(f"{SETTINGS[name]}: {layers[name]}" for name in SETTINGS if name in layers)
    return "\n".join([*lines, f"Layers: {where}. From {', '.join(f'`{name}`' for name in names)}.", ""])


def _table(cells: dict[tuple, dict], family: str) -> list[str]:
    columns = [
        ("recall, choosing", "choosing", "both", "recall"),
        ("recall, held-out Python", "held_out", "python", "recall"),
        ("recall, held-out prose", "held_out", "prose", "recall"),
        ("error, held out", "held_out", "both", "error"),
        ("top-1, held out", "held_out", "both", "top1"),
        ("KL, held out", "held_out", "both", "kl"),
    ]
    heads = ["steps, tokens", *(name for name, *_ in columns), "modularity", "communities, mean size", "seconds"]
    lines = [f'| `graph="{family}"` | ' + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    arms = list(dict.fromkeys(key[1:3] for key in cells if key[0] == family))
    shown = set()
    for arm in sorted(arms, key=lambda arm: _setting(cells, family, arm)):
        found = {key[3:]: cell for key, cell in cells.items() if key[:3] == (family, *arm)}
        one = found["held_out", "both"]
        if one["default"]:
            if one["setting"] in shown:
                continue
            shown.add(one["setting"])
        label = SETTINGS[one["setting"]] if one["default"] else f"{_factor(arm[0])} {arm[1]}"
        samples = f"{one['steps']}, {one['tokens']}" if "tokens" in one else f"{one['steps']}"
        graph = one["graph"]
        lines.append(
            f"| {label} | {samples} | "
            + " | ".join(_measured(found.get((role, test)), measure) for _, role, test, measure in columns)
            + (f" | {graph['modularity']:.3f}" if "modularity" in graph else " | -")
            + (f" | {graph['communities']:.0f}, {graph['mean_size']:.1f}" if "communities" in graph else " | -")
            + f" | {graph['seconds']:.2f} |"
        )
    return lines


def _setting(cells: dict[tuple, dict], family: str, arm: tuple[str, str]) -> tuple[int, bool]:
    """Arms of one setting together, behind their default."""
    cell = cells[family, *arm, "held_out", "both"]
    return list(SETTINGS).index(cell["setting"]), not cell["default"]


def _factor(name: str) -> str:
    return f"`{name}`" if name.replace("_", "").isalnum() and name not in ("groups",) else name


def _measured(cell: dict | None, measure: str) -> str:
    """A mean with its interval, of arms that are no default the difference from it; bold where that excludes 0."""
    if cell is None:
        return "-"
    name = measure if cell["default"] else f"{measure}_difference"
    if name not in cell:
        return "-"
    low, high = cell[f"{name}_interval"]
    if cell["default"]:
        return f"{cell[name]:.3f} ({low:.3f}-{high:.3f})"
    return _bold(f"{cell[name]:+.3f} ({low:+.3f} {high:+.3f})", low, high)


def _bold(text: str, low: float, high: float) -> str:
    """Where an interval excludes 0."""
    return f"**{text}**" if low > 0 or high < 0 else text


def _verdicts(cells: dict[tuple, dict], family: str) -> list[str]:
    """A line per factor: on held-out texts of both kinds, values of clearly more or less recall than the default."""
    lines = []
    for factor in dict.fromkeys(key[1] for key in cells if key[0] == family):
        own = {
            key[2]: cell
            for key, cell in cells.items()
            if (key[0], key[1], key[3], key[4]) == (family, factor, "held_out", "both")
        }
        if len(own) < 2:
            continue
        default = next(value for value, cell in own.items() if cell["default"])
        sides: dict[str, list[str]] = {"better": [], "worse": [], "not told apart": []}
        for value, cell in own.items():
            if value != default:
                kinds = [cells[family, factor, value, "held_out", kind] for kind in ("python", "prose")]
                lows, highs = zip(*(one["recall_difference_interval"] for one in kinds), strict=True)
                side = "better" if min(lows) > 0 else "worse" if max(highs) < 0 else "not told apart"
                sides[side].append(_difference(value, cell))
        parts = [f"{side} {', '.join(found)}" for side, found in sides.items() if found]
        lines.append(f"- {_factor(factor)}, {default} by default: {'; '.join(parts)}")
    return lines


def _difference(value: str, cell: dict) -> str:
    parts = [f"recall {cell['recall_difference']:+.3f}"]
    if "kl_difference" in cell:
        parts.append(_bold(f"KL {cell['kl_difference']:+.3f}", *cell["kl_difference_interval"]))
    return f"{value} ({', '.join(parts)})"
