"""The README's numbers are those of the newest results."""

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
