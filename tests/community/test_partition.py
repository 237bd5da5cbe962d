import dataclasses
import threading

import numpy as np
import pytest

from ckv_compile.community.graph import attention_graph, key_graph
from ckv_compile.community.leiden import is_connected, leiden, modularity
from ckv_compile.community.partition import (
    community_room,
    contiguous_pages,
    gather_partitions,
    pages_block,
    partition_attention,
    partition_keys_block,
    partition_mixed,
    partition_repaired,
    warm_up,
)
from ckv_compile.community.resolution import ResolutionMemory
from ckv_compile.community.workers import PartitionPool
from ckv_compile.config import RUN, CommunityConfig

KEYS = CommunityConfig()
ATTENTION = CommunityConfig(graph="attention")
MIXED = CommunityConfig(graph="mixed")


def check(partition, n, first, most=None):
    """What an index may rely on."""
    assert partition.labels.shape == (n,)
    assert (partition.labels[:first] == -1).all()
    assert (partition.labels[first:] >= 0).all()
    assert sorted(partition.member.tolist()) == list(range(min(first, n), n))
    assert {a.dtype for a in (partition.labels, partition.start, partition.size, partition.member)} == {
        np.dtype("int32")
    }
    np.testing.assert_array_equal(partition.start, np.cumsum(partition.size) - partition.size)
    firsts = []
    for c in range(partition.num_communities):
        members = partition.member[partition.start[c] : partition.start[c] + partition.size[c]]
        assert len(members) > 0
        assert (partition.labels[members] == c).all()
        assert (np.diff(members) > 0).all()
        firsts.append(members[0])
    stride = 1 if partition.fallback else max(1, -(-len(firsts) // RUN))
    spread = [rank for offset in range(stride) for rank in range(offset, len(firsts), stride)]
    assert np.argsort(np.argsort(firsts)).tolist() == spread
    if most is not None:
        assert partition.num_communities <= most


def key_lists(graphs, n, seed, first=0, topics=40, dim=16, kappa=8):
    """Causal cosine kNN of clustered random keys."""
    rng = np.random.default_rng(seed)
    out = np.full((graphs, n, kappa), -1, np.int32)
    for g in range(graphs):
        keys = rng.normal(size=(topics, dim))[rng.integers(0, topics, n)] * 1.5 + rng.normal(size=(n, dim))
        keys /= np.linalg.norm(keys, axis=1, keepdims=True)
        scores = np.where(np.tri(n, k=-1, dtype=bool), keys @ keys.T, -9)
        scores[:, :first] = -9
        order = np.argsort(-scores, 1)[:, :kappa]
        out[g] = np.where(np.take_along_axis(scores, order, 1) > -5, order, -1)
    out[:, :first] = -1
    return out


@pytest.fixture(scope="module")
def neighbors():
    return key_lists(8, 512, 0, first=10)


def test_a_block_of_keys_gets_communities_of_the_mean_size(neighbors):
    memory = ResolutionMemory()
    partitions = partition_keys_block(neighbors, 10, config=KEYS, memory=memory, layer=3)
    assert len(partitions) == 8
    for partition in partitions:
        check(partition, 512, 10, community_room(512, 8))
        assert 8 / 1.4 <= 502 / partition.num_communities <= 8 * 1.4
        assert partition.size.max() <= 64
        assert partition.fallback is None
    assert len(memory) == 8


def test_each_graph_of_a_block_equals_its_partition_alone(neighbors):
    firsts = np.array([10, 11, 30, 10, 0, 10, 500, 512])
    together = partition_keys_block(neighbors, firsts, config=KEYS, memory=ResolutionMemory(), layer=0)
    for g, first in enumerate(firsts.tolist()):
        check(together[g], 512, first)
        (alone,) = partition_keys_block(neighbors[g : g + 1], first, config=KEYS, memory=ResolutionMemory(), layer=0)
        np.testing.assert_array_equal(together[g].labels, alone.labels)
        assert together[g].gamma == alone.gamma


def test_a_fixed_gamma_is_leiden_on_the_key_graph(neighbors):
    config = dataclasses.replace(KEYS, gamma=20.0)
    memory = ResolutionMemory()
    partition = partition_keys_block(neighbors[:1], 10, config=config, memory=memory, layer=0)[0]
    graph = key_graph(neighbors[0], first=10)
    labels = leiden(graph, gamma=20.0, passes=2, max_community_size=64)
    linked = graph.indptr[1:] > graph.indptr[:-1]  # the others are grouped into runs
    pairs = set(zip(partition.labels[10:][linked].tolist(), labels[linked].tolist(), strict=True))
    assert len(pairs) == len({own for own, _ in pairs}) == len({other for _, other in pairs}), "the same communities"
    assert partition.gamma == 20.0
    assert len(memory) == 0


def test_a_remembered_constant_saves_the_search(neighbors):
    memory = ResolutionMemory()
    config = dataclasses.replace(KEYS, mean_size=10)
    first = partition_keys_block(neighbors, 10, config=config, memory=memory, layer=0)
    again = partition_keys_block(neighbors, 10, config=config, memory=memory, layer=0)
    assert [p.gamma for p in again] == pytest.approx([p.gamma for p in first])


def test_deterministic_partitions_ignore_what_was_remembered(neighbors):
    memory = ResolutionMemory()
    config = dataclasses.replace(KEYS, deterministic=True)
    before = partition_keys_block(neighbors, 10, config=config, memory=memory, layer=0)
    for g in range(8):
        memory.put((0, g), 200.0, 12.5)
    after = partition_keys_block(neighbors, 10, config=config, memory=memory, layer=0)
    for one, two in zip(before, after, strict=True):
        np.testing.assert_array_equal(one.labels, two.labels)


@pytest.mark.parametrize("config", [KEYS, ATTENTION, MIXED], ids=lambda config: config.graph)
@pytest.mark.parametrize(("n", "first"), [(0, 0), (1, 0), (5, 10), (10, 10), (11, 10), (12, 10), (13, 0)])
def test_prompts_about_as_short_as_the_sinks_keep_a_label_for_every_position(config, n, first):
    neighbors = np.tril(np.ones((n, n), bool), -1)[None, :, :8]
    lists = np.where(neighbors, np.arange(neighbors.shape[2]), -1).astype(np.int32)
    lists = np.pad(lists, ((0, 0), (0, 0), (0, 8 - lists.shape[2])), constant_values=-1)
    weights = np.full(lists.shape, 0.1, np.float32)
    memory = ResolutionMemory()
    if config.graph == "keys":
        (partition,) = partition_keys_block(lists, first, config=config, memory=memory, layer=0)
    elif config.graph == "attention":
        partition = partition_attention(lists, weights, first, config=config, memory=memory, layer=0, graph=0)
    else:
        partition = partition_mixed(lists, weights, lists[0], first, config=config, memory=memory, layer=0, graph=0)
    check(partition, n, min(first, n))


def test_without_any_edge_tokens_form_runs_of_the_mean_size():
    empty = np.full((2, 50, 8), -1, np.int32)
    for partition in partition_keys_block(empty, 10, config=KEYS, memory=ResolutionMemory(), layer=0):
        check(partition, 50, 10)
        np.testing.assert_array_equal(partition.labels[10:], np.arange(40) // 8)


def test_isolated_tokens_are_grouped_and_never_lost():
    lists = key_lists(1, 200, 1)
    lonely = np.zeros(200, bool)
    lonely[50:150:3] = True
    lists[:, lonely] = -1
    lists[np.isin(lists, np.flatnonzero(lonely))] = -1
    (partition,) = partition_keys_block(lists, 0, config=KEYS, memory=ResolutionMemory(), layer=0)
    check(partition, 200, 0)
    runs = partition.labels[lonely]
    np.testing.assert_array_equal(runs, np.repeat(runs[::8], 8)[: len(runs)])
    assert not np.isin(partition.labels[~lonely], runs).any()


def test_a_policy_of_the_newest_has_communities_in_the_order_of_the_text(neighbors):
    config = dataclasses.replace(KEYS, policy="streaming")
    (partition,) = partition_keys_block(neighbors[:1], 10, config=config, memory=ResolutionMemory(), layer=0)
    firsts = partition.member[partition.start]
    assert (np.diff(firsts) > 0).all()


@pytest.mark.parametrize("room", [1, 2, 5, 20, 60])
def test_the_smallest_communities_are_merged_until_they_fit(room):
    rng = np.random.default_rng(2)
    labels = np.unique(rng.integers(0, 120, 300), return_inverse=True)[1].astype(np.int32)[None]
    labels[0, :30] = 119  # one large community
    (partition,) = gather_partitions(
        labels, np.zeros((1, 300), bool), np.zeros(1, np.int32), mean_size=8, max_community_size=64, room=room,
        gammas=np.zeros(1),
    )  # fmt: skip
    check(partition, 300, 0, room)
    if room >= 20:
        assert partition.num_communities == room
        assert partition.size.max() <= 64
        assert len(np.unique(partition.labels[:30])) == 1


def test_attention_partition_is_a_modular_one_of_the_mean_size(planted_lists):
    neighbors, weights = planted_lists(2000, 40, 0.7, 3, heads=3)
    memory = ResolutionMemory()
    partition = partition_attention(neighbors, weights, 10, config=ATTENTION, memory=memory, layer=1, graph=2)
    check(partition, 2000, 10, community_room(2000, 16))
    assert 1990 / partition.num_communities == pytest.approx(16, rel=0.15)
    graph = attention_graph(neighbors, weights, lam=0.5, prune=0.03, first=10)
    assert is_connected(graph, partition.labels[10:])
    best = modularity(graph, leiden(graph, gamma=partition.gamma, passes=6), partition.gamma)
    assert modularity(graph, partition.labels[10:], partition.gamma) >= 0.97 * best
    again = partition_attention(neighbors, weights, 10, config=ATTENTION, memory=memory, layer=1, graph=2)
    assert again.gamma == pytest.approx(partition.gamma)


def test_hub_graphs_keep_their_size_limit_and_their_room():
    n = 1500
    neighbors = np.full((1, n, 8), -1, np.int32)
    neighbors[0, 12:, :2] = [10, 11]  # every query attends to two hubs
    neighbors[0, 12:, 2] = np.arange(11, n - 1)
    weights = np.zeros(neighbors.shape, np.float32)
    weights[..., :2], weights[..., 2] = 0.4, 0.01
    partition = partition_attention(
        neighbors, weights, 10, config=ATTENTION, memory=ResolutionMemory(), layer=0, graph=0
    )
    check(partition, n, 10, community_room(n, 16))
    assert partition.size.max() <= 64


def test_unusable_attention_weights_are_counted_in_the_partition(planted_lists):
    neighbors, weights = planted_lists(300, 20, 0.8, 4)
    weights[0, 40] = np.nan
    weights[0, 41] = np.inf
    partition = partition_attention(
        neighbors, weights, 0, config=ATTENTION, memory=ResolutionMemory(), layer=0, graph=0
    )
    check(partition, 300, 0)
    assert partition.dropped == 16


def test_refresh_starts_from_the_last_partition_at_its_gamma(planted_lists):
    neighbors, weights = planted_lists(1200, 30, 0.8, 5)
    old = partition_attention(
        neighbors[:, :1000], weights[:, :1000], 10, config=ATTENTION, memory=ResolutionMemory(), layer=0, graph=0
    )
    initial = np.concatenate([old.labels, np.full(200, -1, np.int32)])
    new = partition_attention(
        neighbors, weights, 10, config=ATTENTION, memory=ResolutionMemory(), layer=0, graph=0, initial=initial,
        gamma=old.gamma,
    )  # fmt: skip
    check(new, 1200, 10)
    assert new.gamma == old.gamma
    graph = attention_graph(neighbors, weights, lam=0.5, prune=0.03, first=10)
    cold = modularity(graph, leiden(graph, gamma=old.gamma, passes=2), old.gamma)
    assert modularity(graph, new.labels[10:], old.gamma) >= 0.99 * cold


@pytest.mark.parametrize("config", [ATTENTION, MIXED], ids=lambda config: config.graph)
def test_repairs_recover_most_of_what_later_tokens_cost(config, planted_lists):
    config = dataclasses.replace(config, prune=0.0)
    lists = planted_lists(1600, 40, 0.8, 5)
    keys = planted_lists(1600, 40, 0.8, 6)[0][0]
    lists, keys = (
        (np.where(lists[0] < np.arange(1600)[:, None], lists[0], -1), lists[1]),
        np.where(keys < np.arange(1600)[:, None], keys, -1),
    )
    mixed = config.graph == "mixed"

    def whole(n, **kwargs):
        common = {"config": config, "memory": ResolutionMemory(), "layer": 0, "graph": 0, **kwargs}
        if mixed:
            return partition_mixed(lists[0][:, :n], lists[1][:, :n], keys[:n], 10, **common)
        return partition_attention(lists[0][:, :n], lists[1][:, :n], 10, **common)

    partition = whole(1000)
    before = partition.labels.copy()
    for begin in range(1000, 1600, 100):
        part = slice(begin, begin + 100)
        later = partition_repaired(
            partition, lists[0][:, part], lists[1][:, part], keys[part] if mixed else None, config=config
        )
        assert len(partition.labels) == begin
        partition = later
    np.testing.assert_array_equal(before, whole(1000).labels)  # what was kept did not change
    check(partition, 1600, 10, community_room(1600, config.mean_size))
    assert partition.size.max() <= 64
    cold = whole(1600, gamma=partition.gamma)
    alone = np.concatenate([before, np.full(600, -1, np.int32)])
    found = (alone, partition.labels, cold.labels)
    worst, repaired, best = (modularity(partition.graph.merged(), labels[10:], partition.gamma) for labels in found)
    assert repaired - worst >= 0.6 * (best - worst)
    np.testing.assert_allclose(
        partition.weight, np.bincount(partition.labels[10:], partition.graph.strength), rtol=1e-12
    )


@pytest.mark.parametrize("config", [KEYS, ATTENTION], ids=lambda config: config.graph)
def test_more_passes_follow_only_while_no_job_waits(config, planted_lists):
    lists = planted_lists(3000, 30, 0.5, 5)
    memory, start = ResolutionMemory(), np.full(3000, -1, np.int32)

    def run(waiting):
        asked = []

        def backlog():
            asked.append(True)
            return waiting[min(len(asked), len(waiting)) - 1]

        common = {"config": dataclasses.replace(config, gamma=60.0), "memory": memory, "layer": 0, "backlog": backlog}
        if config.graph == "keys":
            (partition,) = partition_keys_block(lists[0], 0, **common)
            graph = key_graph(lists[0][0])
        else:
            partition = partition_attention(*lists, 0, graph=0, initial=start, **common)
            graph = partition.graph
        return len(asked), modularity(graph, partition.labels, 60.0)

    busy, idle, between = run([5]), run([0]), run([0, 1])
    assert (busy[0], idle[0], between[0]) == (1, 3, 2)
    assert busy[1] < between[1] <= idle[1]


@pytest.mark.parametrize("engine", ["igraph", "leidenalg"])
def test_other_engines_fill_the_same_partitions(engine, neighbors, planted_lists):
    config = dataclasses.replace(KEYS, leiden_engine=engine)
    for partition in partition_keys_block(neighbors[:2], 10, config=config, memory=ResolutionMemory(), layer=0):
        check(partition, 512, 10, community_room(512, 8))
        assert 8 / 1.4 <= 502 / partition.num_communities <= 8 * 1.4
    config = dataclasses.replace(ATTENTION, leiden_engine=engine)
    lists = planted_lists(600, 40, 0.7, 6)
    partition = partition_attention(*lists, 10, config=config, memory=ResolutionMemory(), layer=0, graph=0)
    check(partition, 600, 10, community_room(600, 16))
    assert partition.size.max() <= 64


@pytest.mark.parametrize(("n", "first", "page"), [(0, 0, 8), (5, 9, 8), (17, 0, 8), (40, 10, 16), (30, 29, 1)])
def test_pages_cover_every_node(n, first, page):
    partition = contiguous_pages(n, first, page, reason="why")
    check(partition, n, min(first, n))
    assert (partition.size[:-1] == page).all()
    assert partition.fallback == "why"


def test_pages_of_a_block_follow_each_graphs_first_node():
    for first, partition in zip((0, 7), pages_block(2, 20, np.array([0, 7]), 8), strict=True):
        check(partition, 20, first)


def test_sixteen_graphs_in_four_workers_twice_are_identical(planted_lists):
    lists = [planted_lists(700, 25, 0.6, g) for g in range(16)]

    def run(workers):
        memory, out = ResolutionMemory(), [None] * 16
        with PartitionPool(workers) as pool:
            for g in range(16):

                def work(g, stop):
                    return partition_attention(
                        *lists[g], 10, config=ATTENTION, memory=memory, layer=0, graph=g, stop=stop
                    )

                def keep(result, error, g=g):
                    assert error is None
                    out[g] = result

                pool.submit(work, g, on_done=keep)
            assert pool.drain(60)
        return out

    first, second, alone = run(4), run(4), run(0)
    for one, two, three in zip(first, second, alone, strict=True):
        np.testing.assert_array_equal(one.labels, two.labels)
        np.testing.assert_array_equal(one.labels, three.labels)


def test_a_stopped_search_ends_and_remembers_nothing(planted_lists):
    neighbors, weights = planted_lists(20000, 50, 0.3, 7)
    stop, memory = np.zeros(1, np.int32), ResolutionMemory()
    timer = threading.Timer(0.05, stop.__setitem__, (0, 1))
    timer.start()
    config = dataclasses.replace(ATTENTION, mean_size=3)
    partition = partition_attention(neighbors, weights, 0, config=config, memory=memory, layer=0, graph=0, stop=stop)
    timer.join()
    check(partition, 20000, 0)
    assert len(memory) == 0


@pytest.mark.parametrize("hierarchy", ["off", "on"])
@pytest.mark.parametrize("config", [KEYS, ATTENTION, MIXED], ids=lambda config: config.graph)
def test_warm_up_leaves_nothing_to_compile(config, hierarchy, planted_lists):
    from ckv_compile.community import graph, leiden, partition
    from ckv_compile.community import hierarchy as coarse

    config = dataclasses.replace(config, hierarchy=hierarchy, budget=128, append_block=16)

    def compiled():
        modules = (coarse, graph, leiden, partition)
        kernels = [x for module in modules for x in vars(module).values() if hasattr(x, "signatures")]
        return sum(len(kernel.signatures) for kernel in kernels)

    warm_up(config)
    before = compiled()
    lists = planted_lists(64, 8, 0.8, 0)
    memory = ResolutionMemory()
    if config.graph == "keys":
        partition_keys_block(lists[0], 10, config=config, memory=memory, layer=0, context=10**6)
    elif config.graph == "attention":
        partition_attention(*lists, 10, config=config, memory=memory, layer=0, graph=0)
    else:
        partition_mixed(*lists, lists[0][0], 10, config=config, memory=memory, layer=0, graph=0)
    assert compiled() == before
