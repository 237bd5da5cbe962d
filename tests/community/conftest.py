"""Graphs that the community tests share."""

import numpy as np
import pytest

from ckv_compile.community.graph import TokenGraph


def _graph_of_edges(num_nodes, edges):
    """A TokenGraph of edges (i, j, weight), each given once."""
    rows = [{} for _ in range(num_nodes)]
    for i, j, weight in edges:
        rows[i][j] = rows[j][i] = weight
    indptr = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    indices = np.array([j for row in rows for j in row], np.int32)
    weights = np.array([weight for row in rows for weight in row.values()], np.float32)
    strength = np.array([np.float32(list(row.values())).sum(dtype=np.float64) for row in rows], np.float64)
    return TokenGraph(indptr, indices, weights, strength, 0)


def _planted_lists(num_nodes, block, inside, seed, heads=1, kappa=8):
    rng = np.random.default_rng(seed)
    shape = (heads, num_nodes, kappa)
    own = np.arange(num_nodes)[None, :, None] // block * block
    ids = np.where(rng.random(shape) < inside, own + rng.integers(0, block, shape), rng.integers(0, num_nodes, shape))
    return np.minimum(ids, num_nodes - 1).astype(np.int32), rng.random(shape, np.float32) / kappa


def _dense(graph):
    matrix = np.zeros((graph.num_nodes, graph.num_nodes))
    for i in range(graph.num_nodes):
        row = slice(graph.indptr[i], graph.indptr[i + 1])
        assert len(set(graph.indices[row].tolist())) == graph.indptr[i + 1] - graph.indptr[i], "a column occurs twice"
        matrix[i, graph.indices[row]] = graph.weights[row]
    return matrix


@pytest.fixture(scope="session")
def graph_of_edges():
    return _graph_of_edges


@pytest.fixture(scope="session")
def planted_lists():
    """Lists [heads, n, kappa] and weights; a slot stays inside the token's block with a given probability."""
    return _planted_lists


@pytest.fixture(scope="session")
def dense():
    """The adjacency matrix of a TokenGraph, float64."""
    return _dense


@pytest.fixture(scope="session")
def barbell():
    """Two cliques of five joined through node 10, which one heavy edge ties to node 0."""
    edges = [(a + i, a + j, 1.0) for a in (0, 5) for i in range(5) for j in range(i)]
    return _graph_of_edges(11, [*edges, (0, 10, 20.0), (10, 5, 1.0)])


@pytest.fixture(scope="session")
def star():
    """Node 0 tied to each of 40 leaves."""
    return _graph_of_edges(41, [(0, leaf, 1.0) for leaf in range(1, 41)])
