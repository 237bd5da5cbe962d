"""Groups of communities in an index: kept where a context is long enough, and true to its centroids whatever happens."""

import pytest
import torch

from ckv_compile.config import GROUP, CommunityConfig, coarse_from
from ckv_compile.index_layout import num_groups
from ckv_compile.testing import (
    assert_whole_communities,
    assign_step,
    bare_sequence,
    extend_sequence,
    retrieve_step,
)

BASE = {
    "hierarchy": "on", "budget": 40, "recent_window": 8, "num_sink_tokens": 4, "min_context": 0, "workers": 0,
    "block_size": 128, "append_block": 16, "deterministic": True,
}  # fmt: skip


def prefilled(tokens, capacity, **options):
    sequence = bare_sequence(CommunityConfig(**{**BASE, **options}), capacity, batch=2)
    if sequence.in_blocks:
        lists = None, None
    else:
        shape = 2, sequence.geometry.num_query_heads, tokens, sequence.config.kappa
        ids = torch.arange(tokens)[:, None] - torch.randint(1, 60, shape)
        lists = ids.clamp(min=-1).int(), torch.rand(shape) / sequence.config.kappa
    for layer in range(2):
        sequence.offer(layer, sequence.keys(layer), 0, tokens, *lists)
    sequence.prefilled(tokens)
    sequence.publish()
    return sequence


def assert_groups_are_those_of_the_centroids(sequence):
    index = sequence.index
    for layer in range(sequence.shape.layers):
        used = index.used[layer]
        assert index.num_grouped[layer].eq(used).all()
        groups = num_groups(used)
        missing = groups * GROUP - used
        parts = [index.buffers[name][layer, :, :, :used] for name in ("centroid", "centroid_scale", "stored")]
        parts = [torch.cat([part, part.new_zeros(*part.shape[:2], missing, *part.shape[3:])], 2) for part in parts]
        code, scale = torch.ops.ckv.coarse_centroids(*parts)
        assert torch.equal(index.coarse[layer, :, :, :groups], code)
        assert torch.equal(index.coarse_scale[layer, :, :, :groups], scale)


def test_groups_are_kept_where_a_step_may_score_them():
    most = 8 * coarse_from(CommunityConfig(**BASE))
    assert most == 8 * 40
    assert prefilled(200, most).shape.groups == 0
    longer = prefilled(200, most + 1)
    assert longer.shape.groups == num_groups(longer.shape.communities)
    assert prefilled(200, 5000, hierarchy="off").index.buffers.keys().isdisjoint({"coarse", "num_grouped"})


@pytest.mark.parametrize("options", [{}, {"graph_aggregation": "layer"}, {"append": "assign"}], ids=str)
def test_groups_follow_blocks_that_are_appended_joined_and_cut_off(options):
    sequence = prefilled(300, 700, **options)
    assert_groups_are_those_of_the_centroids(sequence)
    extend_sequence(sequence, 150)  # small blocks, of which some are joined
    assert_groups_are_those_of_the_centroids(sequence)
    sequence.truncate(270)
    assert sequence.index.num_grouped.eq(sequence.index.num_communities).all()
    extend_sequence(sequence, 60)
    assert_groups_are_those_of_the_centroids(sequence)


def test_groups_follow_partitions_of_the_whole():
    assert_groups_are_those_of_the_centroids(prefilled(400, 700, graph="attention"))


def test_a_cache_that_grows_long_enough_gets_groups():
    sequence = prefilled(300, 310)
    assert sequence.shape.groups == 0
    keys = bare_sequence(sequence.config, 700, batch=2)
    sequence.keys = keys.keys
    sequence.grow(700)
    assert sequence.shape.groups > 0
    assert_groups_are_those_of_the_centroids(sequence)


@pytest.mark.parametrize("options", [{}, {"graph": "attention", "mean_size": 8}], ids=str)
def test_a_step_retrieves_whole_communities_of_the_listed_groups(options):
    torch.manual_seed(0)
    sequence = prefilled(900, 1200, **options)
    assert sequence.index.used[0] > coarse_from(sequence.config)
    for layer in range(2):
        query = torch.randn(2, 4, 1, 16)
        tokens, count = retrieve_step(sequence, layer, query, 40)
        assert_whole_communities(sequence, layer, tokens, count)
        used = sequence.index.used[layer]
        scored = sequence.index.scores[..., :used] > -torch.inf
        assert 0.02 < scored.float().mean() < 0.9


def test_groups_lose_little_of_the_attention():
    """Keys of topics: on what a step retrieves through groups lies nearly the attention that lies on the best anyway."""
    mass = dict.fromkeys(("off", "on"), 0.0)
    for hierarchy in mass:
        sequence = prefilled(900, 1200, hierarchy=hierarchy)
        generator = torch.Generator().manual_seed(1)
        for layer in (0, 1):
            key = sequence.keys(layer)[:, :, :900]
            for _ in range(10):
                query = 3 * torch.randn(2, 4, 1, 16, generator=generator)
                tokens, count = retrieve_step(sequence, layer, query, 40)
                listed = torch.arange(40) < count[..., None]
                chosen = torch.zeros(2, 2, 901).scatter_(2, torch.where(listed, tokens, 900).long(), 1.0)[
                    ..., None, :900
                ]
                share = (query.view(2, 2, 2, 16) @ key.transpose(2, 3) * 0.25).softmax(-1)
                mass[hierarchy] += float((share * chosen).sum(-1).mean()) / 20
    assert mass["off"] > 0.2
    assert mass["on"] > 0.9 * mass["off"], mass


def test_communities_that_steps_open_are_scored():
    sequence = prefilled(900, 1200, append="assign")
    index = sequence.index
    before = int(index.num_communities[0, 0, 0])
    shape = (2, 2, sequence.shape.lists, sequence.shape.kappa)
    assign_step(sequence, torch.full(shape, -1, dtype=torch.int32), torch.zeros(shape))
    sequence.length += 1
    sequence.length_device.fill_(sequence.length)
    assert int(index.num_communities[0, 0, 0]) == before + 1
    retrieve_step(sequence, 0, torch.randn(2, 4, 1, 16), 40)
    assert index.scores[:, :, before].gt(-torch.inf).all()
