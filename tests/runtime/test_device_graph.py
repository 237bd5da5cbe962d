"""Graphs that a device builds are those that the host builds, however the work is divided."""

import weakref

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ckv_compile.ops  # noqa: F401
from ckv_compile.community.graph import attention_graph, graph_of_joint_csr, key_graph, mixed_graph
from ckv_compile.config import CommunityConfig
from ckv_compile.runtime.device_graph import BYTES_PER_TERM, build_graphs, terms_of
from ckv_compile.testing import assert_consistent_index, bare_sequence, outbox_of_the_host


def built(neighbors, weights, first, graphs, *, lam=0.5, prune=0.03, keys=None, **options):
    """TokenGraphs of all rows and graphs."""
    tensors = [None if one is None else torch.from_numpy(one) for one in (neighbors, weights, keys)]
    found, nodes = [], np.repeat(first, graphs).tolist()
    for some in build_graphs(
        *tensors[:2], first, graphs=graphs, lam=lam, prune=prune, key_neighbor=tensors[2], **options
    ):
        arrays = [tensor.numpy() for tensor in some.tensors()]
        found += [graph_of_joint_csr(*arrays, number, nodes[len(found) + number]) for number in range(len(arrays[3]))]
    return found


def of_the_host(neighbors, weights, first, graphs, *, lam=0.5, prune=0.03, keys=None):
    heads = neighbors.shape[1] // graphs
    found = []
    for row, graph in np.ndindex(len(first), graphs):
        lists = row, slice(graph * heads, (graph + 1) * heads)
        options = {"lam": lam, "prune": prune, "first": first[row]}
        if keys is None:
            found.append(attention_graph(neighbors[lists], weights[lists], **options))
        else:
            found.append(mixed_graph(neighbors[lists], weights[lists], keys[row, graph], **options))
    return found


def in_order(graph):
    """Rows, columns and weights of a graph, by row and column."""
    rows = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr))
    order = np.lexsort((graph.indices, rows))
    return rows[order], graph.indices[order], graph.weights[order]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours.indptr, theirs.indptr)
        assert ours.indices.dtype == np.int32
        assert ours.weights.dtype == np.float32
        mine, wanted = in_order(ours), in_order(theirs)
        np.testing.assert_array_equal(mine[1], wanted[1])
        np.testing.assert_allclose(mine[2], wanted[2], rtol=2e-7, atol=1e-16)
        np.testing.assert_allclose(ours.strength, theirs.strength, rtol=1e-6)
        assert ours.dropped == theirs.dropped
        assert ours.key_scale == pytest.approx(theirs.key_scale, rel=1e-6)


def random_lists(seed, batch, heads, n, kappa, graphs=1, causal=True):
    """Lists with empty slots anywhere, entries that repeat, self-loops and unusable weights."""
    rng = np.random.default_rng(seed)
    shape = batch, heads, n, kappa
    near = np.arange(n)[:, None] - rng.integers(0, 12, shape)
    ids = np.where(rng.random(shape) < 0.6, near, rng.integers(-3, n + 3, shape))
    ids = np.where(rng.random(shape) < 0.15, np.arange(n)[:, None], ids)
    if causal:
        ids = np.where(ids <= np.arange(n)[:, None], ids, -1)
    if kappa > 2:
        ids[..., 2] = np.where(rng.random(shape[:3]) < 0.3, ids[..., 0], ids[..., 2])
    weights = rng.random(shape, np.float32) ** 4 / max(1, kappa)
    bad = rng.choice(np.array([np.nan, np.inf, -np.inf, -1.0, 0.0, -0.0], np.float32), shape)
    weights = np.where(rng.random(shape) < 0.05, bad, weights)
    keys = rng.integers(-1, n, (batch, graphs, n, kappa)) if n else np.empty((batch, graphs, 0, kappa))
    return ids.astype(np.int32), weights.astype(np.float32), keys.astype(np.int32)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(
    ("batch", "heads", "graphs", "n", "kappa", "first", "options"),
    [
        (1, 4, 2, 200, 8, [4], {}),
        (2, 4, 4, 90, 5, [4, 60], {"lam": 1.0}),
        (2, 6, 1, 70, 8, [0, 70], {"lam": 0.0, "prune": 0.3}),
        (3, 2, 2, 50, 3, [10, 49, 80], {"prune": 0.0}),
        (1, 3, 3, 33, 1, [2], {}),
        (1, 2, 1, 1, 8, [0], {}),
        (1, 2, 2, 0, 8, [0], {}),
        (1, 2, 1, 9, 0, [0], {}),
    ],
)
def test_graphs_are_those_of_the_host(batch, heads, graphs, n, kappa, first, options, mixed):
    for seed in range(3):
        neighbors, weights, keys = random_lists(seed, batch, heads, n, kappa, graphs, causal=seed > 0)
        keys = keys if mixed else None
        expected = of_the_host(neighbors, weights, first, graphs, keys=keys, **options)
        assert_same(built(neighbors, weights, first, graphs, keys=keys, **options), expected)


@pytest.mark.parametrize("value", [0.0, 1e-12, 0.125, 1.0, 1e4, np.nan, np.inf])
@pytest.mark.parametrize("mixed", [False, True])
def test_equal_weights_of_any_size_are_those_of_the_host(value, mixed):
    neighbors, weights, keys = random_lists(0, 1, 2, 80, 4)
    weights[:] = value
    arguments = neighbors, weights, [3], 1
    keys = keys if mixed else None
    assert_same(built(*arguments, keys=keys), of_the_host(*arguments, keys=keys))


def test_sums_beyond_float32_are_dropped_and_counted():
    lists = np.array([[[[-1, -1], [-1, -1], [0, 1]]]], np.int32), np.full((1, 1, 3, 2), 3e38, np.float32), [0], 1
    assert_same(built(*lists, lam=0.0), of_the_host(*lists, lam=0.0))
    assert built(*lists, lam=0.0)[0].dropped == 1


def test_lists_without_an_entry_give_graphs_without_an_edge():
    neighbors, weights, keys = random_lists(0, 1, 2, 20, 4)
    neighbors[:] = -1
    assert [graph.num_edges for graph in built(neighbors, weights, [0], 2)] == [0, 0]
    (mixed,) = built(neighbors, weights, [0], 1, keys=keys)
    assert mixed.num_edges == key_graph(keys[0, 0]).num_edges


@pytest.mark.parametrize("mixed", [False, True])
def test_equal_lists_give_equal_bits_however_the_work_is_divided(mixed):
    neighbors, weights, keys = random_lists(1, 2, 4, 150, 6, 2)
    found = []
    for terms in (1 << 20, 1 << 20, 7000, 900, 1):
        arguments = (torch.from_numpy(one) for one in (neighbors, weights))
        options = {"key_neighbor": torch.from_numpy(keys) if mixed else None, "terms_at_once": terms}
        parts = list(build_graphs(*arguments, [5, 20], graphs=2, lam=0.5, prune=0.03, **options))
        found.append([torch.cat([part.tensors()[place] for part in parts]) for place in (1, 2, 3, 4)])
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


def test_graphs_are_symmetric_to_the_bit_and_their_columns_ascend(dense_of):
    for graph in built(*random_lists(2, 1, 4, 120, 8)[:2], [6], 2):
        matrix = dense_of(graph)
        np.testing.assert_array_equal(matrix, matrix.T)
        assert not matrix.diagonal().any()
        for begin, end in zip(graph.indptr[:-1], graph.indptr[1:], strict=True):
            assert (np.diff(graph.indices[begin:end]) > 0).all()


@pytest.fixture
def dense_of():
    def dense(graph):
        matrix = np.zeros((graph.num_nodes, graph.num_nodes), np.float32)
        rows = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr))
        matrix[rows, graph.indices] = graph.weights
        return matrix

    return dense


class LiveBytes(TorchDispatchMode):
    """Counts the memory of tensors that operators made and that live still, and the most of it at a time."""

    def __init__(self):
        super().__init__()
        self.sizes, self.now, self.most = {}, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(results):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in self.sizes:
                self._watch(leaf.untyped_storage())
        self.most = max(self.most, self.now)
        return results

    def _watch(self, storage):
        place, size = storage._cdata, storage.nbytes()
        self.sizes[place] = size
        self.now += size
        weakref.finalize(storage, self._gone, place)

    def _gone(self, place):
        self.now -= self.sizes.pop(place)


@pytest.mark.parametrize("terms", [20_000, 100_000, 1 << 22])
def test_temporary_memory_is_bounded(terms):
    neighbors, weights, _ = (torch.from_numpy(one) for one in random_lists(3, 1, 4, 6000, 8))
    assert 4 * 6000 * terms_of(8) == 864_000
    with LiveBytes() as memory:
        parts = build_graphs(neighbors, weights, [10], graphs=2, lam=0.5, prune=0.0, terms_at_once=terms)
        edges = max(len(part.weights) // 2 for part in parts)
        del parts
    bound = BYTES_PER_TERM * (min(terms, 864_000) + (2 * max(terms, edges) if terms < 432_000 else 0))
    lists = 16 * neighbors.numel()
    assert memory.most < bound + lists + 40 * edges


@pytest.mark.parametrize("graph", ["attention", "mixed"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_prefill_whose_lists_leave_by_an_outbox_is_indexed_from_graphs_of_the_device(monkeypatch, graph, workers):
    config = CommunityConfig(
        graph=graph, min_context=0, workers=workers, num_sink_tokens=4, kappa=6, block_size=64, append_block=64
    )
    neighbors, weights, _ = random_lists(4, 2, 4, 150, 6)
    weights = np.nan_to_num(weights, nan=0, posinf=0, neginf=0).clip(0)
    sequence = bare_sequence(config, 200, batch=2)
    sequence.set_first([0, 30])
    with outbox_of_the_host(monkeypatch):
        for layer in range(2):
            lists = [torch.from_numpy(one.copy()) for one in (neighbors, weights)]
            sequence.offer(layer, sequence.keys(layer), 0, 150, *lists)
            for tensor in lists:
                tensor.fill_(-7)  # as a graph that goes on may do
        sequence.prefilled(150)
        sequence.wait()
        assert all(edges.pieces[0].graphs is not None for edges in sequence.edges)
        sequence.publish()
        piece = sequence.edges[1].pieces[0].arrays()
    assert not sequence.statistics.failures
    assert_consistent_index(sequence)
    np.testing.assert_array_equal(piece.neighbor, neighbors)
    np.testing.assert_array_equal(piece.weight, weights)
    assert sequence.edges[1].pieces[0].graphs is None  # what was partitioned is kept with the partition
    keys = None if graph == "attention" else piece.key_neighbor
    kept = [part.graph for row in sequence.edges[1].kept for part in row]
    assert_same(kept, of_the_host(neighbors, weights, [4, 34], 2, keys=keys))


def test_where_the_device_has_no_memory_the_host_builds(monkeypatch):
    config = CommunityConfig(graph="attention", min_context=0, workers=0, num_sink_tokens=4, kappa=6)
    neighbors, weights, _ = random_lists(5, 1, 4, 100, 6)
    sequence = bare_sequence(config, 200)

    def none(*args, **kwargs):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr("ckv_compile.runtime.device_graph.build_graphs", none)
    with outbox_of_the_host(monkeypatch):
        for layer in range(2):
            sequence.offer(layer, sequence.keys(layer), 0, 100, torch.from_numpy(neighbors), torch.from_numpy(weights))
        sequence.prefilled(100)
        sequence.publish()
    assert not sequence.statistics.failures
    assert sequence.indexed_layers() == 2
