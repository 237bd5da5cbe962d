"""The bench of prefill with lists: its small form runs every arm, and claims are what the rows say."""

import importlib.util
import json

import pytest
import torch

from bench import topk_prefill


def test_the_small_form_runs_every_arm(tmp_path):
    topk_prefill.main(["--small", "--device", "cpu", "--repetitions", "1", "--out", str(tmp_path)])
    (path,) = tmp_path.glob("*.json")
    assert path.with_suffix(".svg").exists() == (importlib.util.find_spec("matplotlib") is not None)
    result = json.loads(path.read_text())
    assert not [row for row in result["rows"] if row["kind"] == "failure"]
    speeds = [row for row in result["rows"] if row["kind"] == "speed"]
    for data in ("normal", "local"):
        assert {row["arm"] for row in speeds if row["data"] == data} == {"math", "alone", "fast", "exact"}
    errors = [row for row in result["rows"] if row["kind"] == "error"]
    assert len(errors) == len(speeds)
    assert max(row["rel_l2"] for row in errors) < 1e-5
    lists = [row for row in result["rows"] if row["kind"] == "quality"]
    assert {row["equal_sets"] for row in lists if row["arm"] == "exact"} == {1.0}
    assert min(row["kept_mass"] for row in lists) > 0.99
    assert [row["context"] for row in result["rows"] if row["kind"] == "keys"] == [128]


def test_claims_are_ratios_of_one_case():
    where = {"context": 8, "heads": 4, "kv_heads": 2, "data": "normal"}
    rows = [
        {"kind": "speed", "arm": arm, "median_ms": ms, **where}
        for arm, ms in (("flash", 6.0), ("cudnn", 3.0), ("alone", 4.0), ("fast", 5.0), ("exact", 6.0))
    ]
    rows.append({"kind": "quality", "arm": "fast", "kept_mass": 0.999, "equal_sets": 0.9, **where})
    rows.append({"kind": "failure", "arm": "flex", "error": "no", **where})
    rows.append({"kind": "keys", "context": 8, "median_ms": 1.5})
    assert topk_prefill.claims_of(rows) == pytest.approx(
        {
            "fast_kept_mass_8_4_2_normal": 0.999, "fast_equal_sets_8_4_2_normal": 0.9, "keys_ms_per_layer_8": 1.5,
            "fast_over_alone_8_4_2_normal": 0.25, "exact_over_alone_8_4_2_normal": 0.5,
            "fast_speedup_over_flash_8_4_2_normal": 1.2, "fast_speedup_over_cudnn_8_4_2_normal": 0.6,
            "exact_speedup_over_flash_8_4_2_normal": 1.0, "exact_speedup_over_cudnn_8_4_2_normal": 0.5,
        }
    )  # fmt: skip


def test_lists_that_miss_a_key_are_seen():
    case = topk_prefill.Case(40, 1, 1, 16, 4, "normal")
    query, key, _ = topk_prefill.tensors_of(case, torch.float32, "cpu")
    scores = query[0, 0] @ key[0, 0].T
    scores = scores.masked_fill(torch.ones(40, 40).triu(1).bool(), -torch.inf)
    scores[:, : topk_prefill.SINKS] = -torch.inf
    found = scores.topk(4)
    neighbor = found.indices.masked_fill(found.values == -torch.inf, -1)[None, None]
    assert topk_prefill.quality(case, query, key, neighbor) == {"equal_sets": 1.0, "kept_mass": pytest.approx(1.0)}
    neighbor[..., 0] = neighbor[..., 1]
    assert topk_prefill.quality(case, query, key, neighbor)["equal_sets"] < 0.5
