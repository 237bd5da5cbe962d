"""Rows of a cache that move between steps (beam search): they are found again, and their index moves with them."""

import numpy as np
import pytest
import torch

import ckv_compile.ops  # noqa: F401
from ckv_compile.community.graph import attention_graph
from ckv_compile.config import CommunityConfig
from ckv_compile.index_layout import IndexShape, state_dtypes
from ckv_compile.runtime import reorder, work
from ckv_compile.runtime.rows import Origins
from ckv_compile.runtime.slab import KVSlab
from ckv_compile.testing import assert_consistent_index, assign_step, bare_sequence, members_of, retrieve_step

TOKENS, PROMPT, LAYERS, HEADS, KAPPA, BATCH = 320, 100, 2, 4, 6, 3

# ---------------------------------------------------------------------- which row went where


def rows_of_keys(batch=3, tokens=40, dim=16, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 2, tokens, dim, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [16, 6, 5])
@pytest.mark.parametrize("at_once", [1, 1 << 12, 1 << 26])
def test_rows_are_found_wherever_they_went(monkeypatch, dtype, dim, at_once):
    monkeypatch.setitem(reorder.AT_ONCE_BYTES, "cpu", at_once)
    old = rows_of_keys(5, dim=dim, dtype=dtype)
    for rows in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 2, 2, 0, 0], [1, 1, 1, 1, 1]):
        assert reorder.row_map(old, old[rows]) == rows


def test_rows_are_found_in_a_slab():
    slab = KVSlab(2, 4, 2, 16, 64, torch.bfloat16, torch.device("cpu"))
    slab.buffer.copy_(torch.randn(slab.buffer.shape))
    last = slab.views(33)[-2]
    assert reorder.row_map(last, last.index_select(0, torch.tensor([3, 0, 0, 1]))) == [3, 0, 0, 1]


def test_of_equal_rows_a_row_stays_where_it_is():
    old = rows_of_keys()[:1].repeat(4, 1, 1, 1)
    assert reorder.row_map(old, old.clone()) == [0, 1, 2, 3]
    old[2:, :, -3:] += 1
    assert reorder.row_map(old, old[[0, 0, 0, 3]]) == [0, 1, 0, 3]


@pytest.mark.parametrize("position", [0, 17, 39])
def test_a_row_that_differs_in_one_bit_is_no_row_of_the_cache(position):
    old = rows_of_keys(dtype=torch.bfloat16)
    new = old[[2, 0, 0]]
    bits = new.view(torch.int16)
    bits[1, 1, position, 7] ^= 1
    assert reorder.row_map(old, new) is None
    bits[1, 1, position, 7] ^= 1
    bits[2, 0, position, 3] ^= -(1 << 15)  # the sign
    assert reorder.row_map(old, new) is None


def test_equal_digests_prove_nothing(monkeypatch):
    monkeypatch.setattr(reorder, "_digests", lambda words, begin: torch.zeros(len(words), dtype=torch.int64))
    old = rows_of_keys()
    assert reorder.row_map(old, old.clone()) == [0, 1, 2]
    assert reorder.row_map(old, old[[1, 1, 2]]) is None


def test_bits_are_compared_and_not_numbers():
    old = rows_of_keys()
    old[1, 0, 3, 3], old[2, 0, 3, 3] = torch.nan, 0.0
    assert reorder.row_map(old, old[[1, 0, 2]]) == [1, 0, 2]
    new = old[[1, 0, 2]]
    new[2, 0, 3, 3] = -0.0
    assert reorder.row_map(old, new) is None


def test_origins_follow_every_move_after_them():
    origins = Origins()
    before = origins.now
    origins.move([2, 0, 0])
    between, fixed = origins.now, before.fixed()
    origins.move([1, 1, 0])
    assert (before.rows, between.rows, origins.now.rows, fixed.rows) == ([0, 0, 2], [1, 1, 0], None, [2, 0, 0])
    assert before.now(list("abc")) == list("aac")
    origins.move([0, 1, 2])
    assert before.rows == [0, 0, 2]
    assert between.now(list("abc")) == list("bba")


def test_a_buffer_that_lives_between_steps_has_its_rows_in_its_second_dimension():
    for options in ({}, {"append": "assign", "centroid_budget": 16, "hierarchy": "on"}, {"graph": "attention"}):
        config = CommunityConfig(**options)
        shape = IndexShape.for_cache(config, bare_sequence(config, 64).geometry, 7, 64)
        for name in [*state_dtypes(config, torch.float32), "key_mean"]:
            assert name in reorder.NOT_OF_ROWS or shape.of(name)[:2] == (2, 7), name


# ---------------------------------------------------------------------- the index that follows


class Beams:
    """A cache of several rows, with lists of edges of every position, whose rows move; two layers.

    arrays: keys, values [L, B, Hkv, TOKENS, D], ids and alphas [L, B, H, TOKENS, kappa]; of positions from ``length`` on
    they hold what the row at that place will add.
    """

    def __init__(self, config, arrays=None, prompt=PROMPT):
        self.arrays = arrays or self.random(BATCH)
        keys, values, ids, alphas = self.arrays
        self.config = config
        self.sequence = bare_sequence(config, TOKENS, batch=keys.shape[1], keys=keys, values=values)
        self.listed = config.graph != "keys"
        for layer in range(LAYERS):
            lists = [one[layer, :, :, :prompt].clone() if self.listed else None for one in (ids, alphas)]
            self.sequence.offer(layer, self.sequence.keys(layer), 0, prompt, *lists)
        self.sequence.prefilled(prompt)

    @staticmethod
    def random(batch):
        generator, rng = torch.Generator().manual_seed(0), np.random.default_rng(0)
        topics = torch.randn(LAYERS, batch, 2, 24, 16, generator=generator)
        which = torch.randint(0, 24, (LAYERS, batch, 2, TOKENS), generator=generator)
        keys = torch.take_along_dim(topics, which[..., None], 3) * 1.5
        keys = keys + torch.randn(keys.shape, generator=generator)
        shape = (LAYERS, batch, HEADS, TOKENS, KAPPA)
        near = np.arange(TOKENS)[:, None] // 24 * 24 + rng.integers(0, 24, shape)
        ids = np.where(rng.random(shape) < 0.8, near, rng.integers(0, TOKENS, shape))
        ids[..., 0] = np.arange(TOKENS)
        ids = np.where(ids <= np.arange(TOKENS)[:, None], ids, -1).astype(np.int32)
        alphas = torch.from_numpy(rng.random(shape, np.float32) / KAPPA)
        return [keys, keys.flip(-1), torch.from_numpy(ids), alphas]

    def alone(self, row, prompt=PROMPT):
        """The row as it is now, in a cache of its own that has come as far without moving."""
        one = Beams(self.config, [array[:, row : row + 1].clone() for array in self.arrays], prompt)
        one.steps(self.sequence.length - prompt)
        return one

    def move(self, rows):
        length = self.sequence.length
        for array in self.arrays:
            past = array[:, :, :, :length]
            past.copy_(past[:, rows].clone())
        reorder.follow(self.sequence, rows)

    def steps(self, count):
        sequence = self.sequence
        for _ in range(count):
            sequence.publish()
            if self.listed or self.config.append == "assign":
                lists = slice(sequence.shape.lists)
                assign_step(sequence, *(one[:, :, lists, sequence.length].contiguous() for one in self.arrays[2:]))
            sequence.length += 1
            sequence.length_device.fill_(sequence.length)
            sequence.offer_appended()

    def settle(self):
        """All that is under way is published, and every token has its community where steps give it one."""
        self.sequence.wait()
        self.sequence.publish()

    def wander(self, count, seed=1):
        """As many steps, with rows that move at random before each."""
        rng = np.random.default_rng(seed)
        for _ in range(count):
            self.move(rng.integers(0, BATCH, BATCH).tolist() if rng.random() < 0.7 else list(range(BATCH)))
            self.steps(1)

    def assert_weights_of_eq_7(self):
        """Weights are the strengths of the communities in the graph of each row's own lists (eq. 2-5 and 7)."""
        index, (*_, ids, alphas) = self.sequence.index, self.arrays
        lists = HEADS // self.sequence.shape.graphs
        for layer, row, graph in np.ndindex(LAYERS, self.sequence.batch, self.sequence.shape.graphs):
            end, heads = int(index.n_indexed[layer, row]), slice(graph * lists, (graph + 1) * lists)
            first = self.config.num_sink_tokens + self.sequence.first[row]
            own = ids[layer, row, heads, :end].numpy(), alphas[layer, row, heads, :end].numpy()
            whole = attention_graph(*own, lam=self.config.lam, prune=0.0, first=first)
            number = int(index.num_communities[layer, row, graph])
            labels = index.label[layer, row, graph, first:end].numpy()
            np.testing.assert_allclose(
                index.community_weight[layer, row, graph, :number].numpy(),
                np.bincount(labels, whole.strength, number), rtol=1e-4, atol=1e-5,
            )  # fmt: skip


def config_of(**options):
    base = {
        "min_context": 0, "workers": 0, "num_sink_tokens": 4, "recent_window": 8, "kappa": KAPPA, "prune": 0.0,
        "mean_size": 8, "block_size": 64, "append_block": 16, "refresh_interval": 64, "repair_interval": 16, "gamma": 1.0,
    }  # fmt: skip
    return CommunityConfig(**{**base, **options})


def communities_of(sequence, row):
    """Members of every community that has some, of one row: by layer and graph."""
    return [
        sorted(sorted(one) for one in members_of(sequence.index, layer, row, graph) if one)
        for layer in range(LAYERS)
        for graph in range(sequence.shape.graphs)
    ]


def means_of(sequence, row):
    """Centroids of these communities, as they were published or moved since, in an order that their members give."""
    index, found = sequence.index, []
    for layer in range(LAYERS):
        for graph in range(sequence.shape.graphs):
            at = (layer, row, graph)
            members = members_of(index, *at)
            order = sorted((sorted(one), number) for number, one in enumerate(members) if one)
            numbers = [number for _, number in order]
            found.append(
                index.centroid[at][numbers] * index.centroid_scale[at][numbers, None] * index.channel_scale[at]
            )
    return torch.cat(found)


KINDS = {
    "keys": {},
    "keys by layer": {"graph_aggregation": "layer"},
    "relative scores": {"score": "relative"},
    "assigned": {"append": "assign"},
    "summaries": {"append": "assign", "centroid_budget": 16},
    "groups": {"hierarchy": "on"},
    "attention": {"graph": "attention"},
    "attention by head": {"graph": "attention", "graph_aggregation": "head"},
    "mixed": {"graph": "mixed"},
    "pages": {"policy": "quest"},
}


@pytest.mark.usefixtures("layers_at_once")
@pytest.mark.parametrize("kind", KINDS)
def test_after_many_moves_every_row_is_indexed_as_if_it_had_been_alone(kind):
    beams = Beams(config_of(**KINDS[kind]))
    beams.steps(5)
    beams.wander(150)
    query = torch.randn(BATCH, HEADS, 1, 16, generator=torch.Generator().manual_seed(3))
    sequence, budget = beams.sequence, beams.config.budget
    if kind not in ("pages", "assigned", "summaries"):  # tokens that were assigned and have left stay in a mean
        assert_consistent_index(sequence)
    for row in range(BATCH):
        one = beams.alone(row).sequence
        assert [marks[-1][0] for marks in one.index.marks] == [marks[-1][0] for marks in sequence.index.marks]
        assert communities_of(sequence, row) == communities_of(one, 0)
        torch.testing.assert_close(means_of(sequence, row), means_of(one, 0))
        for layer in range(LAYERS):
            found, count = retrieve_step(sequence, layer, query, min(budget, 96))
            own, number = retrieve_step(one, layer, query[row : row + 1], min(budget, 96))
            assert count[row].tolist() == number[0].tolist()
            for graph, size in enumerate(number[0].tolist()):
                assert sorted(found[row, graph, :size].tolist()) == sorted(own[0, graph, :size].tolist())
    assert not sequence.statistics.failures


@pytest.mark.parametrize("graph", ["attention", "mixed"])
def test_weights_and_edges_are_those_of_the_rows_with_workers_beside(graph):
    beams = Beams(config_of(graph=graph, workers=2))
    for number in range(20):
        beams.wander(9, seed=number)
        assert_consistent_index(beams.sequence)
        if graph == "attention":
            beams.assert_weights_of_eq_7()
    beams.sequence.wait()
    beams.sequence.publish()
    assert beams.sequence.index.marks[0][-1][0] > PROMPT
    assert not beams.sequence.statistics.failures


@pytest.mark.usefixtures("layers_at_once")
@pytest.mark.parametrize("graph", ["keys", "attention"])
def test_a_partition_that_is_under_way_arrives_by_the_rows_of_then(busy_worker, monkeypatch, graph):
    monkeypatch.setattr(work.Work, "backlog", lambda self: None)  # how long a job takes depends on it
    beams = Beams(config_of(graph=graph, workers=1))
    beams.move([2, 0, 0])
    beams.steps(1)
    beams.move([0, 2, 0])
    assert beams.sequence.index.marks == [[], []]
    busy_worker.set()
    beams.sequence.wait()
    beams.move([2, 1, 0])  # what has come back and is not published follows, too
    beams.sequence.publish()
    for row in range(BATCH):
        one = Beams(config_of(graph=graph), [array[:, row : row + 1].clone() for array in beams.arrays]).sequence
        one.publish()
        assert communities_of(beams.sequence, row) == communities_of(one, 0)
    assert_consistent_index(beams.sequence)
    beams.wander(60)
    beams.settle()
    assert_consistent_index(beams.sequence)
    if graph == "attention":
        beams.assert_weights_of_eq_7()


def test_a_crop_and_room_for_more_leave_moved_edges_right():
    beams = Beams(config_of(graph="attention"))
    beams.wander(70)
    beams.sequence.truncate(140)
    beams.wander(40)
    beams.sequence.grow(TOKENS + 64)
    beams.wander(40)
    assert_consistent_index(beams.sequence)
    beams.assert_weights_of_eq_7()


def test_padding_moves_with_its_row_and_no_address_changes():
    sequence = Beams(config_of(append="assign")).sequence
    sequence.publish()
    sequence.set_first([0, 3, 5])
    pointers = [buffer.data_ptr() for buffer in sequence.index.buffers.values()]
    reorder.follow(sequence, [1, 1, 0])
    assert sequence.first == sequence.first_host.tolist() == sequence.first_device.tolist() == [3, 3, 0]
    assert pointers == [buffer.data_ptr() for buffer in sequence.index.buffers.values()]


def test_a_move_that_fails_half_way_leaves_an_empty_index(monkeypatch):
    beams = Beams(config_of())
    beams.steps(1)
    monkeypatch.setattr(reorder, "NOT_OF_ROWS", None)
    with pytest.raises(TypeError):
        reorder.follow(beams.sequence, [1, 1, 0])
    assert beams.sequence.index.marks == [[], []]
    assert beams.sequence.length == PROMPT + 1
