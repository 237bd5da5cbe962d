"""What is measured over real text, on a tiny model: lists, recall by hand, and a whole stream."""

import numpy as np
import pytest
import torch

from bench import real_text
from bench.capture import KAPPA, SINKS, capture
from bench.recall import NAMES, attended, best, newest, probabilities, recalls, stream_recall
from ckv_compile.config import CommunityConfig
from ckv_compile.testing import attended_positions, bare_sequence, extend_sequence, retrieve_step, tiny_model

PROMPT, TOKENS = 200, 160


@pytest.fixture(scope="module")
def captured():
    model = tiny_model("llama")
    tokens = torch.randint(1, 100, (PROMPT + TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()
    calls = []
    found = capture(model, tokens, start=PROMPT, advance=lambda: calls.append(1))
    assert len(calls) == 2
    assert model.config._attn_implementation == "sdpa"
    return found


def test_lists_are_the_strongest_keys_of_the_models_own_attention(captured):
    model = tiny_model("llama", implementation="eager")
    tokens = torch.randint(1, 100, (PROMPT + TOKENS,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        probability = torch.stack(model(tokens[None], output_attentions=True).attentions)[:, 0]  # [L, H, n, n]
    probability[..., :SINKS] = 0
    expected = probability.topk(KAPPA, -1).values
    np.testing.assert_allclose(captured.alphas, expected, atol=1e-5)
    assert (captured.ids[:, :, :SINKS] == -1).all()
    assert (captured.ids <= np.arange(PROMPT + TOKENS)[:, None]).all()
    own = probability.numpy()[:, :, PROMPT:]
    listed = np.take_along_axis(own, captured.ids[:, :, PROMPT:].astype(int), -1)
    np.testing.assert_allclose(listed, captured.alphas[:, :, PROMPT:], atol=1e-5)


def test_recall_is_the_share_of_what_lies_on_the_mask():
    probability = torch.tensor([[[0.5, 0.1, 0.2, 0.2], [0.0, 0.4, 0.0, 0.6]]])  # one KV head of two query heads
    mask = torch.tensor([[True, False, True, False]])
    torch.testing.assert_close(recalls(probability, mask, 1), torch.tensor([[0.7, 0.0], [0.4, 0.0]]))
    assert newest(probability, 2, 1).tolist() == [[True, False, False, True]]
    assert best(probability, 2, 1).tolist() == [[True, False, False, True]]


def test_a_step_attends_to_what_the_operators_attend_to(captured):
    config = CommunityConfig(min_context=0, workers=0, num_sink_tokens=4, recent_window=8, budget=64, block_size=64)
    sequence = bare_sequence(config, PROMPT + TOKENS, keys=captured.keys)
    for layer in range(2):
        sequence.offer(layer, sequence.keys(layer), 0, PROMPT, None, None)
    sequence.prefilled(PROMPT)
    extend_sequence(sequence, 9)
    query = captured.queries[1, :, :, 9, None]
    tokens, count = retrieve_step(sequence, 1, query, 64, captured.scale)
    mask = attended(sequence, 1, tokens, count)
    for graph in range(2):
        listed = tokens[0, graph, : int(count[0, graph])].tolist()
        indexed = int(sequence.index.n_indexed[1, 0])
        parts = attended_positions(listed, indexed, PROMPT + 9, 0, 4, 8)
        assert mask[graph].nonzero().flatten().tolist() == sorted(position for part in parts for position in part)
    probability = probabilities(query[0, :, 0], captured.keys[1, 0, :, : PROMPT + 10], captured.scale)
    torch.testing.assert_close(probability.sum(-1), torch.ones(2, 2))


@pytest.mark.parametrize("graph", ["keys", "attention"])
def test_a_stream_stays_within_its_budget_and_below_the_best_list(captured, graph):
    config = CommunityConfig(
        graph=graph, min_context=0, workers=0, deterministic=True, budget=120, recent_window=16, refresh_interval=64,
        repair_interval=32, block_size=64,
    )  # fmt: skip
    rows = stream_recall(captured, TOKENS, config, share=3, every=16, advance=lambda: None)
    assert [row["layer"] for row in rows] == [0, 1]
    for row in rows:
        assert len(row["recall"]) == TOKENS // 16
        assert (np.array(row["attended"]) <= row["budget"]).all()
        assert (np.array(row["recall"]) <= np.array(row["best"]) + 1e-4).all()
    every = stream_recall(captured, TOKENS, config, share=1, every=80, advance=lambda: None)
    assert all(value == pytest.approx(1, abs=1e-4) for row in every for value in row["recall"])


def test_rows_become_claims_and_misses_are_listed(captured):
    rows = [{"text": "python", "part": "sizes"} | row for row in real_text.sizes(captured, lambda: None)]
    rows += [{"text": "python", "part": "stream"} | row for row in real_text.streams(captured, TOKENS, lambda: None)]
    rows += [
        {"text": "python", "part": "recall"} | row
        for row in real_text.recall_rows(real_text.every_nth(captured, 2), TOKENS, 3, 80, lambda: None)
    ]
    claims = real_text.claims_of(rows)
    for name in (
        "stream_ratio_reached_keys",
        "mean_size_reached_attention",
        "connected_keys",
        "recall_4096_stream_keys",
    ):
        assert 0 <= claims[f"{name}_python"] <= 1
    assert claims["stream_ratio_least_attention_python"] <= claims["stream_ratio_median_attention_python"]
    for name in NAMES:
        assert f"{name}_4096_stream_attention_python" in claims
    lines = real_text.missed([rows[0] | {"within": False, "mean_size": 40.0, "connected": False}])
    assert lines == [
        "python attention, layer 0, group 0: mean size 40.0",
        "python attention, layer 0, group 0: communities that are not connected",
    ]
