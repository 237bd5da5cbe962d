"""``python -m bench`` lists what ``python -m bench NAME`` runs."""

import subprocess
import sys
from pathlib import Path

from bench.__main__ import benches

ROOT = Path(__file__).parents[2]


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "bench", *arguments], cwd=ROOT, capture_output=True, text=True)


def test_every_bench_is_listed_with_what_it_measures():
    found = benches()
    assert {"sparse_decode", "decode_step", "topk_prefill", "quality", "partition"} <= set(found)
    assert all(found.values())
    text = run("--help").stdout
    assert [name for name in found if name not in text] == []


def test_a_name_runs_and_an_unknown_one_is_refused():
    assert "--check" in run("readme", "--help").stdout
    refused = run("nothing")
    assert refused.returncode == 2
    assert "nothing" in refused.stderr
    assert "readme" in refused.stderr
