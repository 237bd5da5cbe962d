"""The kernels that build token graphs give the bits of their torch form."""

import numpy as np
import pytest
import torch

from ckv_compile.kernels import token_graph
from ckv_compile.runtime.device_graph import build_graphs


def random_lists(seed, batch, heads, n, kappa, graphs=1):
    """Lists with hubs, empty slots, entries that repeat, self-loops and unusable weights."""
    rng = np.random.default_rng(seed)
    shape = batch, heads, n, kappa
    near = np.arange(n)[:, None] - rng.integers(0, 12, shape)
    ids = np.where(rng.random(shape) < 0.6, near, rng.integers(-3, n + 3, shape))
    ids = np.where(rng.random(shape) < 0.2, rng.integers(5, 8, shape), ids)
    ids = np.where(rng.random(shape) < 0.15, np.arange(n)[:, None], ids)
    weights = rng.random(shape, np.float32) ** 4 / kappa
    bad = rng.choice(np.array([np.nan, np.inf, -np.inf, -1.0, 0.0, -0.0], np.float32), shape)
    weights = np.where(rng.random(shape) < 0.05, bad, weights)
    keys = rng.integers(-1, n, (batch, graphs, n, kappa))
    return [torch.from_numpy(one) for one in (ids.astype(np.int32), weights.astype(np.float32), keys.astype(np.int32))]


def check(device, neighbor, weight, first, graphs, *, lam=0.5, prune=0.03, **options):
    """Equal bits, however the work is divided; returns what was built."""
    neighbor, weight = neighbor.to(device), weight.to(device)
    found = []
    for kernels, terms in ((False, 1 << 22), (True, 1 << 22), (True, 1))[: 3 if device == "cuda" else 2]:
        parts = build_graphs(
            neighbor, weight, first, graphs=graphs, lam=lam, prune=prune, kernels=kernels, terms_at_once=terms, **options
        )  # fmt: skip
        parts = [part.tensors() for part in parts]
        found.append([torch.cat([part[place] for part in parts]) for place in range(1, 5)])
        found[-1].append(torch.cat([part[0].diff() for part in parts]))
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert one.dtype == two.dtype
            assert torch.equal(one, two)
    return found[0]


@pytest.mark.parametrize(
    ("batch", "heads", "graphs", "n", "kappa", "first", "options"),
    [
        (1, 4, 2, 60, 8, [4], {}),
        (2, 3, 3, 40, 5, [4, 30], {"lam": 1.0}),
        (2, 2, 1, 40, 3, [0, 40], {"lam": 0.0, "prune": 0.3}),
        (1, 2, 1, 50, 1, [2], {"prune": 0.0}),
        (1, 2, 1, 1, 8, [0], {}),
    ],
)
def test_graphs_have_the_bits_of_the_torch_form(device, batch, heads, graphs, n, kappa, first, options):
    check(device, *random_lists(n, batch, heads, n, kappa)[:2], first, graphs, **options)


def test_graphs_one_at_a_time_have_the_same_bits(device):
    neighbor, weight, _ = (one.to(device) for one in random_lists(3, 1, 4, 20, 2))
    together, alone = (
        list(build_graphs(neighbor, weight, [2], graphs=4, lam=0.5, prune=0.03, kernels=True, terms_at_once=terms))
        for terms in (1 << 22, 1)
    )
    assert (len(together), len(alone)) == (1, 4)
    for place in range(1, 5):
        assert torch.equal(together[0].tensors()[place], torch.cat([one.tensors()[place] for one in alone]))


def test_mixed_graphs_have_the_bits_of_the_torch_form(device):
    neighbor, weight, keys = random_lists(0, 1, 4, 40, 4, 2)
    check(device, neighbor, weight, [3], 2, key_neighbor=keys.to(device))


@pytest.mark.parametrize(
    "row_terms", [pytest.param((1,), marks=pytest.mark.slow), (32,), pytest.param((16, 64), marks=pytest.mark.slow)]
)
def test_hubs_are_added_up_in_dense_memory(monkeypatch, device, row_terms):
    neighbor, weight, _ = random_lists(1, 1, 2, 40, 4)
    monkeypatch.setattr(token_graph, "HUB_BYTES", 3000)
    monkeypatch.setattr(token_graph.joint_csr, "__defaults__", (row_terms,))
    check(device, neighbor, weight, [3], 1)


def test_sums_beyond_float32_are_dropped_and_counted(device):
    lists = torch.tensor([[[[-1, -1], [-1, -1], [0, 1]]]], dtype=torch.int32), torch.full((1, 1, 3, 2), 3e38)
    assert check(device, *lists, [0], 1, lam=0.0)[2].tolist() == [1]


@pytest.mark.slow
def test_wide_keys_where_a_row_and_its_terms_need_more_than_32_bits():
    constants = token_graph.row_constants
    assert not constants(131_072, 4, 8, 512)["WIDE"]
    assert constants(1 << 23, 4, 8, 512)["WIDE"]


def test_what_the_kernels_do_not_do_is_left_to_torch():
    assert token_graph.applies(131_072, 4, 8)
    assert not token_graph.applies(131_072, 4, 33)
    assert not token_graph.applies(1 << 24, 32, 8)
    assert not token_graph.applies(0, 1, 8)
