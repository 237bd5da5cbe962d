"""The README's numbers are those of the newest results."""

import json
import re
from pathlib import Path

from bench import readme, readme_ablations
from ckv_compile.config import CommunityConfig

ROOT = Path(__file__).parents[2]


def test_the_quality_table_equals_the_results():
    text = readme.README.read_text()
    assert readme.with_table(text) == text


def test_the_options_table_names_every_option_with_its_default():
    rows = re.findall(r"^\| (`[a-z_`, ]+`) \| ([^|]+) \|", readme.README.read_text(), re.MULTILINE)
    shown = {name: default for names, default in rows for name in re.findall(r"`(\w+)`", names)}
    config = CommunityConfig()
    for name in CommunityConfig.option_names():
        assert name in shown, f"the README does not name the option {name}"
    for name in ("graph", "block_size", "append_block", "kappa", "lam", "max_community_size", "score", "prune", "budget",
                 "num_sink_tokens", "recent_window", "refresh_interval", "graph_aggregation", "append", "seed", "strict",
                 "leiden_engine", "partition_timeout", "deterministic", "policy", "centroid_budget"):  # fmt: skip
        value = getattr(config, name)
        expected = f'"{value}"' if isinstance(value, str) else str(value)
        assert expected in shown[name], f"{name}: the README says {shown[name]}, the default is {expected}"


def test_the_tasks_table_shows_each_task_of_the_newest_file_that_holds_it(monkeypatch, tmp_path):
    def cell(policy, budget, score, task="vt", **more):
        interval = [score - 0.1, score + 0.1]
        return {
            "task": task, "policy": policy, "budget": budget, "samples": 4, "score": score, "interval": interval,
            "forced_tokens": None, **more,
        }  # fmt: skip

    common = {"model": "smollm2", "prompt_tokens": 2048, "least": 0.5, "skipped": ["fwe"]}
    forced = {"task": "copy", "forced_tokens": 40, "log_likelihood": -0.25}
    files = {
        "tasks-a.json": {
            "date": "2026-01-02",
            "cells": [
                cell("dense", 0, 0.5), cell("keys", 128, 0.5), cell("dense", 0, 0.6, "qa1"), cell("keys", 128, 0.3, "qa1"),
            ],
            **common,
        },
        "tasks-b.json": {
            "date": "2026-01-03",
            "cells": [
                cell("dense", 0, 0.8), cell("keys", 128, 0.7), cell("dense", 0, 0.2, "fwe"),
                cell("dense", 0, 0.9, **forced), cell("keys", 128, 0.6, **forced),
            ],
            **common,
        },
    }  # fmt: skip
    for name, file in files.items():
        (tmp_path / name).write_text(json.dumps(file))
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    assert readme.task_tables().splitlines() == [
        "| SmolLM2-135M, 2,048 tokens | samples | dense | `keys`, 128 |",
        "|---|---|---|---|",
        "| vt, generated | 4 | 0.80 (0.70-0.90) | 0.70 (0.60-0.80) |",
        "| qa1, generated | 4 | 0.60 (0.50-0.70) | 0.30 (0.20-0.40) |",
        "| copy, forced | 4 | 0.90 (0.80-1.00), -0.25 | 0.60 (0.50-0.70), -0.25 |",
        "",
        "Dense below 50%, not compared: fwe (0.20 (0.10-0.30)).",
        "",
        "From `tasks-b.json`, `tasks-a.json`.",
    ]


def test_an_ablation_is_shown_by_its_difference_and_judged_on_both_held_out_texts(monkeypatch, tmp_path):
    def cell(value, role, test, recall, low, high, **more):
        default = value == "8"
        suffix = "" if default else "_difference"
        return {
            "family": "keys", "factor": "kappa", "value": value, "default": default, "role": role, "test": test,
            "setting": "prompt", "layers": [4, 14], "steps": 64,
            "graph": {"modularity": 0.5, "communities": 510.4, "mean_size": 8.0, "seconds": 0.25},
            f"recall{suffix}_interval": [low, high],
            f"error{suffix}": -recall, f"error{suffix}_interval": [-high, -low],
            **{"recall": 0.9, f"recall{suffix}": recall}, **more,
        }  # fmt: skip

    places = [("choosing", "both"), ("held_out", "both"), ("held_out", "python"), ("held_out", "prose")]
    cells = [cell("8", *place, 0.9, 0.8, 1.0) for place in places]
    cells += [cell("4", *place, 0.01, 0.005, 0.02) for place in places]
    cells += [cell("16", *place, 0.01, -0.02 if place[1] == "prose" else 0.005, 0.02) for place in places]
    predicted = {"tokens": 256, "kl_difference": 0.5, "kl_difference_interval": [0.1, 0.9],
                 "top1_difference": 0.0, "top1_difference_interval": [-0.1, 0.1]}  # fmt: skip
    cells += [cell("32", *place, -0.01, -0.02, -0.005, **predicted) for place in places]
    (tmp_path / "ablations-a.json").write_text(json.dumps({"date": "2026-01-02", "cells": cells}))
    monkeypatch.setattr(readme_ablations, "RESULTS", tmp_path)
    lines = readme_ablations.ablation_tables().splitlines()
    assert lines[2].startswith("| defaults | 64 | 0.900 (0.800-1.000) | ")
    assert lines[2].endswith(" | - | - | 0.500 | 510, 8.0 | 0.25 |")
    assert lines[3].startswith("| `kappa` 4 | 64 | **+0.010 (+0.005 +0.020)** | ")
    assert lines[5].startswith("| `kappa` 32 | 64, 256 | **-0.010 (-0.020 -0.005)** | ")
    assert "| +0.000 (-0.100 +0.100) | **+0.500 (+0.100 +0.900)** |" in lines[5]
    assert lines[7] == (
        "- `kappa`, 8 by default: better 4 (recall +0.010); worse 32 (recall -0.010, **KL +0.500**); "
        "not told apart 16 (recall +0.010)"
    )
    assert lines[-1] == "Layers: defaults: 4, 14. From `ablations-a.json`."
