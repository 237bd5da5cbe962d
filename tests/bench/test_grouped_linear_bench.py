"""The bench of linear layers: its small form runs every arm, and claims are what the rows say."""

import json

import pytest

from bench import grouped_linear


def test_the_small_form_runs_every_arm(tmp_path):
    grouped_linear.main(["--small", "--device", "cpu", "--repetitions", "1", "--sets", "2", "--out", str(tmp_path)])
    (path,) = tmp_path.glob("*.json")
    result = json.loads(path.read_text())
    assert not [row for row in result["rows"] if row["kind"] == "failure"]
    for case, names in (("qkv", {"separate", "joined"}), ("down", {"separate"})):
        for rows in (1, 4):
            arms = [row["arm"] for row in result["rows"] if (row["case"], row["rows"]) == (case, rows)]
            assert {arm for arm in arms if not arm.startswith("ours")} == names
            assert len([arm for arm in arms if arm.startswith("ours")]) == 2
    assert {
        f"layer_us_{arm}_tiny_m{rows}" for arm in ("separate", "joined", "first", "best", "floor") for rows in (1, 4)
    } == set(result["claims"])


def speed(case, arm, us, **more):
    return {"kind": "speed", "case": case, "rows": 1, "arm": arm, "median_ms": us / 1e3, "floor_ms": 0.002, **more}


def test_claims_add_up_a_layer():
    first, second = ({"BLOCK_N": n, "BLOCK_K": 1, "num_warps": 1, "STAGES": 1, "UNROLL": 1} for n in (1, 2))
    rows = [
        speed("qkv", "separate", 9), speed("qkv", "joined", 6), speed("qkv", "ours a", 5, tuned=first),
        speed("qkv", "ours b", 4, tuned=second), speed("down", "separate", 8), speed("down", "ours a", 6, tuned=first),
        speed("down", "ours b", 6.5, tuned=second), {"kind": "failure", "case": "down", "rows": 1, "arm": "ours c"},
    ]  # fmt: skip
    claims = grouped_linear.claims_of(rows, grouped_linear.SMALL)
    totals = {"separate": 17, "joined": 14, "first": 11, "best": 10, "floor": 4}
    assert claims == pytest.approx({f"layer_us_{arm}_tiny_m1": total for arm, total in totals.items()})
    best, other = grouped_linear.ranking(rows, 1)
    assert best[0].startswith("BLOCK_N=2 ")
    assert (best[1:], other[1:]) == (pytest.approx((2.625, 2)), pytest.approx((2.75, 2)))
