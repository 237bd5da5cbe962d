"""The speed benches: their small forms run every arm, and claims are what the rows say."""

import json

import pytest
import torch

from bench import decode_layer, decode_step, sparse_decode
from ckv_compile.config import CommunityConfig
from ckv_compile.passes.rewrite_plan import AttentionGeometry


def result_of(folder):
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text())


# ---------------------------------------------------------------------- communities


@pytest.mark.parametrize("mean", [8, 16])
def test_random_communities_cover_every_position_once_inside_blocks(mean):
    config = CommunityConfig()
    first, stop = config.num_sink_tokens, 10_000
    member, start, size = decode_layer.random_partition((2, 3), first, stop, mean, config, "cpu", seed=0)
    assert size.max() <= config.max_community_size
    for members, starts, sizes in zip(member.flatten(0, 1), start.flatten(0, 1), size.flatten(0, 1), strict=True):
        assert members.sort().values.tolist() == list(range(first, stop))
        assert int(sizes.sum()) == stop - first
        for begin, count in zip(starts[sizes > 0].tolist(), sizes[sizes > 0].tolist(), strict=True):
            blocks = members[begin : begin + count] // config.block_size
            assert len(blocks.unique()) == 1
    used = (size > 0).sum(-1).float()
    assert float((stop - first) / used.mean()) == pytest.approx(mean, rel=0.1)


def test_the_sizes_of_communities_have_a_heavy_tail():
    weights = decode_layer.size_weights(8, 64)
    sizes = torch.arange(1, 65, dtype=torch.float64)
    weights = torch.tensor(weights)
    assert float(weights @ sizes) == pytest.approx(8)
    assert float(weights[31:].sum()) > 0.01


def test_an_index_of_random_communities_is_read_as_a_published_one():
    config = CommunityConfig(budget=64, block_size=128, append_block=64, recent_window=8, append="assign")
    geometry = AttentionGeometry(2, 4, 2, 16, torch.float32, torch.device("cpu"))
    cache = decode_layer.DecodeCache(config, geometry, 2, decode_layer.random_slab(geometry, 2, 700))
    cache.index(500, 480, 8)
    step = decode_layer.DecodeAttention(config, geometry, 2)
    whole = step.compile(interpret=True)
    arguments = step.arguments(whole, cache)
    restore = cache.saver()
    first = whole.function(*arguments)
    assert cache.sequence.length_device.tolist() == [501]
    restore()
    assert cache.sequence.length_device.tolist() == [500]
    attended, context = cache.sequence.index.tally.sum(0).tolist()
    assert context == 2 * 2 * 2 * 501
    assert 40 * 8 < attended <= 64 * 8
    assert not any(value.isnan().any() for value in first)
    label, size = cache.sequence.index.label[0, 0, 0], cache.sequence.index.size[0, 0, 0]
    assert torch.equal(torch.bincount(label[label >= 0], minlength=len(size)).int(), size)


# ---------------------------------------------------------------------- one layer


def test_the_small_form_of_sparse_decode_runs_every_arm(restored, tmp_path):
    sparse_decode.main(["--small", "--device", "cpu", "--interpret", "--scores", "max", "--out", str(tmp_path)])
    result = result_of(tmp_path)
    assert {"ours", "not_ready", "math", "append", "route", "retrieve", "attend", "assign"} == {
        row["arm"] for row in result["rows"] if row["kind"] == "speed"
    }
    assert not [row for row in result["rows"] if "error" in row]
    assert result["claims"]["decode_rel_l2_fp32"] < 1e-6
    assert len([row for row in result["rows"] if row["kind"] == "accuracy"]) == 8


def speed(arm, median, context=131072, batch=1, mean=16, assign=True, score="max"):
    return {
        "kind": "speed", "arm": arm, "context": context, "batch": batch, "mean_size": mean, "assign": assign,
        "score": score, "median_ms": median,
    }  # fmt: skip


def test_speedups_are_over_the_faster_form_of_dense_in_the_same_cell():
    rows = [
        speed("ours", 0.03), speed("cudnn", 0.15), speed("cudnn_packed", 0.12), speed("flash", 0.01),
        speed("ours", 0.04, mean=8), speed("cudnn", 0.2, mean=8),
        speed("ours", 0.02, assign=False), speed("cudnn", 0.1, assign=False), speed("not_ready", 0.11, assign=False),
        speed("ours", 0.001, score="softmax"), speed("cudnn", 9, score="softmax"),
        speed("ours", 0.05, context=524288), speed("ours", 0.05, context=32768), speed("cudnn", 0.05, context=32768),
        {"kind": "failure", "error": "x"},
    ]  # fmt: skip
    assert sparse_decode.claims_of(rows) == pytest.approx(
        {
            "decode_attention_speedup_131k_b1": 4.0,
            "decode_attention_speedup_131k_b1_mean8": 5.0,
            "decode_attention_speedup_131k_b1_attend": 5.0,
            "not_ready_over_dense": 1.1,
        }
    )


def test_the_worst_case_is_the_accuracy_claimed():
    rows = [
        {"kind": "accuracy", "dtype": dtype, "rel_l2": error}
        for dtype, error in (("float32", 1e-7), ("float32", 3e-7), ("bfloat16", 2e-3))
    ]
    assert sparse_decode.claims_of(rows) == {"decode_rel_l2_fp32": 3e-7, "decode_rel_l2_bf16": 2e-3}


# ---------------------------------------------------------------------- whole models


def test_the_small_form_of_decode_step_runs_every_arm(restored, tmp_path):
    decode_step.main(["--small", "--device", "cpu", "--interpret", "--out", str(tmp_path)])
    result = result_of(tmp_path)
    assert not [row for row in result["rows"] if row["kind"] == "failure"]
    assert {(row["kind"], row["arm"]) for row in result["rows"]} == {
        ("step", "dense"), ("step", "ours"), ("nonattention", "dense"), ("nonattention", "ours"),
        ("generate", "eager"), ("generate", "generate"), ("generate", "static"), ("generate", "dynamic"),
    }  # fmt: skip
    for row in result["rows"]:
        assert len(row["raw_ms"]) == 3
        if "sparse_steps" in row:
            assert row["sparse_steps"] == row["decode_steps"] == 19


def row(kind, arm, times, context=131072, model="qwen3-8b", **more):
    times = times if isinstance(times, list) else [times]
    return {
        "kind": kind, "arm": arm, "context": context, "model": model, "layers": 36, "whole": True, "raw_ms": times,
        "median_ms": times[len(times) // 2], **more,
    }  # fmt: skip


def test_claims_are_ratios_of_medians_over_all_repetitions():
    rows = [
        row("step", "dense", [10, 11, 12]), row("step", "ours", [5, 5.5, 100]), row("step", "ours", 6, 65536),
        row("nonattention", "dense", 4.9), row("nonattention", "ours", 4.5, 16),
        row("generate", "eager", [40, 44], prefill_s=12.0, peak_gib=40.0),
        row("generate", "generate", [6], prefill_s=15.0, peak_gib=44.0),
        row("generate", "generate", [7], prefill_s=12.0, peak_gib=44.0),
        row("generate", "static", 5, 32768, prefill_s=1.0, peak_gib=None), row("generate", "dynamic", 6, 32768),
        {"kind": "failure", "arm": "dense", "model": "qwen3-8b", "layers": 36, "whole": True, "error": "x"},
    ]  # fmt: skip
    claims = decode_step.claims_of(rows)
    assert claims == pytest.approx(
        {
            "decode_step_speedup_128k": 2.0, "decode_step_ms_128k": 5.5, "decode_step_ms_64k": 6,
            "generate_speedup_128k": 42 / 6.5, "generate_over_step_128k": 6.5 / 5.5, "peak_over_eager_128k": 1.1,
            "prefill_over_eager_128k": 13.5 / 12, "nonattention_ms_dense": 4.9, "nonattention_ms_ours": 4.5,
            "static_over_dynamic": 1.2,
        }
    )  # fmt: skip


def test_fewer_layers_claim_nothing_but_that_a_million_tokens_run():
    rows = [
        row("step", "dense", 10) | {"whole": False}, row("step", "ours", 5) | {"whole": False},
        row("step", "ours", 3.5, 1_048_576) | {"whole": False, "layers": 20},
    ]  # fmt: skip
    assert decode_step.claims_of(rows) == {"step_1m_ms": 3.5, "step_1m_layers": 20}


def test_claims_of_other_models_end_in_their_name():
    rows = [row("step", "dense", 9, model="qwen3-4b"), row("step", "ours", 3, model="qwen3-4b")]
    assert decode_step.claims_of(rows)["decode_step_speedup_128k_qwen3-4b"] == 3.0


def test_groups_save_bytes_of_long_contexts_only():
    args = sparse_decode.arguments_of(["--count", "--hierarchy", "off", "auto", "--mean-sizes", "8"])
    rows = sparse_decode.count_rows(sparse_decode.Sizes(), args)
    route = {(row["context"], row["hierarchy"]): row["route_bytes"] for row in rows}
    for context in (65_536, 131_072):
        assert route[context, "auto"] == route[context, "off"] == 8 * (context // 8) * (128 + 4 + 4)
    # A group has a mean and a spread of 128 channels, two scales and eight scores; sqrt(16384 * 512) / 2 groups of those
    # are looked into, 23 of each of 64 parts.
    assert route[2**20, "auto"] == 8 * (16_384 * (2 * 132 + 8 + 32) + 64 * 23 * 8 * 136)
    assert route[2**20, "off"] > 2.5 * route[2**20, "auto"]
    claims = sparse_decode.claims_of(rows)
    assert claims.keys() == {"bytes_growth_mean8", "bytes_growth_groups_mean8"}
    assert claims["bytes_growth_groups_mean8"] < 0.5 < claims["bytes_growth_mean8"]


@pytest.mark.slow
@pytest.mark.parametrize("hierarchy", ["off", "on"])
def test_a_step_with_groups_runs_on_every_layer(restored, tmp_path, hierarchy):
    arguments = ["--small", "--device", "cpu", "--interpret", "--scores", "max", "--no-stages", "--assign", "off"]
    sparse_decode.main([*arguments, "--mean-sizes", "4", "--hierarchy", hierarchy, "--out", str(tmp_path)])
    (path,) = tmp_path.glob("*.json")
    rows = json.loads(path.read_text())["rows"]
    (counted, _) = (row for row in rows if row["kind"] == "count")
    assert (counted["scored_groups"] > 0) == (hierarchy == "on")
    assert not [row for row in rows if "error" in row]
    assert {row["hierarchy"] for row in rows if row["kind"] == "speed"} == {hierarchy}
