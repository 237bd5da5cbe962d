"""What scoring groups of communities first loses: claims are what the rows say, and contexts are joined windows."""

import numpy as np
import pytest
import torch

from bench import coarse_recall
from bench.capture import Captured
from ckv_compile.config import CommunityConfig


def captured(seed, tokens=640, start=480):
    generator = torch.Generator().manual_seed(seed)
    topics = torch.randn(2, 30, 16, generator=generator)
    which = torch.randint(0, 30, (1, 1, 2, tokens), generator=generator)
    keys = 2 * torch.take_along_dim(topics[None, None], which[..., None], 3)
    keys = keys + torch.randn(keys.shape, generator=generator)
    queries = 2 * torch.randn(1, 1, 4, tokens - start, 16, generator=generator)
    none = np.zeros((1, 4, 0, 8))
    return Captured([3], keys, queries, none.astype(np.int32), none.astype(np.float32), start, 0.25)


def test_a_context_is_the_keys_of_all_windows_with_the_last_queries():
    windows = [captured(0), captured(1)]
    text = coarse_recall.joined(windows, 32)
    assert text.start == 2 * 640 - 32
    assert torch.equal(text.keys[..., 640:, :], windows[1].keys)
    assert torch.equal(text.queries, windows[1].queries[..., -32:, :])


def test_both_arms_are_measured_at_one_budget():
    text = coarse_recall.joined([captured(0), captured(1)], 24)
    rows = coarse_recall.rows_of(text, "python", 16, 8, 24, 8)
    assert [row["hierarchy"] for row in rows] == ["off", "on"]
    off, on = rows
    assert off["budget"] == on["budget"] == [79, 79, 80]  # of 1,264, 1,272 and 1,280 tokens
    assert off["scored"] == 1.0
    assert max(on["recall"]) <= 1
    assert on["recall"] != off["recall"], "groups were scored first"
    assert np.mean(on["recall"]) > 0.8 * np.mean(off["recall"])
    (name, lost), (most, largest) = coarse_recall.claims_of(rows).items()
    assert (name, most) == ("coarse_recall_lost_python_1k_share16_mean8", "coarse_recall_lost_most")
    assert lost == largest == pytest.approx(100 * (np.mean(off["recall"]) - np.mean(on["recall"])))


def test_the_scored_share_counts_a_group_as_two():
    config = CommunityConfig(hierarchy="on", budget=512)
    # 4,096 communities are 512 groups; of 16 parts each lists ceil(ceil(sqrt(512 * 64) / 2) / 16) = 6 of 8.
    assert coarse_recall.scored_share(config, 32_768) == (16 * 6 * 8 + 2 * 512) / 4096
    assert coarse_recall.scored_share(CommunityConfig(hierarchy="auto"), 131_072) == 1.0
    assert coarse_recall.scored_share(CommunityConfig(hierarchy="auto"), 262_144) == (64 * 12 * 8 + 2 * 4096) / 32_768
