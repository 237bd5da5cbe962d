import pytest
import torch

import ckv_compile.ops  # noqa: F401
from ckv_compile.testing import attended_positions, nominal_cache, nominal_state, random_cache

key_edges = torch.ops.ckv.key_edges
CAPACITY = torch.zeros(4, dtype=torch.int32)  # the operator takes the number of the layer as an argument
SINKS, WINDOW, LAYER = 4, 6, 1


def case(heads=2, graphs=2, first=(0, 5), n_indexed=(60, 47), length=60, dim=80):
    torch.manual_seed(0)
    batch = len(first)
    key = random_cache(batch, heads, length + 5, dim, list(first), length + 1)
    tokens = torch.full((batch, graphs, 20), -1, dtype=torch.int32)
    count = torch.zeros(batch, graphs, dtype=torch.int32)
    for row in range(batch):
        low, high = first[row] + SINKS, max(first[row] + SINKS, min(n_indexed[row], length + 1 - WINDOW))
        for graph in range(graphs):
            own = (torch.randperm(high - low) + low)[: 11 + graph % 2]
            tokens[row, graph, : len(own)] = own.int()
            count[row, graph] = len(own)
    state = torch.tensor([[0] * batch, list(n_indexed)], dtype=torch.int32)
    return key, tokens, count, state, length, list(first)


def run(key, tokens, count, n_indexed, length, first, kappa=4):
    return key_edges(
        nominal_cache(key), tokens, count, nominal_state(n_indexed), CAPACITY, torch.tensor([length]),
        torch.tensor(first, dtype=torch.int32), LAYER, SINKS, WINDOW, kappa, tokens.shape[1],
    )  # fmt: skip


def check(key, tokens, count, n_indexed, length, first, kappa):
    neighbor, weight = run(key, tokens, count, n_indexed, length, first, kappa)
    assert torch.equal(weight, (neighbor >= 0).float())
    for row in range(key.shape[0]):
        for graph in range(tokens.shape[1]):
            own = tokens[row, graph, : count[row, graph]].tolist()
            parts = attended_positions(own, int(n_indexed[LAYER, row]), length, first[row], SINKS, WINDOW)
            candidates = [p for part in parts for p in part if first[row] + SINKS <= p < length]
            heads = range(key.shape[1]) if tokens.shape[1] < key.shape[1] else [graph]
            new = key[row, :, length].double()
            cosine = {
                p: sum(float(torch.cosine_similarity(new[h], key[row, h, p].double(), dim=0)) for h in heads)
                for p in candidates
            }
            best = sorted(cosine.values(), reverse=True)[:kappa]
            listed = neighbor[row, graph].tolist()
            assert listed[len(best) :] == [-1] * (kappa - len(best))
            assert len(set(listed[: len(best)])) == len(best)
            assert [cosine[p] for p in listed[: len(best)]] == pytest.approx(best, abs=1e-6)


@pytest.mark.parametrize(("heads", "graphs"), [(3, 3), (3, 1), (1, 1)])
@pytest.mark.parametrize("kappa", [1, 8])
def test_edges_are_the_nearest_attended_keys_without_sinks_and_itself(heads, graphs, kappa):
    check(*case(heads, graphs), kappa)


@pytest.mark.parametrize(
    ("first", "n_indexed", "length"),
    [((0, 0), (0, 0), 60), ((0, 3), (5, 6), 5), ((0, 1), (0, 0), 2), ((0, 61), (60, 0), 60)],
)
def test_short_and_unindexed_rows_list_only_what_they_attend_to(first, n_indexed, length):
    check(*case(first=first, n_indexed=n_indexed, length=length), 8)


def test_zero_keys_have_finite_similarity():
    arguments = case(first=(0, 0))
    arguments[0][:, :, :61] = 0
    neighbor, _ = run(*arguments)
    assert neighbor.ge(SINKS).all()
    assert neighbor.lt(60).all()


def test_graphs_per_query_head_raise():
    with pytest.raises(ValueError, match="num_graphs must be 1 or the 2 KV heads, got 6"):
        run(*case(graphs=6))


def test_opcheck():
    key, tokens, count, state, length, first = case(dim=8)
    arguments = (CAPACITY, torch.tensor([length]), torch.tensor(first, dtype=torch.int32), LAYER, SINKS, WINDOW, 4, 2)
    torch.library.opcheck(key_edges.default, (key.nan_to_num(), tokens, count, state, *arguments))
