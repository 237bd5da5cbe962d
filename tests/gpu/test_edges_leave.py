"""Edges leave a GPU beside the prefill: graphs built there are those of the host, and nobody waits for them."""

import numpy as np
import pytest
import torch

import ckv_compile.ops  # noqa: F401
from ckv_compile.community.graph import attention_graph, graph_of_joint_csr, mixed_graph
from ckv_compile.config import CommunityConfig
from ckv_compile.errors import CaptureError
from ckv_compile.runtime.device_graph import TERMS_AT_ONCE, build_graphs
from ckv_compile.runtime.outbox import outbox_of
from ckv_compile.runtime.transfer import Arriving
from ckv_compile.testing import assert_consistent_index, bare_sequence

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FIRST, GRAPHS = [4, 300], 2


def lists(batch, heads, n, kappa=8, seed=0):
    """Causal lists, mostly of near keys, with empty slots and repeats."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shape, options = (batch, heads, n, kappa), {"generator": generator, "device": "cuda"}
    own = torch.arange(n, device="cuda")[:, None]
    near = own - torch.randint(0, 40, shape, **options)
    far = (torch.rand(shape, **options) * (own + 1)).long()
    ids = torch.where(torch.rand(shape, **options) < 0.7, near, far).clamp_(min=-1).int()
    return ids, torch.rand(shape, **options).pow(4) / kappa


def keys_of(batch, graphs, n, kappa=8):
    generator = torch.Generator("cuda").manual_seed(1)
    own = torch.arange(n, device="cuda")[:, None]
    return (torch.rand(batch, graphs, n, kappa, generator=generator, device="cuda") * own).int() - (own < 2).int()


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("terms", [TERMS_AT_ONCE, 50_000])
def test_graphs_are_those_of_the_host_and_equal_bits_at_every_run(mixed, terms):
    neighbor, weight = lists(2, 4, 2000)
    keys = keys_of(2, GRAPHS, 2000) if mixed else None
    runs = []
    for _ in range(3):
        options = {"graphs": GRAPHS, "lam": 0.5, "prune": 0.03, "key_neighbor": keys, "terms_at_once": terms}
        runs.append([part.tensors() for part in build_graphs(neighbor, weight, FIRST, **options)])
        assert all(map(torch.equal, sum(runs[0], ()), sum(runs[-1], ())))
    nodes, found = np.repeat(FIRST, GRAPHS).tolist(), []
    for part in runs[0]:
        arrays = [tensor.cpu().numpy() for tensor in part]
        found += [graph_of_joint_csr(*arrays, number, nodes[len(found) + number]) for number in range(len(arrays[3]))]
    ids, alphas = neighbor.cpu().numpy(), weight.cpu().numpy()
    for (row, graph), ours in zip(np.ndindex(2, GRAPHS), found, strict=True):
        here, options = (row, slice(2 * graph, 2 * graph + 2)), {"lam": 0.5, "prune": 0.03, "first": FIRST[row]}
        if mixed:
            theirs = mixed_graph(ids[here], alphas[here], keys[row, graph].cpu().numpy(), **options)
        else:
            theirs = attention_graph(ids[here], alphas[here], **options)
        assert np.array_equal(ours.indptr, theirs.indptr)
        rows = np.repeat(np.arange(theirs.num_nodes), np.diff(theirs.indptr))
        order = np.lexsort((theirs.indices, rows))
        assert np.array_equal(ours.indices, theirs.indices[order])
        np.testing.assert_allclose(ours.weights, theirs.weights[order], rtol=1e-6, atol=1e-15)


def test_memory_of_a_long_layer_is_bounded():
    neighbor, weight = lists(1, 8, 65_536)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for part in build_graphs(neighbor, weight, [10], graphs=2, lam=0.5, prune=0.03):
        del part
    assert torch.cuda.max_memory_allocated() - before < 2 << 30


@pytest.mark.parametrize("graph", ["keys", "attention", "mixed"])
def test_a_prefill_hands_over_and_publishes_without_waiting_and_its_memory_may_be_reused(graph):
    config = CommunityConfig(
        graph=graph, min_context=0, workers=2, num_sink_tokens=4, kappa=8, block_size=512, append_block=256
    )
    cache = torch.randn(2, 2, 2, 3000, 64, device="cuda")
    sequence = bare_sequence(config, 3000, batch=2, keys=cache)
    edges = (None, None) if graph == "keys" else lists(2, 4, 2500)
    given = [None if one is None else one.clone() for one in edges]
    for warm in (True, False):  # kernels are compiled and loaded at the first time
        sequence.restart([0, 30])
        torch.cuda.synchronize()
        # What follows cannot have run when the host comes back. (Sync debug mode would also see the outbox's thread.)
        torch.cuda._sleep(10 if warm else 2_000_000_000)
        slept = torch.cuda.Event()
        slept.record()
        for layer in range(2):
            sequence.offer(layer, sequence.keys(layer), 0, 2500, *given)
        if graph != "keys" and not warm:
            given[0].fill_(-7)  # as a graph that goes on may do with its memory
            given[1].fill_(torch.nan)
        sequence.prefilled(2500)
        assert warm or not slept.query()
        sequence.wait()
        torch.cuda._sleep(10 if warm else 2_000_000_000)
        slept.record()
        sequence.publish()
        assert warm or not slept.query()
    assert not sequence.statistics.failures
    assert_consistent_index(sequence)
    if graph != "keys":
        piece = sequence.edges[1].pieces[0].arrays()
        assert np.array_equal(piece.neighbor, edges[0].cpu().numpy())
        assert np.array_equal(piece.weight, edges[1].cpu().numpy())


def test_arrays_larger_than_the_ring_arrive_whole():
    tensor = torch.randint(0, 1 << 30, (50_000_003,), dtype=torch.int32, device="cuda")
    expected = tensor.clone()
    arriving = Arriving(tensor)
    del tensor
    torch.full((50_000_003,), -1, dtype=torch.int32, device="cuda")  # may not land in its memory before it has left
    assert np.array_equal(arriving.array(), expected.cpu().numpy())


def test_nothing_leaves_during_a_capture():
    tensor = torch.ones(4, device="cuda")
    outbox_of(tensor.device).send([tensor]).arrays()
    torch.cuda.synchronize()
    with pytest.raises(CaptureError, match="cannot be captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        Arriving(tensor)
