import io
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

from ckv_compile.community import engines
from ckv_compile.community.engine_process import partition_edges, read_frame, write_frame
from ckv_compile.community.engines import edge_list, partition_graph
from ckv_compile.community.graph import TokenGraph, attention_graph
from ckv_compile.community.leiden import is_connected, modularity
from ckv_compile.errors import PartitionError


@pytest.fixture(scope="module")
def graph(planted_lists):
    return attention_graph(*planted_lists(600, 30, 0.8, 0), lam=0.5, prune=0.0)


@pytest.fixture(scope="module", autouse=True)
def _end_processes():
    yield
    engines.shut_down_engines()


def test_edge_list_has_every_edge_once(graph):
    edges, weights = edge_list(graph)
    assert edges.shape == (graph.num_edges, 2)
    assert len(np.unique(edges, axis=0)) == graph.num_edges
    assert (edges[:, 0] < edges[:, 1]).all()
    assert weights.sum(dtype=np.float64) * 2 == pytest.approx(graph.strength.sum())


@pytest.mark.parametrize("engine", ["native", "igraph", "leidenalg"])
def test_every_engine_finds_the_same_quality(engine, graph):
    labels = partition_graph(graph, engine=engine, gamma=8.0, passes=2, seed=1)
    assert labels.dtype == np.int32
    assert labels.shape == (600,)
    assert is_connected(graph, labels)
    best = modularity(graph, partition_graph(graph, engine="native", gamma=8.0, passes=6), 8.0)
    assert modularity(graph, labels, 8.0) == pytest.approx(best, rel=0.01)


@pytest.mark.parametrize("engine", ["native", "igraph", "leidenalg"])
def test_same_seed_gives_same_labels(engine, graph):
    one, two = (partition_graph(graph, engine=engine, gamma=8.0, passes=2, seed=5) for _ in range(2))
    np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("engine", ["native", "igraph", "leidenalg"])
def test_size_limit_and_warm_start_hold_for_every_engine(engine, graph):
    initial = np.arange(600) // 60
    initial[500:] = -1
    labels = partition_graph(graph, engine=engine, gamma=1.0, initial=initial, max_community_size=12)
    assert np.bincount(labels).max() <= 12
    assert is_connected(graph, labels)


@pytest.mark.parametrize("engine", ["native", "igraph", "leidenalg"])
@pytest.mark.parametrize("n", [0, 1, 4])
def test_graphs_without_an_edge_give_a_label_to_every_node(engine, n):
    empty = TokenGraph(np.zeros(n + 1, np.int64), np.empty(0, np.int32), np.empty(0, np.float32), np.zeros(n))
    np.testing.assert_array_equal(partition_graph(empty, engine=engine, gamma=1.0), np.arange(n))


@pytest.mark.parametrize("engine", ["igraph", "leidenalg"])
def test_isolated_nodes_at_the_end_get_labels(engine, graph_of_edges):
    labels = partition_graph(graph_of_edges(7, [(0, 1, 1.0), (1, 2, 1.0)]), engine=engine, gamma=0.5)
    np.testing.assert_array_equal(labels, [0, 0, 0, 1, 2, 3, 4])


def test_an_error_of_a_library_becomes_a_partition_error_and_the_process_lives_on(graph):
    bad = TokenGraph(graph.indptr, graph.indices, np.full_like(graph.weights, np.nan), graph.strength)
    with pytest.raises(PartitionError, match="leidenalg failed: BaseException"):
        partition_graph(bad, engine="leidenalg", gamma=1.0)
    before = len(engines._idle)
    assert before >= 1
    partition_graph(graph, engine="leidenalg", gamma=1.0)
    assert len(engines._idle) == before


@pytest.mark.parametrize("passes", [0, -1])
@pytest.mark.parametrize("engine", ["native", "igraph", "leidenalg"])
def test_counts_of_passes_must_be_positive(engine, passes, graph):
    with pytest.raises(ValueError, match="passes must be at least 1"):
        partition_graph(graph, engine=engine, gamma=1.0, passes=passes)
    if engine != "native":
        with pytest.raises(ValueError, match="passes must be at least 1"):
            partition_edges(engine, 600, *edge_list(graph), 1.0, passes, None, 0)


def test_unknown_engine_is_named_with_the_known_ones(graph):
    with pytest.raises(ValueError, match="'native', 'igraph', 'leidenalg', got 'louvain'"):
        partition_graph(graph, engine="louvain", gamma=1.0)


def test_a_late_engine_is_killed_and_the_next_call_works(planted_lists):
    slow = attention_graph(*planted_lists(20000, 50, 0.3, 1), lam=0.5, prune=0.0)
    began = time.monotonic()
    with pytest.raises(PartitionError, match=r"leidenalg took longer than 0.3 s"):
        partition_graph(slow, engine="leidenalg", gamma=50.0, timeout=0.3)
    assert time.monotonic() - began < 5
    assert len(partition_graph(slow, engine="native", gamma=50.0)) == 20000


def test_a_raised_stop_flag_ends_an_engine_process(planted_lists):
    slow = attention_graph(*planted_lists(20000, 50, 0.3, 1), lam=0.5, prune=0.0)
    stop = np.zeros(1, np.int32)
    threading.Timer(0.3, stop.__setitem__, (0, 1)).start()
    with pytest.raises(PartitionError, match="was stopped"):
        partition_graph(slow, engine="leidenalg", gamma=50.0, stop=stop)


def test_a_process_that_died_is_reported_and_replaced(graph):
    engines.shut_down_engines()
    partition_graph(graph, engine="igraph", gamma=1.0)
    (process,) = engines._idle
    process._process.kill()
    process._process.wait()
    assert len(partition_graph(graph, engine="igraph", gamma=1.0)) == 600


def test_frames_survive_a_round_trip_and_a_cut_stream_ends():
    stream = io.BytesIO()
    write_frame(stream, {"labels": np.arange(5)})
    stream.seek(0)
    np.testing.assert_array_equal(read_frame(stream)["labels"], np.arange(5))
    with pytest.raises(EOFError):
        read_frame(stream)
    with pytest.raises(EOFError):
        read_frame(io.BytesIO(stream.getvalue()[:-1]))


UNGUARDED = """
import numpy as np
from ckv_compile.community.engines import partition_graph
from ckv_compile.community.graph import key_graph
print("main runs")
graph = key_graph(np.array([[-1], [0], [0], [2]], np.int32))
print(partition_graph(graph, engine="igraph", gamma=0.1).tolist())
"""


@pytest.mark.parametrize("way", ["script", "command"])
def test_engine_processes_never_run_an_unguarded_main_module_again(way, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(UNGUARDED))
    command = [sys.executable, str(script)] if way == "script" else [sys.executable, "-c", UNGUARDED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=True)
    assert done.stdout.splitlines() == ["main runs", "[0, 0, 0, 0]"]
