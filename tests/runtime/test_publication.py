"""Tokens that arrived while a partition ran join the means of their communities."""

import types

import numpy as np
import pytest
import torch

import ckv_compile.ops  # noqa: F401
from ckv_compile.config import CommunityConfig
from ckv_compile.index_layout import IndexShape
from ckv_compile.runtime import publication
from ckv_compile.runtime.index import CommunityIndex

USED, STOP, DIM = 3, 12, 4  # communities and tokens of the partition


@pytest.mark.parametrize(("heads", "graphs"), [(2, 2), (2, 1), (2, 4)])
def test_tokens_join_the_mean_keys_and_values_of_their_communities(heads, graphs):
    config = CommunityConfig(graph="attention", centroid_budget=4)
    width = heads * DIM if graphs == 1 else DIM
    shape = IndexShape(
        layers=2, batch=2, graphs=graphs, lists=graphs, centroid_dim=width, communities=9, tokens=20, log=8, kappa=4,
        kv_heads=heads, head_dim=DIM,
    )  # fmt: skip
    index = CommunityIndex(shape, config, torch.float32, torch.device("cpu"))
    for buffer in (index.centroid_mean, index.mean_value):
        buffer.fill_(torch.nan)
    key, value = torch.randn(2, heads, 20, DIM), torch.randn(2, heads, 20, DIM)

    def mean_of(cache, row, graph, tokens):
        kept = cache[row] if graphs == 1 else cache[row, graph * heads // graphs][None]
        return kept[:, tokens].mean(1).flatten()

    members = {c: list(range(c, STOP, USED)) for c in range(USED)}
    index.used[1] = USED
    index.size[1, :, :, :USED] = STOP // USED
    index.channel_scale.fill_(1.0)
    for row in range(2):
        for graph in range(graphs):
            for c, tokens in members.items():
                index.centroid_mean[1, row, graph, c] = mean_of(key, row, graph, tokens)
                index.mean_value[1, row, graph, c] = mean_of(value, row, graph, tokens)
    sequence = types.SimpleNamespace(
        index=index, shape=shape, config=config, keys=[None, key].__getitem__, values=[None, value].__getitem__
    )
    joined = np.broadcast_to(np.array([0, USED, 0, 2], np.int32), (2, graphs, 4))  # one opens a community
    publication._join_centroids(sequence, 1, STOP, joined, USED + 1)
    for position, c in enumerate(joined[0, 0].tolist()):
        members.setdefault(c, []).append(STOP + position)
    for row in range(2):
        for graph in range(graphs):
            for c, tokens in members.items():
                assert index.size[1, row, graph, c] == len(tokens)
                torch.testing.assert_close(index.centroid_mean[1, row, graph, c], mean_of(key, row, graph, tokens))
                torch.testing.assert_close(index.mean_value[1, row, graph, c], mean_of(value, row, graph, tokens))
    assert index.mean_value[0].isnan().all()
