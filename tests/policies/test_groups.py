"""Groups that are published in place of communities: components of the key graph, and clusters of keys."""

import numpy as np
import pytest
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from ckv_compile.community.components import strongest_components
from ckv_compile.community.kmeans import BATCH, ROUNDS, kmeans
from ckv_compile.config import CommunityConfig
from ckv_compile.policies import POLICIES
from ckv_compile.testing import assert_consistent_index, bare_sequence


def groups_of(labels):
    return sorted(tuple(np.flatnonzero(labels == label)) for label in np.unique(labels))


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("n", "first", "groups"), [(60, 0, 8), (101, 10, 12), (33, 4, 28), (40, 0, 1)])
def test_components_are_those_above_the_threshold_that_leaves_so_many(n, first, groups, seed):
    rng = np.random.default_rng(seed)
    neighbors = np.full((n, 3), -1, np.int32)
    for node in range(first + 1, n):
        own = rng.choice(np.arange(first, node), min(3, node - first), replace=False)
        neighbors[node, : len(own)] = own
    weights = rng.permutation(n * 3).reshape(n, 3).astype(np.float32)  # no two are equal
    found = strongest_components(neighbors, weights, first, groups)
    for threshold in np.sort(weights[neighbors >= 0])[::-1]:
        kept = (weights >= threshold) & (neighbors >= 0)
        edges = np.nonzero(kept)[0], neighbors[kept]
        count, labels = connected_components(coo_array((np.ones(kept.sum()), edges), shape=(n, n)), directed=False)
        if count - first <= groups:
            break
    assert count - first == groups
    assert groups_of(found[first:]) == groups_of(labels[first:])


def test_edges_of_a_graph_that_has_more_components_are_all_kept():
    neighbors = np.array([[-1], [0], [-1], [2], [-1]], np.int32)
    found = strongest_components(neighbors, np.ones((5, 1), np.float32), 0, 1)
    assert found.tolist() == [0, 0, 2, 2, 4]


def test_components_use_the_cosines_of_the_key_graph():
    config = CommunityConfig(
        policy="components", min_context=0, workers=0, num_sink_tokens=3, block_size=64, append_block=64
    )
    sequence = bare_sequence(config, 150)
    sequence.offer(0, sequence.keys(0), 0, 150, None, None)
    given = POLICIES["components"].block_input(sequence.keys(0), sequence.first_host, 0, 150, 64, 2, config)
    keys = torch.nn.functional.normalize(sequence.keys(0)[0], dim=-1)
    for node in (70, 100, 127, 149):
        block = node // 64 * 64
        for slot in range(8):
            near = int(given[0, 1, node, slot])
            if near >= 0:
                assert float(given[0, 1, node, 8 + slot]) == pytest.approx(
                    float(keys[1, node] @ keys[1, block + near]), abs=1e-5
                )


def sculley(points, clusters, cosine, seed):
    """Mini-batch k-means, point by point (Sculley 2010, algorithm 1), with every point in the batch."""
    points = points / np.linalg.norm(points, axis=1, keepdims=True) if cosine else points
    centers = points[np.random.default_rng(seed).choice(len(points), clusters, replace=False)].astype(np.float64)
    seen = np.zeros(clusters)
    for _ in range(ROUNDS):
        nearest = [int(np.argmin(((point - centers) ** 2).sum(1))) for point in points]
        for point, center in zip(points, nearest, strict=True):
            seen[center] += 1
            centers[center] += (point - centers[center]) / seen[center]
        if cosine:
            centers /= np.linalg.norm(centers, axis=1, keepdims=True)
    return np.array([int(np.argmin(((point - centers) ** 2).sum(1))) for point in points])


@pytest.mark.parametrize("cosine", [True, False])
def test_kmeans_equals_the_algorithm_point_by_point(cosine):
    points = np.random.default_rng(5).normal(size=(300, 6)).astype(np.float32)
    found = kmeans(points, 20, cosine=cosine, largest=300, seed=7)
    assert groups_of(found) == groups_of(sculley(points, 20, cosine, 7))


@pytest.mark.parametrize("cosine", [True, False])
def test_kmeans_finds_clusters_that_lie_apart_in_mini_batches(cosine):
    rng = np.random.default_rng(0)
    n, truth = 2 * BATCH, np.arange(2 * BATCH) % 4
    points = (10 * np.eye(4)[truth] + 0.1 * rng.normal(size=(n, 4))).astype(np.float32)
    found = kmeans(points, 40, cosine=cosine, largest=n, seed=1)
    assert all(len(set(truth[list(group)])) == 1 for group in groups_of(found))


def test_lengths_of_keys_count_only_for_euclidean_clusters():
    points = np.random.default_rng(2).normal(size=(200, 5)).astype(np.float32)
    longer = points * np.random.default_rng(3).uniform(1, 9, (200, 1)).astype(np.float32)
    alike = [
        groups_of(kmeans(points, 12, cosine=cosine, largest=99))
        == groups_of(kmeans(longer, 12, cosine=cosine, largest=99))
        for cosine in (True, False)
    ]
    assert alike == [True, False]


@pytest.mark.parametrize("largest", [1, 7, 50])
def test_no_cluster_is_larger_than_asked_and_parts_are_nearly_equal(largest):
    points = np.random.default_rng(4).normal(size=(400, 5)).astype(np.float32)
    found = kmeans(points, 6, cosine=True, largest=largest)
    whole = kmeans(points, 6, cosine=True, largest=400)
    assert np.bincount(found).max() <= largest
    for group in groups_of(whole):
        sizes = np.bincount(found[list(group)])
        sizes = sizes[sizes > 0]
        assert sizes.max() - sizes.min() <= 1
        assert len(sizes) == -(-len(group) // largest)


@pytest.mark.parametrize(("policy", "aggregation"), [(p, a) for p in ("components", "kmeans", "kmeans_l2", "quest")
                                                     for a in ("group", "layer")])  # fmt: skip
def test_the_published_index_covers_every_token_once(policy, aggregation):
    config = CommunityConfig(
        policy=policy, graph_aggregation=aggregation, min_context=0, workers=0, num_sink_tokens=3, block_size=64,
        append_block=16, mean_size=5, recent_window=8, budget=40,
    )  # fmt: skip
    sequence = bare_sequence(config, 260, batch=2)
    sequence.restart([0, 21])
    for layer in range(2):
        sequence.offer(layer, sequence.keys(layer), 0, 150, None, None)
    sequence.prefilled(150)
    for _ in range(80):
        sequence.publish()
        sequence.length += 1
        sequence.offer_appended()
    sequence.publish()
    assert not sequence.statistics.failures
    assert int(sequence.index.n_indexed.min()) >= 208
    assert_consistent_index(sequence)


def test_policies_that_cannot_be_met_say_so():
    with pytest.raises(ValueError, match=r"policy.* = 'components' needs graph='keys', got graph='attention'"):
        CommunityConfig(policy="components", graph="attention")
    with pytest.raises(ValueError, match=r"centroid_budget.*must be 0 with policy='quest'.*got 8"):
        CommunityConfig(policy="quest", centroid_budget=8)
    with pytest.raises(ValueError, match=r"options\['policy'\] must be one of 'communities'.*'oracle', got 'quests'"):
        CommunityConfig(policy="quests")
