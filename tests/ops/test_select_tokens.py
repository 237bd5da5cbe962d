"""``ckv::select_tokens``: the operator around the policies, which ``tests/policies`` compares with their definitions."""

import pytest
import torch

import ckv_compile.ops  # noqa: F401  (registers the operators)
from ckv_compile.policies.select_tokens import best

select_tokens = torch.ops.ckv.select_tokens
BATCH, KV_HEADS, HEADS, DIM, TOKENS, SINKS, WINDOW = 2, 2, 4, 8, 64, 2, 5


def arguments(policy="oracle", n_indexed=50, length=52, first=(0, 9), budget=20, **state):
    """Of the second of two layers, as graphs call it."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(BATCH, HEADS, 1, DIM, generator=generator)
    cache = torch.randn(BATCH, KV_HEADS, TOKENS, DIM, generator=generator)
    kept = [state.get(name) for name in ("importance", "neighbor", "page_low", "page_high", "last_query")]
    return (
        query, cache[:, :, :1], torch.full((4,), n_indexed, dtype=torch.int32),
        torch.tensor([9, TOKENS, 1, 1], dtype=torch.int32), torch.tensor([length], dtype=torch.int32),
        torch.tensor(first, dtype=torch.int32), torch.zeros(4, dtype=torch.int64), *kept, policy, 1, 0.3, KV_HEADS, budget,
        SINKS, WINDOW, 1,
    )  # fmt: skip


@pytest.mark.parametrize(("n_indexed", "length"), [(0, 52), (50, 52), (50, 60), (10, 40)])
def test_the_length_is_read_from_its_tensor(n_indexed, length):
    tokens, count = select_tokens(*arguments(n_indexed=n_indexed, length=length, budget=30))
    for row, first in enumerate((0, 9)):
        tail = max(first, min(n_indexed, length + 1 - WINDOW))
        low = min(first + SINKS, tail)
        room = 30 - (low - first) - (length + 1 - tail)
        want = max(0, min(room, tail - low))
        assert count[row].tolist() == [want] * KV_HEADS
        listed = tokens[row, :, :want]
        assert bool(((listed >= low) & (listed < tail)).all())
        assert bool((tokens[row, :, want:] == -1).all())


def test_no_key_behind_the_query_is_read():
    call = list(arguments())
    want = select_tokens(*call)
    cache = torch.full((BATCH, KV_HEADS, TOKENS, DIM), torch.nan)
    cache[:, :, :53] = call[1].as_strided((BATCH, KV_HEADS, 53, DIM), call[1].stride())
    call[1] = cache[:, :, :1]
    assert all(map(torch.equal, select_tokens(*call), want))


def test_a_cache_that_is_too_short_raises():
    call = list(arguments())
    call[1] = call[1].clone()
    with pytest.raises(ValueError, match="key must be a view of a buffer"):
        select_tokens(*call)


def test_the_best_are_the_largest_and_of_equals_the_later():
    scores = torch.tensor([[1.0, 3.0, 3.0, torch.nan, -0.0, 0.0, -torch.inf, 3.0]])
    assert best(scores, 2).tolist() == [[2, 7]]
    assert best(scores, 5).tolist() == [[0, 1, 2, 5, 7]]
    assert best(scores, 6).tolist() == [[0, 1, 2, 4, 5, 7]]
    assert best(torch.tensor([5, -7, 2**40, 0]), 2).tolist() == [0, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget": 0}, "budget must be at least 1, got 0"),
        ({"policy": "kmeans"}, r"policy must be one of .*'oracle'.*, got 'kmeans'"),
        ({"first": (0,)}, r"first must be \[2\], one per row"),
    ],
)
def test_invalid_argument_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        select_tokens(*arguments(**change))


@pytest.mark.parametrize("policy", ["oracle", "tokenselect", "h2o"])
def test_opcheck(policy):
    per_token = torch.rand(2, BATCH, KV_HEADS, TOKENS)
    state = {"tokenselect": {"last_query": torch.zeros(2, BATCH, HEADS, DIM)}, "h2o": {"importance": per_token}}
    call = list(arguments(policy, **state.get(policy, {})))
    call[1] = call[1].as_strided((BATCH, KV_HEADS, TOKENS, DIM), call[1].stride())  # opcheck copies what it is given
    torch.library.opcheck(select_tokens.default, tuple(call))
