import numpy as np
import pytest

from ckv_compile.community.graph import key_graph
from ckv_compile.community.hierarchy import number_by_coarse_level
from ckv_compile.community.partition import partition_attention, partition_keys_block
from ckv_compile.community.resolution import ResolutionMemory
from ckv_compile.config import CommunityConfig, coarse_from


def two_level_lists(rng, topics=6, subjects=5, tokens=1500, kappa=8):
    """Nearest keys of tokens that mostly share a subject, else a topic of some subjects: lists, topic, subject."""
    subject = rng.integers(0, topics * subjects, tokens)
    topic = subject // subjects
    lists = np.full((1, tokens, kappa), -1, np.int32)
    for token in range(tokens):
        same = np.flatnonzero(subject[:token] == subject[token])
        near = np.flatnonzero(topic[:token] == topic[token])
        for slot in range(kappa):
            pool = same if slot < kappa - 2 else near
            if len(pool):
                lists[0, token, slot] = rng.choice(pool)
    return lists, topic


def partition_of(lists, hierarchy, context=10**6):
    config = CommunityConfig(hierarchy=hierarchy)
    return partition_keys_block(lists, 4, config=config, memory=ResolutionMemory(), layer=0, context=context)[0]


def test_only_the_numbers_change():
    lists, _ = two_level_lists(np.random.default_rng(0))
    plain, ours = partition_of(lists, "off"), partition_of(lists, "auto")
    assert not np.array_equal(plain.labels, ours.labels)
    communities = [
        {tuple(one.member[begin : begin + size]) for begin, size in zip(one.start, one.size, strict=True)}
        for one in (plain, ours)
    ]
    assert communities[0] == communities[1]
    for number, (begin, size) in enumerate(zip(ours.start, ours.size, strict=True)):
        assert (ours.labels[ours.member[begin : begin + size]] == number).all()
    assert np.array_equal(np.flatnonzero(ours.labels < 0), np.arange(4))
    graph = key_graph(lists[0], first=4)
    np.testing.assert_allclose(ours.weight, np.bincount(ours.labels[4:], graph.strength))


def neighbours_alike(partition, topic):
    """Share of pairs of consecutive communities whose tokens mostly are of one topic."""
    main = [np.bincount(topic[partition.member[b : b + s]]).argmax() for b, s in zip(partition.start, partition.size)]  # noqa: B905
    return np.mean(np.diff(main) == 0)


def test_communities_of_a_topic_follow_each_other():
    lists, topic = two_level_lists(np.random.default_rng(1))
    assert neighbours_alike(partition_of(lists, "off"), topic) < 0.4
    assert neighbours_alike(partition_of(lists, "auto"), topic) > 0.7


def test_short_contexts_keep_the_numbers_they_had():
    lists, _ = two_level_lists(np.random.default_rng(0))
    config = CommunityConfig(hierarchy="auto")
    most = config.mean_size * coarse_from(config)
    assert most == 131_072
    plain, short, long = (partition_of(lists, *case) for case in (("off",), ("auto", most), ("auto", most + 1)))
    assert np.array_equal(plain.labels, short.labels)
    assert not np.array_equal(plain.labels, long.labels)


def test_the_same_graph_gives_the_same_numbers():
    lists, _ = two_level_lists(np.random.default_rng(2))
    one, other = partition_of(lists, "on"), partition_of(lists, "on")
    assert np.array_equal(one.labels, other.labels)


def test_attention_graphs_are_numbered_too():
    lists, topic = two_level_lists(np.random.default_rng(3))
    weights = np.where(lists >= 0, 0.1, 0.0).astype(np.float32)
    memory, found = ResolutionMemory(), []
    for hierarchy in ("off", "on"):
        config = CommunityConfig(graph="attention", hierarchy=hierarchy, budget=80, append_block=16)
        found.append(partition_attention(lists, weights, 4, config=config, memory=memory, layer=0, graph=0))
    assert sorted(found[0].size) == sorted(found[1].size)
    assert neighbours_alike(found[1], topic) >= neighbours_alike(found[0], topic)
    np.testing.assert_allclose(sorted(found[0].weight), sorted(found[1].weight))


@pytest.mark.parametrize("count", [0, 1])
def test_so_few_communities_stay_as_they_are(count):
    labels = np.zeros(3 * count, np.int32)
    start, size = np.zeros(count, np.int32), np.full(count, 3, np.int32)
    member = np.arange(3 * count, dtype=np.int32)
    number_by_coarse_level(
        labels, start, size, member, np.zeros(3 * count + 1, np.int64), np.zeros(0, np.int32), np.zeros(0),
        np.zeros(3 * count), gamma=1.0, mean_size=8, seed=0, stop=np.zeros(1, np.int32),
    )  # fmt: skip
    assert labels.tolist() == [0] * (3 * count)
    assert member.tolist() == list(range(3 * count))
