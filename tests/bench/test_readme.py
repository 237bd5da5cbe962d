"""The README's numbers are those of the newest results."""

import json
import re
from pathlib import Path

from bench import readme
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
