import itertools
import threading
import time

import igraph
import numpy as np
import pytest

from ckv_compile.community.engine_process import partition_edges
from ckv_compile.community.engines import edge_list
from ckv_compile.community.graph import TokenGraph, attention_graph, key_graph
from ckv_compile.community.leiden import enforce_size, is_connected, leiden, modularity, seeded


def equation_5(matrix, labels, gamma):
    total, strength = matrix.sum(), matrix.sum(1)
    same = labels[:, None] == labels[None]
    return ((matrix - gamma * np.outer(strength, strength) / total) * same).sum() / total


def communities(labels):
    return sorted(tuple(np.flatnonzero(labels == c)) for c in np.unique(labels))


def test_modularity_is_equation_5(dense, planted_lists):
    graph = attention_graph(*planted_lists(80, 10, 0.7, 0), lam=0.5, prune=0.0)
    labels = np.random.default_rng(0).integers(0, 9, 80).astype(np.int32)
    for gamma in (0.0, 1.0, 7.5):
        assert modularity(graph, labels, gamma) == pytest.approx(equation_5(dense(graph), labels, gamma), abs=1e-7)


def test_two_triangles_with_a_bridge_are_two_communities(graph_of_edges):
    edges = [(0, 1), (1, 2), (0, 2), (3, 4), (4, 5), (3, 5), (2, 3)]
    graph = graph_of_edges(6, [(i, j, 1.0) for i, j in edges])
    np.testing.assert_array_equal(leiden(graph, gamma=1.0), [0, 0, 0, 1, 1, 1])


def test_nearly_all_small_graphs_reach_the_best_partition_there_is(graph_of_edges, dense):
    rng = np.random.default_rng(1)
    every = np.array(
        [x for x in itertools.product(range(6), repeat=6) if all(x[i] <= max(x[:i], default=-1) + 1 for i in range(6))]
    )
    assert len(every) == 203  # partitions of a set of six
    short = []
    for _ in range(40):
        edges = [
            (i, j, float(rng.random() + 0.1)) for i, j in itertools.combinations(range(6), 2) if rng.random() < 0.6
        ]
        graph = graph_of_edges(6, edges)
        best = max(equation_5(dense(graph), labels, 1.0) for labels in every)
        reached = max(modularity(graph, leiden(graph, gamma=1.0, passes=3, seed=seed), 1.0) for seed in range(8))
        short.append(best - reached)
    assert min(short) > -1e-6
    assert max(short) < 0.02
    assert np.mean(np.array(short) < 1e-6) >= 0.95  # a heuristic: igraph reaches 99 % of such graphs


def test_planted_blocks_are_found_exactly(planted_lists):
    graph = attention_graph(*planted_lists(640, 32, 0.98, 2), lam=0.5, prune=0.0)
    labels = leiden(graph, gamma=1.0, passes=2)
    np.testing.assert_array_equal(labels, np.arange(640) // 32)


@pytest.mark.parametrize(("inside", "gamma"), [(0.8, 4.0), (0.5, 30.0)])
@pytest.mark.parametrize("kind", ["attention", "keys"])
def test_modularity_is_within_half_a_percent_of_igraph(inside, gamma, kind, planted_lists):
    lists = planted_lists(2048, 32, inside, 3)
    graph = attention_graph(*lists, lam=0.5, prune=0.03) if kind == "attention" else key_graph(lists[0][0])
    edges, weights = edge_list(graph)
    ours, peers = [], []
    for seed in range(3):  # one seed's modularity varies by up to 0.7 % on the noisy graphs
        labels = leiden(graph, gamma=gamma, passes=2, seed=seed)
        assert is_connected(graph, labels)
        ours.append(modularity(graph, labels, gamma))
        labels = partition_edges("igraph", graph.num_nodes, edges, weights, gamma, 2, None, seed)
        peers.append(modularity(graph, labels, gamma))
    assert np.mean(ours) >= 0.995 * np.mean(peers)


@pytest.mark.parametrize("gamma", [0.0, 0.3, 1.0, 5.0])
@pytest.mark.parametrize("seed", range(4))
def test_barbell_with_a_heavy_edge_has_no_disconnected_community(barbell, gamma, seed):
    # Node 10 first joins the far clique's side, then leaves with node 0: what it bridged must not stay one community.
    for passes in (1, 3):
        assert is_connected(barbell, leiden(barbell, gamma=gamma, passes=passes, seed=seed))
    apart = np.zeros(11, np.int32)
    apart[10] = 1
    assert not is_connected(barbell, apart)
    assert is_connected(barbell, leiden(barbell, gamma=gamma, initial=apart))
    # A community that no node leaves or joins stays as it is: at 5.0 none does.
    assert is_connected(barbell, seeded(barbell, apart, np.array([10]), gamma=gamma)) == (gamma < 5.0)
    moved = seeded(barbell, np.zeros(11, np.int32), np.array([10]), gamma=gamma)
    assert is_connected(barbell, moved)
    assert (len(np.unique(moved)) > 2) == (gamma == 5.0)  # where the bridge leaves, it leaves two cliques behind
    assert is_connected(barbell, enforce_size(barbell, apart, gamma=gamma, max_community_size=0))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("cap", [0, 7])
def test_communities_of_random_graphs_are_connected_and_cover_every_node(seed, cap, planted_lists):
    graph = attention_graph(*planted_lists(400, 25, 0.4, seed, heads=2, kappa=3), lam=0.5, prune=0.1)
    for gamma in (0.1, 1.0, 20.0, 400.0):
        labels = leiden(graph, gamma=gamma, passes=2, seed=seed, max_community_size=cap)
        assert labels.dtype == np.int32
        assert labels.shape == (400,)
        np.testing.assert_array_equal(np.unique(labels), np.arange(labels.max() + 1))
        assert is_connected(graph, labels)
        assert cap == 0 or np.bincount(labels).max() <= cap


def test_star_is_one_community_or_hub_and_single_leaves(star):
    assert leiden(star, gamma=0.5).max() == 0
    labels = leiden(star, gamma=0.5, max_community_size=8)
    sizes = np.bincount(labels)
    assert sizes[labels[0]] == 8
    assert (np.delete(sizes, labels[0]) == 1).all()  # leaves have no other way to be connected
    assert is_connected(star, labels)


def test_equal_weights_everywhere_end_in_some_valid_partition(graph_of_edges):
    complete = graph_of_edges(12, [(i, j, 1.0) for i in range(12) for j in range(i)])
    assert leiden(complete, gamma=0.5).max() == 0
    assert leiden(complete, gamma=2.0).max() == 11
    ring = graph_of_edges(30, [(i, (i + 1) % 30, 1.0) for i in range(30)])
    labels = leiden(ring, gamma=2.0, passes=3)
    assert is_connected(ring, labels)
    assert modularity(ring, labels, 2.0) > 0.4


@pytest.mark.parametrize("n", [0, 1, 5])
def test_graphs_without_an_edge_give_single_nodes(n):
    graph = TokenGraph(np.zeros(n + 1, np.int64), np.empty(0, np.int32), np.empty(0, np.float32), np.zeros(n))
    for cap in (0, 3):
        np.testing.assert_array_equal(leiden(graph, gamma=1.0, max_community_size=cap), np.arange(n))
    assert modularity(graph, np.arange(n, dtype=np.int32), 1.0) == 0.0
    assert is_connected(graph, np.arange(n, dtype=np.int32))


def test_isolated_nodes_are_alone(graph_of_edges):
    graph = graph_of_edges(6, [(1, 2, 1.0), (2, 4, 1.0), (1, 4, 1.0)])
    np.testing.assert_array_equal(leiden(graph, gamma=1.0), [0, 1, 1, 2, 1, 3])


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_labels_do_not_depend_on_the_scale_of_weights(scale, planted_lists):
    graph = key_graph(planted_lists(500, 20, 0.7, 5)[0][0])
    scaled = TokenGraph(
        graph.indptr, graph.indices, (graph.weights * np.float32(scale)).astype(np.float32), graph.strength * scale
    )
    np.testing.assert_array_equal(leiden(scaled, gamma=10.0), leiden(graph, gamma=10.0))


def test_warm_start_is_at_least_as_good_as_what_it_started_from(planted_lists):
    graph = attention_graph(*planted_lists(1500, 30, 0.6, 6), lam=0.5, prune=0.0)
    first = leiden(graph, gamma=20.0)
    second = leiden(graph, gamma=20.0, initial=first)
    assert modularity(graph, second, 20.0) >= modularity(graph, first, 20.0)
    first[1200:] = -1
    assert modularity(graph, leiden(graph, gamma=20.0, initial=first), 20.0) > modularity(graph, first, 20.0)


def test_seeded_moves_recover_most_of_what_new_tokens_lost(planted_lists):
    graph = attention_graph(*planted_lists(1500, 30, 0.8, 7), lam=0.5, prune=0.0)
    full = leiden(graph, gamma=20.0)
    labels = full.copy()
    labels[1400:] = -1
    new = np.arange(1400, 1500)
    drifted, repaired, best = (
        modularity(graph, x, 20.0) for x in (labels, seeded(graph, labels, new, gamma=20.0), full)
    )
    assert repaired > drifted + 0.7 * (best - drifted)


def test_seeded_moves_leave_far_nodes_alone(graph_of_edges):
    triangles = [(3 * t + i, 3 * t + j, 1.0) for t in range(10) for i, j in ((0, 1), (1, 2), (0, 2))]
    graph = graph_of_edges(30, triangles)
    labels = np.arange(30, dtype=np.int32)  # everything could move, only the seed's triangle may
    moved = seeded(graph, labels, np.array([0]), gamma=1.0)
    assert communities(moved)[0] == (0, 1, 2)
    assert len(np.unique(moved)) == 28


def test_size_limit_holds_for_other_engines_labels(planted_lists):
    graph = attention_graph(*planted_lists(600, 100, 0.9, 8), lam=0.5, prune=0.0)
    labels = enforce_size(graph, np.arange(600) // 100, gamma=1.0, max_community_size=16)
    assert np.bincount(labels).max() <= 16
    assert is_connected(graph, labels)
    assert np.bincount(labels).mean() > 8  # pieces, not crumbs
    small = enforce_size(graph, labels, gamma=1.0, max_community_size=16)
    np.testing.assert_array_equal(small, labels)


def test_same_seed_gives_the_same_labels_in_any_thread(planted_lists):
    graphs = [attention_graph(*planted_lists(800, 20, 0.6, g), lam=0.5, prune=0.0) for g in range(16)]
    rounds = []
    for _ in range(2):
        labels = [None] * 16

        def work(worker, labels=labels):
            for g in range(worker, 16, 4):
                labels[g] = leiden(graphs[g], gamma=15.0, passes=2, seed=3)

        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rounds.append(labels)
    alone = [leiden(graph, gamma=15.0, passes=2, seed=3) for graph in graphs]
    for one, two, three in zip(*rounds, alone, strict=True):
        np.testing.assert_array_equal(one, two)
        np.testing.assert_array_equal(one, three)


def test_a_heartbeat_goes_on_while_a_partition_runs(planted_lists):
    graph = attention_graph(*planted_lists(20000, 50, 0.3, 9), lam=0.5, prune=0.0)
    leiden(graph, gamma=50.0)
    done = threading.Event()

    def work():
        for _ in range(3):
            leiden(graph, gamma=50.0, passes=4)
        done.set()

    began = time.perf_counter()
    threading.Thread(target=work).start()
    ticks = 0
    while not done.wait(0.002):
        ticks += 1
    seconds = time.perf_counter() - began
    assert seconds > 0.1
    assert ticks > 0.1 * seconds / 0.002  # an engine that holds the GIL lets it tick once or twice


def test_a_raised_stop_flag_ends_the_engine_promptly(planted_lists):
    graph = attention_graph(*planted_lists(20000, 50, 0.3, 9), lam=0.5, prune=0.0)
    stop = np.zeros(1, np.int32)
    timer = threading.Timer(0.1, stop.__setitem__, (0, 1))
    timer.start()
    began = time.perf_counter()
    while not stop[0]:
        labels = leiden(graph, gamma=50.0, passes=1000, initial=None, seed=1, stop=stop)
    assert time.perf_counter() - began < 1.0
    assert labels.shape == (20000,)
    assert is_connected(graph, labels)


@pytest.mark.parametrize("gamma", [-1.0, np.nan, np.inf])
def test_gamma_that_is_no_resolution_raises(gamma, barbell):
    with pytest.raises(ValueError, match="gamma must be finite and at least 0"):
        leiden(barbell, gamma=gamma)


def test_initial_labels_of_another_length_raise(barbell):
    with pytest.raises(ValueError, match=r"must have shape \(11,\), got \(3,\)"):
        leiden(barbell, gamma=1.0, initial=np.zeros(3, np.int32))


def test_igraph_agrees_on_modularity(planted_lists):
    graph = key_graph(planted_lists(300, 20, 0.7, 11)[0][0])
    edges, weights = edge_list(graph)
    labels = leiden(graph, gamma=5.0)
    peer = igraph.Graph(n=300, edges=edges).modularity(labels.tolist(), weights=weights.tolist(), resolution=5.0)
    assert modularity(graph, labels, 5.0) == pytest.approx(peer, abs=1e-7)
