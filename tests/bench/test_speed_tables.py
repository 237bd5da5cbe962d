"""The bench of the paper's speed tables: its small form runs every part, parts fail alone, and figures are what rows say."""

import importlib
import json
from pathlib import Path

import pytest
import torch

from bench import breakdown, part_processes, readme_tables, speed_cells, speed_parts, speed_tables
from bench.part_processes import Limits, Part
from bench.planted import planted_lists
from ckv_compile import backend
from ckv_compile.community import partition
from ckv_compile.community.resolution import ResolutionMemory
from ckv_compile.config import CommunityConfig


def test_the_small_form_runs_every_part(restored, tmp_path):
    claims = speed_tables.main(["--small", "--device", "cpu", "--interpret", "--out", str(tmp_path)])
    (path,) = tmp_path.glob("*.json")
    result = json.loads(path.read_text())
    assert result["claims"] == claims
    rows = result["rows"]
    assert not [row for row in rows if row["kind"] in ("failure", "skipped")]
    assert {(row["kind"], row["arm"]) for row in rows if row["kind"] != "prepared"} == {
        ("table5", "eager"), ("table5", "keys"), ("table5", "group"), ("table5", "head"), ("step", "dense"),
        ("step", "ours"), ("table10", "eager"), ("table10", "keys"), ("table10", "group"), ("moe", "eager"),
        ("moe", "ours"), ("moe", "ours, bare step"), ("moe", "ours, 16 tokens"), ("moe_share", "eager"),
        ("moe_share", "ours"), ("layer", "ours"), ("layer", "transformers"), ("layer", "math, no sinks"),
    }  # fmt: skip
    ours = [row for row in rows if row["kind"] == "table5" and row["arm"] != "eager"]
    assert {row["communities"] for row in ours} == {"planted"}
    assert {(row["arm"], row["edges"]) for row in ours} == {
        ("keys", "the model's"), ("group", "planted"), ("head", "planted")
    }  # fmt: skip
    for row in ours:
        assert row["sparse_steps"] == row["decode_steps"] == 19
        assert row["index_gib"] > 0
        assert row["cache_gib"] > 0
    watched = {row["arm"]: row["prefill"] for row in rows if row["kind"] == "table10"}
    assert watched["group"]["partitions"] >= 2  # of each layer
    assert not watched["eager"]["partitions"]


@pytest.mark.slow
def test_each_graph_is_compiled_once(restored, monkeypatch):
    """Nothing is compiled while a cell is measured, and no graph for one length first."""
    args = speed_tables.arguments_of(["--small", "--device", "cpu"])
    compiled = []
    monkeypatch.setattr(backend, "_compile", lambda gm, *_, **__: compiled.append(gm) or gm.forward)
    for part in speed_parts.parts_of(args):
        if part.name.endswith("/group"):
            compiled.clear()
            prepared = part.start(part, lambda row: None)
            prepared.prepare()
            assert len(compiled) == 2
            prepared.measure(lambda: 1e9)
            assert len(compiled) == 2


# ---------------------------------------------------------------------- parts in processes


@pytest.fixture
def told(monkeypatch):
    """Makes parts that do what they are told; processes find their module by the path."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    return importlib.import_module("told_parts").told


def test_a_part_that_raises_or_dies_leaves_a_row_and_the_others_go_on(told):
    parts = told("raises", "runs", "dies", "raises late")
    rows = [row for _, row in part_processes.run_apart(parts, Limits(120, processes=4))]
    found = {part.name: [(row["kind"], row.get("error")) for row in rows if row["part"] == part.name] for part in parts}
    assert found == {
        "part0": [("failure", "ValueError: no such thing")],
        "part1": [("prepared", None), ("cell", None)],
        "part2": [("failure", "its process ended with 3")],
        "part3": [("prepared", None), ("cell", None), ("failure", "ValueError: too late")],
    }


@pytest.mark.slow
def test_what_is_not_begun_in_time_is_skipped_and_what_hangs_is_ended(monkeypatch, told):
    monkeypatch.setattr(part_processes, "GRACE_SECONDS", 1.0)
    rows = [row for _, row in part_processes.run_apart(told("hangs", "runs"), Limits(12, processes=2))]
    assert [(row["part"], row["kind"]) for row in rows if row["kind"] != "prepared"] == [
        ("part0", "cell"), ("part0", "failure"), ("part1", "skipped")
    ]  # fmt: skip


def test_parts_share_a_wave_while_one_can_measure_beside_the_others():
    parts = [
        Part(str(place), print, None, rest, peak) for place, (rest, peak) in enumerate([(10, 40), (10, 60), (30, 35)])
    ]
    limits = Limits(1, gib=80, processes=3)
    assert [[part.name for part in wave] for wave in part_processes.waves(parts, limits)] == [["0", "1"], ["2"]]


# ---------------------------------------------------------------------- planted edges


def test_planted_lists_are_causal_distinct_and_have_communities():
    neighbor, weight = planted_lists(4, 2, 3000, 8, 10, "cpu")
    assert neighbor.shape == weight.shape == (1, 4, 3000, 8)
    known = neighbor >= 0
    assert (neighbor < torch.arange(3000)[None, None, :, None]).all()
    assert (neighbor[known] >= 10).all()
    assert (weight[known] > 0).all()
    assert not weight[~known].any()
    ordered = neighbor.sort(-1).values
    assert not ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any()
    assert known[:, :, 200:].float().mean() > 0.75
    config = CommunityConfig(graph="attention", workers=0)
    found = partition.partition_attention(
        neighbor[0, :2].numpy(), weight[0, :2].numpy(), 10, config=config, memory=ResolutionMemory(), layer=0, graph=0
    )
    assert 8 < found.size.mean() < 32


# ---------------------------------------------------------------------- kernels


def test_kernels_are_told_apart_by_arguments_and_names():
    code = """
x = async_compile.triton('triton_tem_fused_1', '''
    'signature': {'arg_KEY_NEW': '*bf16', 'arg_VALUE_NEW': '*bf16', 'arg_KEY': '*bf16'}
''')
y = async_compile.triton('triton_tem_fused_2', '''
    'signature': {'arg_QUERY': '*bf16', 'arg_CENTROID': '*i8', 'arg_SCORES': '*fp32'}
''')
z = async_compile.triton('triton_poi_fused_3', '''
    'signature': {'in_ptr0': '*bf16'}
''')
"""
    ours = breakdown.kinds_of_code(code)
    assert ours == {"triton_tem_fused_1": "append", "triton_tem_fused_2": "route"}
    assert breakdown.code_with({"append", "route"}, ["", code, ""]) == ours
    assert breakdown.code_with({"assign"}, [code]) == {}
    events = [
        {"name": name, "thread": thread, "begin": 0, "end": 1_000_000}
        for name, thread in (
            ("triton_tem_fused_1", 7), ("triton_poi_fused_3", 7), ("nvjet_tst_64x8", 7), ("ckv_key_neighbors", 7),
            ("cudnn_generated_fort_native_sdpa_sm90", 7), ("DeviceRadixSortOnesweepKernel", 20), ("Memcpy DtoH", 20),
        )
    ]  # fmt: skip
    kinds, costliest = breakdown.by_kind(events, ours, main=7)
    assert kinds == {"append": 1, "rest": 1, "linear": 1, "lists": 1, "attention": 1, "graph": 1, "copy": 1}
    assert costliest["append: triton_tem_fused_1"] == [1, 1.0]
    assert breakdown.busiest_stream(events) == 7


# ---------------------------------------------------------------------- figures


def rows_of_a_request():
    common = {"model": "qwen3-8b", "context": 131072}
    eager = {"new_tokens": 72, "prefill_s": 12.0, "median_ms": 40.0, "peak_gib": 40.0}
    whole = {"new_tokens": 1024, "index_wait_s": 6.0, "index_gib": 2.0, "cache_gib": 16.0, "peak_gib": 44.0}
    return [
        {"kind": "table5", "arm": "eager", **common, **eager},
        {"kind": "step", "arm": "dense", "part": "table5/qwen3-8b/dense", **common, "median_ms": 10.0},
        {"kind": "table5", "arm": "group", **common, **whole, "prefill_s": 14.0, "whole_s": 20.0, "median_ms": 6.0},
        {"kind": "step", "arm": "dense", "part": "curve", "model": "qwen2.5-7b", "context": 32768, "median_ms": 6.0},
        {"kind": "step", "arm": "ours", "part": "curve", "model": "qwen2.5-7b", "context": 32768, "median_ms": 4.0},
        {"kind": "failure", "part": "gpt-oss", "error": "x"},
    ]  # fmt: skip


def test_requests_put_prefill_and_steps_together():
    eager, dense, group = speed_cells.requests(rows_of_a_request())
    assert (eager["arm"], dense["arm"], group["arm"]) == ("eager", "dense", "group")
    assert eager["whole_s"] == pytest.approx(12 + 1023 * 0.04)
    assert dense["whole_s"] == pytest.approx(12 + 1023 * 0.01)
    assert group["tokens_per_s"] == pytest.approx(1024 / 20)
    assert group["request_per_s"] == pytest.approx(1024 / 26)
    assert group["decode_per_s"] == pytest.approx(1023 / 6)


def test_claims_of_requests_are_over_the_dense_step():
    claims = speed_tables.claims_of(rows_of_a_request())
    assert claims == pytest.approx(
        {
            "table5_speedup_8b_128k_group": 22.23 / 20, "table5_speedup_eager_8b_128k_group": (12 + 40.92) / 20,
            "ttft_over_eager_8b_128k_group": 14 / 12, "peak_over_eager_8b_128k_group": 1.1,
            "aux_over_kv_percent_8b_128k_group": 12.5, "curve_speedup_32k": 1.5,
        }
    )  # fmt: skip


def test_the_readme_shows_what_was_measured_and_says_what_was_not():
    table = readme_tables.request_table(rows_of_a_request())
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in table.splitlines()}
    assert (
        "1.11x | 1.62x | 170.5 | 14.00 | 6.0 | 2.00 (12%) | 44.0"
        in lines['Qwen3-8B, 128k, `graph="attention"`, per group']
    )
    assert "not measured" in lines['Qwen3-8B, 128k, `graph="keys"`']
    assert "1.24x per head, 1.71x per group" in lines["Qwen3-4B, 128k"]
    assert readme_tables.curve_table(rows_of_a_request()).count("not measured") == 12
    assert readme_tables.moe_table([]).count("not measured") == 7
    assert "not measured" in readme_tables.breakdown_table([])
