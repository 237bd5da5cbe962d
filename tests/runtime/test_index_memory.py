"""What an index takes of the device, against the K and V that it is for."""

import pytest
import torch

from ckv_compile.config import CommunityConfig
from ckv_compile.index_layout import IndexShape
from ckv_compile.passes.rewrite_plan import AttentionGeometry
from ckv_compile.runtime.index import CommunityIndex

TOKENS = 131_072


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"mean_size": 8}, 0.09),
        ({"mean_size": 16}, 0.05),
        ({"graph": "attention"}, 0.08),
        ({"graph": "mixed"}, 0.115),
        ({"append": "assign"}, 0.115),
    ],
    ids=str,
)
def test_an_index_of_a_long_context_takes_a_small_part_of_its_cache(options, most):
    """Qwen3-8B, bf16, one graph per KV group. Most of it are centroids, with room for twice as many as are expected."""
    config = CommunityConfig(**options)
    geometry = AttentionGeometry(36, 32, 8, 128, torch.bfloat16, torch.device("meta"))
    shape = IndexShape.for_cache(config, geometry, 1, TOKENS)
    index = CommunityIndex(shape, config, geometry.dtype, geometry.device)
    cache = 2 * geometry.num_layers * geometry.num_kv_heads * geometry.head_dim * TOKENS * geometry.dtype.itemsize
    parts = sorted(((buffer.nbytes / cache, name) for name, buffer in index.buffers.items()), reverse=True)
    print(f"{options}: {index.nbytes() / 2**20:.0f} MiB, {index.nbytes() / cache:.4f} of K and V,", parts[:6])
    assert index.nbytes() / cache < most


@pytest.mark.parametrize(("tokens", "grouped", "most"), [(TOKENS, False, 0.09), (2 * TOKENS, True, 0.105)])
def test_groups_of_communities_take_a_quarter_of_the_centroids_where_they_are_kept(tokens, grouped, most):
    config = CommunityConfig(hierarchy="auto")
    geometry = AttentionGeometry(36, 32, 8, 128, torch.bfloat16, torch.device("meta"))
    index = CommunityIndex(IndexShape.for_cache(config, geometry, 1, tokens), config, geometry.dtype, geometry.device)
    cache = 2 * geometry.num_layers * geometry.num_kv_heads * geometry.head_dim * tokens * geometry.dtype.itemsize
    groups = sum(index.buffers[name].nbytes for name in ("num_grouped", "coarse", "coarse_scale", "coarse_scores"))
    print(f"{tokens} tokens: {index.nbytes() / cache:.4f} of K and V, {groups / cache:.4f} of it groups")
    assert index.nbytes() / cache < most
    assert (groups / index.centroid.nbytes < 0.27) if grouped else (groups < 100_000)


def test_an_interval_that_never_ends_takes_no_more_than_one_entry_of_the_log_for_each_token():
    config = CommunityConfig(graph="attention", refresh_interval=1 << 30, repair_interval=0)
    geometry = AttentionGeometry(36, 32, 8, 128, torch.bfloat16, torch.device("meta"))
    assert IndexShape.for_cache(config, geometry, 1, 4096).log == 4096
    assert IndexShape.for_cache(CommunityConfig(graph="attention"), geometry, 1, 4096).log == 2048
