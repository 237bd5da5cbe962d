import numpy as np
import pytest

from bench.partition import planted_lists
from bench.partition_stream import causal, claims_of_stream, drifting_keys, stream_attention, stream_keys
from ckv_compile.config import CommunityConfig


@pytest.fixture(scope="module")
def rows():
    ids, alphas = planted_lists(1024 + 512, 32, 0.8, 0)
    found = []
    for repair, refresh in ((32, 128), (0, 128), (32, 5000)):
        config = CommunityConfig(graph="attention", repair_interval=repair, refresh_interval=refresh)
        found.append(stream_attention("planted", causal(ids), alphas, 1024, 512, config))
    return found


def test_modularity_of_attention_stays_within_one_percent_of_a_cold_run(rows):
    both, warm, repairs = (row["ratio"] for row in rows)
    assert both > 0.99
    assert warm > 0.99
    assert 0.8 < repairs < both


def test_joined_blocks_equal_those_of_the_whole_and_open_ones_cost_little():
    keys = CommunityConfig(min_context=0, workers=0, deterministic=True, block_size=512, append_block=128)
    vectors = drifting_keys(1700, 32, 0)
    joined, behind = (stream_keys("drifting", vectors, 700, tokens, keys) for tokens in (836, 964))
    assert (joined["blocks"], joined["ratio"]) == ([512, 1024, 1536], 1.0)
    assert behind["blocks"] == [512, 1024, 1536, 1664]
    assert 0.97 < behind["ratio"] < 1.01


def test_claims_are_the_worst_of_each_plan(rows):
    worse = [row | {"ratio": row["ratio"] - 0.1} for row in rows]
    claims = claims_of_stream([*worse, *rows])
    assert list(claims) == [
        "stream_modularity_ratio_attention", "stream_modularity_ratio_attention_warm_only",
        "stream_modularity_ratio_attention_repairs_only",
    ]  # fmt: skip
    np.testing.assert_allclose(list(claims.values()), [row["ratio"] for row in worse])
