import numpy as np
import pytest

from ckv_compile.community.graph import attention_graph, extended_graph, key_graph, mixed_graph


def brute_force(neighbors, weights, lam):
    """Eq. 2-4 as matrices, without self-loops."""
    heads, n, _ = neighbors.shape
    total = np.zeros((n, n))
    for h in range(heads):
        alpha = np.zeros((n, n))
        for i in range(n):
            for j, weight in zip(neighbors[h, i], weights[h, i], strict=True):
                if 0 <= j < n and np.isfinite(weight) and weight >= 0 and alpha[i, j] == 0:
                    alpha[i, j] = weight
        total += lam / 2 * (alpha + alpha.T) + (1 - lam) * alpha.T @ alpha
    np.fill_diagonal(total, 0)
    return total


@pytest.mark.parametrize(
    ("heads", "n", "kappa", "lam"), [(1, 5, 3, 0.5), (3, 37, 8, 0.5), (2, 20, 4, 1.0), (2, 20, 4, 0.0)]
)
def test_attention_graph_is_equations_2_to_4(heads, n, kappa, lam, dense):
    rng = np.random.default_rng(n)
    neighbors = rng.integers(-1, n, (heads, n, kappa)).astype(np.int32)  # -1 anywhere, duplicates, self-edges
    weights = rng.random((heads, n, kappa), np.float32)
    graph = attention_graph(neighbors, weights, lam=lam, prune=0.0)
    np.testing.assert_allclose(dense(graph), brute_force(neighbors, weights, lam), rtol=2e-7, atol=0)


def test_two_listed_keys_weigh_as_computed_by_hand(dense):
    graph = attention_graph(
        np.array([[[-1, -1], [-1, -1], [0, 1]]]), np.array([[[0, 0], [0, 0], [0.5, 0.25]]]), lam=0.5, prune=0.0
    )
    expected = np.zeros((3, 3))
    expected[2, 0] = expected[0, 2] = 0.5 / 2 * 0.5  # direct
    expected[2, 1] = expected[1, 2] = 0.5 / 2 * 0.25
    expected[0, 1] = expected[1, 0] = 0.5 * 0.5 * 0.25  # co-attention
    np.testing.assert_array_equal(dense(graph), expected.astype(np.float32))


def test_graph_is_symmetric_to_the_bit_and_strength_is_its_row_sum(dense, planted_lists):
    graph = attention_graph(*planted_lists(300, 20, 0.7, 1, heads=4), lam=0.5, prune=0.05)
    matrix = dense(graph)
    np.testing.assert_array_equal(matrix, matrix.T)
    assert not matrix.diagonal().any()
    np.testing.assert_allclose(graph.strength, matrix.sum(1), rtol=1e-12)
    assert (graph.weights > 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -1.0])
def test_unusable_weights_are_dropped_and_counted(bad, dense, planted_lists):
    neighbors, weights = planted_lists(50, 10, 0.8, 2, heads=2)
    weights[0, 7] = bad  # a whole row, as a half-precision overflow would leave it
    weights[1, 3, 2] = bad
    graph = attention_graph(neighbors, weights, lam=0.5, prune=0.0)
    assert graph.dropped == 9
    np.testing.assert_allclose(dense(graph), brute_force(neighbors, weights, 0.5), rtol=2e-7)
    assert np.isfinite(graph.weights).all()


def test_sums_beyond_float32_are_dropped_and_counted():
    graph = attention_graph(np.array([[[-1], [0]]]), np.array([[[0.0], [3e38]]]), lam=1.0, prune=0.0)
    assert graph.num_edges == 1
    graph = attention_graph(
        np.array([[[-1, -1], [-1, -1], [0, 1]]]), np.full((1, 3, 2), 3e38, np.float32), lam=0.0, prune=0.0
    )
    assert (graph.num_edges, graph.dropped) == (0, 1)


def test_prune_drops_what_is_weak_for_both_ends(graph_of_edges, dense, planted_lists):
    lists = planted_lists(200, 20, 0.7, 3)
    full = dense(attention_graph(*lists, lam=0.5, prune=0.0))
    strongest = full.max(1)
    kept = full * (full >= np.float32(0.2) * np.minimum.outer(strongest, strongest))
    pruned = attention_graph(*lists, lam=0.5, prune=0.2)
    np.testing.assert_array_equal(dense(pruned) > 0, kept > 0)
    np.testing.assert_allclose(pruned.strength, kept.sum(1), rtol=1e-6)
    assert 0 < pruned.num_edges < (full > 0).sum() // 2


def test_first_makes_nodes_of_later_positions_only(dense, planted_lists):
    neighbors, weights = planted_lists(40, 8, 0.8, 4, heads=2)
    graph = attention_graph(neighbors, weights, lam=0.5, prune=0.0, first=10)
    later = np.where(neighbors[:, 10:] >= 10, neighbors[:, 10:] - 10, -1)
    np.testing.assert_array_equal(dense(graph), dense(attention_graph(later, weights[:, 10:], lam=0.5, prune=0.0)))


@pytest.mark.parametrize("shape", [(1, 0, 8), (2, 1, 8), (1, 5, 0), (1, 7, 3)])
def test_lists_without_an_entry_give_a_graph_without_an_edge(shape):
    graph = attention_graph(np.full(shape, -1), np.ones(shape, np.float32), lam=0.5, prune=0.03)
    assert (graph.num_nodes, graph.num_edges, len(graph.indptr)) == (shape[1], 0, shape[1] + 1)
    assert key_graph(np.full(shape[1:], -1)).num_edges == 0


def test_positions_out_of_range_are_empty_slots():
    graph = attention_graph(np.array([[[5, -7], [0, 9]]]), np.ones((1, 2, 2), np.float32), lam=1.0, prune=0.0)
    assert graph.num_edges == 1


def test_key_graph_weighs_each_listed_direction_one_half(dense):
    graph = key_graph(np.array([[1, -1, 1], [0, 1, -1], [0, 1, 0], [-1, -1, -1]]))
    expected = np.zeros((4, 4))
    expected[0, 1] = expected[1, 0] = 1.0  # listed by both
    expected[0, 2] = expected[2, 0] = expected[1, 2] = expected[2, 1] = 0.5
    np.testing.assert_array_equal(dense(graph), expected)
    np.testing.assert_array_equal(graph.strength, expected.sum(1))


def test_key_graph_equals_attention_graph_of_unit_scores(dense, planted_lists):
    neighbors, _ = planted_lists(120, 12, 0.7, 5)
    unit = attention_graph(neighbors, np.ones(neighbors.shape, np.float32), lam=1.0, prune=0.0, first=3)
    np.testing.assert_array_equal(dense(key_graph(neighbors[0], first=3)), dense(unit))


def test_mixed_graph_gives_both_edge_sets_the_same_weight(dense, planted_lists):
    neighbors, weights = planted_lists(90, 9, 0.7, 6, heads=2)
    keys, _ = planted_lists(90, 9, 0.7, 7)
    attention, key = attention_graph(neighbors, weights, lam=0.5, prune=0.03), key_graph(keys[0])
    mixed = mixed_graph(neighbors, weights, keys[0], lam=0.5, prune=0.03)
    scale = attention.strength.sum() / key.strength.sum()
    np.testing.assert_allclose(dense(mixed), dense(attention) + scale * dense(key), rtol=1e-6)
    assert mixed.strength.sum() == pytest.approx(2 * attention.strength.sum(), rel=1e-6)
    assert mixed.key_scale == pytest.approx(scale)


def test_mixed_graph_with_one_empty_set_keeps_the_other(dense, planted_lists):
    keys, weights = planted_lists(30, 5, 0.7, 8)
    mixed = mixed_graph(np.full_like(keys, -1), weights, keys[0], lam=0.5, prune=0.0)
    np.testing.assert_array_equal(dense(mixed) > 0, dense(key_graph(keys[0])) > 0)


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("known", "first"), [(0, 0), (70, 0), (70, 10), (99, 3), (5, 5)])
def test_a_graph_and_its_later_lists_are_the_graph_of_all_lists(dense, planted_lists, lam, known, first):
    neighbors, weights = planted_lists(100, 10, 0.7, 9, heads=3)
    neighbors = np.where(neighbors <= np.arange(100)[:, None], neighbors, -1).astype(np.int32)  # causal
    neighbors[1, 80, 3] = neighbors[1, 80, 2]
    weights[0, 90, 1], weights[0, 91, 1] = np.nan, 0.0
    early = attention_graph(neighbors[:, :known], weights[:, :known], lam=lam, prune=0.0, first=first)
    whole = attention_graph(neighbors, weights, lam=lam, prune=0.0, first=first)
    both = extended_graph(early, neighbors[:, known:], weights[:, known:], lam=lam, first=first)
    merged = both.merged()
    np.testing.assert_allclose(dense(merged), dense(whole), rtol=1e-5)
    np.testing.assert_array_equal(dense(merged), dense(merged).T)
    np.testing.assert_allclose(merged.strength, whole.strength, rtol=1e-5)
    np.testing.assert_array_equal(both.alone(), merged.alone())
    np.testing.assert_allclose(both.strength, whole.strength, rtol=1e-5)
    assert both.dropped == whole.dropped


def test_a_mixed_graph_keeps_its_scale_when_it_is_extended(dense, planted_lists):
    neighbors, weights = planted_lists(80, 10, 0.8, 9, heads=2)
    keys = planted_lists(80, 10, 0.8, 3)[0][0]
    neighbors, keys = (np.where(x <= np.arange(80)[:, None], x, -1).astype(np.int32) for x in (neighbors, keys))
    early = mixed_graph(neighbors[:, :60], weights[:, :60], keys[:60], lam=0.5, prune=0.0)
    both = extended_graph(early, neighbors[:, 60:], weights[:, 60:], lam=0.5, key_neighbors=keys[60:])
    expected = dense(attention_graph(neighbors, weights, lam=0.5, prune=0.0)) + early.key_scale * dense(key_graph(keys))
    np.testing.assert_allclose(dense(both.merged()), expected, rtol=1e-5)


def test_shapes_that_do_not_match_raise_with_both_shapes():
    with pytest.raises(ValueError, match=r"one shape, got \(1, 4, 3\) and \(1, 4, 2\)"):
        attention_graph(np.zeros((1, 4, 3)), np.zeros((1, 4, 2)), lam=0.5, prune=0.0)
