import pytest
import torch

import ckv_compile.ops  # noqa: F401
from ckv_compile.testing import nominal_cache, random_cache

key_neighbors = torch.ops.ckv.key_neighbors


def run(key, first, start, stop, kappa, sinks, join_heads=False):
    first = torch.tensor(first, dtype=torch.int32)
    return key_neighbors(nominal_cache(key), first, start, stop, kappa, sinks, join_heads)


def cosines(key, row, graph, join_heads, i, j):
    heads = range(key.shape[1]) if join_heads else [graph]
    total = 0.0
    for head in heads:
        a, b = key[row, head, i].double(), key[row, head, j].double()
        total += float(a @ b / (a.norm() * b.norm())) if a.norm() > 0 and b.norm() > 0 else 0.0
    return total


@pytest.mark.parametrize("join_heads", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("first", "start", "stop", "kappa", "sinks"),
    [([0], 0, 5, 8, 2), ([0, 9], 10, 37, 3, 4), ([0, 40], 13, 30, 2, 0), ([3], 20, 20, 2, 0), ([0], 4, 5, 2, 0)],
)
def test_neighbours_are_the_nearest_earlier_nodes_of_the_block(first, start, stop, kappa, sinks, join_heads, dtype):
    key = random_cache(len(first), 3, stop + 6, 80, [min(f, stop) for f in first], stop, dtype)
    neighbor = run(key, first, start, stop, kappa, sinks, join_heads)
    assert neighbor.shape == (len(first), 1 if join_heads else 3, stop - start, kappa)
    assert neighbor.dtype == torch.int32
    for row, graph, i in [
        (r, g, i) for r in range(len(first)) for g in range(neighbor.shape[1]) for i in range(stop - start)
    ]:
        listed = neighbor[row, graph, i].tolist()
        earlier = [j for j in range(i) if start + j >= first[row] + sinks]
        if start + i < first[row] + sinks:
            earlier = []
        expected = min(kappa, len(earlier))
        assert listed[expected:] == [-1] * (kappa - expected)
        assert len(set(listed[:expected])) == expected
        assert set(listed[:expected]) <= set(earlier)
        similarity = {j: cosines(key, row, graph, join_heads, start + i, start + j) for j in earlier}
        best = sorted(similarity.values(), reverse=True)[:expected]
        assert [similarity[j] for j in listed[:expected]] == pytest.approx(best, abs=2e-6)


@pytest.mark.parametrize("join_heads", [False, True])
def test_zero_keys_have_finite_similarity(join_heads):
    key = torch.zeros(1, 2, 40, 8)
    key[:, :, 30:] = torch.randn(1, 2, 10, 8)
    neighbor = run(key, [0], 0, 40, 3, 0, join_heads)
    assert neighbor[:, :, 3:].ge(0).all()
    assert neighbor[:, :, 0].eq(-1).all()


def test_lists_of_a_long_block_repeat():
    key = random_cache(1, 2, 700, 16, [0], 700)
    key[:, :, 100:400] = key[:, :, 100:101]  # ties
    once = run(key, [0], 0, 700, 8, 10)
    assert torch.equal(once, run(key, [0], 0, 700, 8, 10))
    assert once[:, :, 18:].ge(10).all()
    assert (once < torch.arange(700, dtype=torch.int32)[:, None]).all()


@pytest.mark.parametrize("join_heads", [False, True])
def test_blocks_are_looked_at_each_for_itself(join_heads):
    key = random_cache(2, 3, 100, 16, [0, 45], 93)
    first = torch.tensor([0, 45], dtype=torch.int32)
    together = key_neighbors(nominal_cache(key), first, 10, 93, 4, 2, join_heads, 30)
    parts = [run(key, [0, 45], begin, end, 4, 2, join_heads) for begin, end in ((10, 40), (40, 70), (70, 93))]
    assert torch.equal(together, torch.cat(parts, dim=2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"start": -1}, "start must be at least 0, got -1"),
        ({"stop": 3}, r"stop must be at least start \(4\), got 3"),
        ({"kappa": 0}, "kappa must be at least 1, got 0"),
        ({"block_size": -1}, "block_size must be at least 0, got -1"),
        ({"stop": 99}, "key must be a view of a buffer"),
        ({"first": torch.tensor([0, 0])}, r"first must be \[1\]"),
    ],
)
def test_invalid_argument_is_named(change, message):
    arguments = {
        "key": torch.randn(1, 2, 10, 8), "first": torch.tensor([0]), "start": 4, "stop": 8, "kappa": 2,
        "num_sink_tokens": 0, "join_heads": False,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        key_neighbors(**{**arguments, **change})


@pytest.mark.parametrize("block_size", [0, 4])
@pytest.mark.parametrize("join_heads", [False, True])
def test_opcheck(join_heads, block_size):
    arguments = (torch.randn(2, 2, 12, 8), torch.tensor([0, 3], dtype=torch.int32), 2, 11, 3, 2, join_heads, block_size)
    torch.library.opcheck(key_neighbors.default, arguments)
