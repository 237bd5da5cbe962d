import pytest
import torch

import ckv_compile.ops  # noqa: F401
from ckv_compile.testing import attended_positions, nominal_cache, nominal_state, random_cache

approximate_edges = torch.ops.ckv.approximate_edges
CAPACITY = torch.zeros(4, dtype=torch.int32)  # the operator takes the number of the layer as an argument
SINKS, WINDOW, LAYER = 4, 6, 1
GROUPINGS = [((3, 3), 3), ((6, 3), 3), ((8, 2), 2), ((7, 1), 1), ((6, 2), 1), ((6, 2), 6)]


def case(heads=(6, 2), graphs=2, first=(0, 5), n_indexed=(60, 47), length=60, dtype=torch.float32, dim=80):
    torch.manual_seed(0)
    batch = len(first)
    query = torch.randn(batch, heads[0], 1, dim).to(dtype)
    key = random_cache(batch, heads[1], length + 5, dim, list(first), length + 1, dtype)
    tokens = torch.full((batch, graphs, 20), -1, dtype=torch.int32)
    count = torch.zeros(batch, graphs, dtype=torch.int32)
    for row in range(batch):
        low, high = first[row] + SINKS, max(first[row] + SINKS, min(n_indexed[row], length + 1 - WINDOW))
        for graph in range(graphs):
            own = (torch.randperm(high - low) + low)[: 11 + graph % 2]
            tokens[row, graph, : len(own)] = own.int()
            count[row, graph] = len(own)
    state = torch.tensor([[0] * batch, list(n_indexed)], dtype=torch.int32)
    return query, key, tokens, count, state, length, list(first)


def run(query, key, tokens, count, n_indexed, length, first, kappa=4, scale=0.3):
    return approximate_edges(
        query, nominal_cache(key), tokens, count, nominal_state(n_indexed), CAPACITY, torch.tensor([length]),
        torch.tensor(first, dtype=torch.int32), LAYER, scale, SINKS, WINDOW, kappa,
    )  # fmt: skip


def check(query, key, tokens, count, n_indexed, length, first, kappa):
    """Eq. 6 in float64; the denominator holds the attended sinks as well."""
    neighbor, weight = run(query, key, tokens, count, n_indexed, length, first, kappa)
    assert (neighbor.dtype, weight.dtype) == (torch.int32, torch.float32)
    heads = query.shape[1]
    for row in range(query.shape[0]):
        for head in range(heads):
            graph = head // (heads // tokens.shape[1])
            own = tokens[row, graph, : count[row, graph]].tolist()
            parts = attended_positions(own, int(n_indexed[LAYER, row]), length, first[row], SINKS, WINDOW)
            attended = [p for part in parts for p in part]
            keys = key[row, head // (heads // key.shape[1]), attended].double()
            alpha = torch.softmax(keys @ query[row, head, 0].double() * 0.3, 0)
            alpha = {p: float(a) for p, a in zip(attended, alpha, strict=True) if p >= first[row] + SINKS}
            best = sorted(alpha.values(), reverse=True)[:kappa]
            listed = neighbor[row, head].tolist()
            assert listed[len(best) :] == [-1] * (kappa - len(best))
            assert len(set(listed[: len(best)])) == len(best)
            assert weight[row, head].tolist() == pytest.approx(best + [0.0] * (kappa - len(best)), rel=1e-5)
            assert [alpha[p] for p in listed[: len(best)]] == pytest.approx(best, rel=1e-5)


@pytest.mark.parametrize(("heads", "graphs"), GROUPINGS)
@pytest.mark.parametrize("kappa", [1, 8])
def test_edges_are_the_strongest_attended_keys_without_sinks(heads, graphs, kappa):
    check(*case(heads, graphs), kappa)


@pytest.mark.parametrize(
    ("first", "n_indexed", "length"),
    [((0, 0), (0, 0), 60), ((0, 3), (5, 6), 5), ((0, 1), (0, 0), 2), ((0, 5), (60, 0), 63)],
)
def test_short_and_unindexed_rows_list_only_what_they_attend_to(first, n_indexed, length):
    check(*case(first=first, n_indexed=n_indexed, length=length), 8)


def test_row_of_pads_has_no_edges():
    neighbor, weight = run(*case(first=(0, 61), n_indexed=(60, 0)))
    assert neighbor[1].eq(-1).all()
    assert weight[1].eq(0).all()


def test_low_precision_keys_are_scored_in_float32():
    arguments = case(dtype=torch.bfloat16)
    low = run(*arguments)
    exact = run(arguments[0].float(), arguments[1].float(), *arguments[2:])
    assert torch.equal(low[0], exact[0])
    torch.testing.assert_close(low[1], exact[1])


def test_kappa_below_one_raises():
    with pytest.raises(ValueError, match="kappa must be at least 1, got 0"):
        run(*case(), kappa=0)


def test_opcheck():
    query, key, tokens, count, state, length, first = case(dim=8)
    arguments = (CAPACITY, torch.tensor([length]), torch.tensor(first, dtype=torch.int32), LAYER, 0.3, SINKS, WINDOW, 4)
    torch.library.opcheck(approximate_edges.default, (query, key.nan_to_num(), tokens, count, state, *arguments))
