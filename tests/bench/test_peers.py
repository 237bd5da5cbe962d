"""The bench of other packages: what is not installed says so, what is runs beside ours, figures are what rows say."""

import importlib.util
import json

import pytest
import torch

from bench import peers, readme_tables, texts
from ckv_compile import smollm2
from ckv_compile.testing import tiny_model


def has(module):
    return importlib.util.find_spec(module) is not None


def rows_of(tmp_path, *arguments):
    peers.main(["--small", "--device", "cpu", "--interpret", "--out", str(tmp_path), *arguments])
    (path,) = tmp_path.glob("*.json")
    result = json.loads(path.read_text())
    assert set(result["peers"]) == set(peers.PACKAGES.values())
    return result["rows"]


def test_one_layer_and_whole_requests_run_what_is_installed(restored, tmp_path):
    rows = rows_of(tmp_path, "--what", "layer", "generate")
    found = {(row["kind"], row["arm"]): row.get("error") for row in rows}
    assert found["layer", "ours"] is found["layer", "math"] is found["generate", "transformers"] is None
    for module, package in (("flash_attn", "flash-attn"), ("flashinfer", "flashinfer-python")):
        if not has(module):
            assert found["layer", package] == "not installed"
    if has("kvpress"):
        assert found["generate", "SnapKV"] is None
        assert {row["kept"] for row in rows if row["arm"] == "SnapKV"} == {96}
    else:
        assert found["generate", "kvpress"] == "not installed"


@pytest.mark.slow
def test_quality_is_measured_at_equal_budget(restored, monkeypatch, tmp_path):
    ids = torch.randint(2, 100, (texts.LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()
    monkeypatch.setattr(texts, "frozen_text", lambda kind, tokenizer: ids)
    monkeypatch.setattr(
        smollm2, "load_smollm2", lambda device: (None, tiny_model("llama", max_position_embeddings=1024))
    )
    rows = {row["arm"]: row for row in rows_of(tmp_path, "--what", "quality")}
    for name in ("communities, keys", "communities, attention"):
        assert rows[name]["budget"] == 96
        assert 0 <= rows[name]["top1"] <= 1
        assert rows[name]["kl"] >= 0
    presses = {name for name in rows if not name.startswith("communities")}
    assert presses == (
        {"SnapKV", "ExpectedAttention", "TOVA", "Knorm", "StreamingLLM"} if has("kvpress") else {"kvpress"}
    )
    assert has("kvpress") or rows["kvpress"]["error"] == "not installed"


class Everything:
    """A press that drops nothing."""

    def post_init_from_model(self, model):
        self.layers = []

    def compress(self, module, hidden, keys, values, attentions, given):
        assert given["past_key_values"] is not None
        assert len(given["cache_position"]) == hidden.shape[1] == keys.shape[2]
        self.layers.append(module.layer_idx)
        return keys, values


def test_a_press_that_drops_nothing_changes_nothing():
    model, ids = tiny_model("llama"), torch.randint(2, 100, (1, 40), generator=torch.Generator().manual_seed(1))
    press = Everything()
    dense = peers.forced(model, ids, 32)
    kept = peers.forced(model, ids, 32, press)
    assert press.layers == [0, 1]
    assert torch.equal(dense, kept)
    assert peers.agreement(dense, kept) == {"top1": 1.0, "kl": 0.0}
    assert not hasattr(model.model.layers[0].self_attn, "rotary_emb")


def test_claims_are_ratios_to_ours():
    rows = [
        {"kind": "layer", "arm": "ours", "context": 131072, "median_ms": 0.03, "raw_ms": [0.03]},
        {"kind": "layer", "arm": "flashinfer, tensor cores", "context": 131072, "median_ms": 0.12, "raw_ms": [0.12]},
        {"kind": "layer", "arm": "flash-attn", "context": 131072, "error": "not installed"},
        {"kind": "quality", "arm": "SnapKV", "text": "prose", "budget": 256, "tokens": 128, "top1": 0.8, "kl": 0.1},
    ]
    assert peers.claims_of(rows) == pytest.approx({
        "peer_layer_over_ours_flashinfer_tensor_cores": 4.0, "peer_top1_snapkv_prose_b256": 0.8,
        "peer_kl_snapkv_prose_b256": 0.1,
    })  # fmt: skip
    text = readme_tables.peer_tables(rows)
    assert "| flash-attn | not installed |" in text
    assert "| flashinfer, tensor cores | 120.0 us (4.00x ours) |" in text
    assert "| SnapKV, budget 256 | not measured | 0.800, KL 0.1000 |" in text
