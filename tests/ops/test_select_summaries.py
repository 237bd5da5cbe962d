import pytest
import torch

import ckv_compile.ops  # noqa: F401
from ckv_compile.testing import nominal_state, random_index

ckv = torch.ops.ckv
SINKS, WINDOW, LAYER = 4, 6, 1


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def make(first=(0, 5), n_indexed=(60, 47), graphs=2, communities=12, seed=0, scores=None):
    index = random_index(
        len(first),
        graphs,
        8,
        list(first),
        list(n_indexed),
        communities,
        num_sink_tokens=SINKS,
        log_entries=7,
        seed=seed,
    )
    generator = torch.Generator().manual_seed(seed)
    index.scores[..., :communities] = torch.randn(len(first), graphs, communities, generator=generator)
    if scores is not None:
        index.scores[..., :communities] = torch.as_tensor(scores)
    return index, int32(*first)


def arguments(index, first, length, budget, reserved):
    names = ("scores", "size", "num_communities", "n_indexed")
    batch, graphs = index.num_communities.shape[1:]
    return (
        *(index.nominal(name) for name in names), index.capacity, int32(length), first, index.nominal("tally"), LAYER,
        batch, graphs, budget, reserved, SINKS, WINDOW,
    )  # fmt: skip


def expected(index, row, graph, length, first, budget, reserved):
    """From the definition: the communities in order of (score, id) that follow those which are retrieved."""
    at, begin = (LAYER, row, graph), int(first[row])
    tail_start = max(begin, min(int(index.n_indexed[LAYER, row]), length + 1 - WINDOW))
    sink_end = min(begin + SINKS, tail_start)
    mandatory = sink_end - begin + length + 1 - tail_start
    if tail_start == sink_end or budget >= length + 1 - begin:
        return []
    scores, sizes = index.scores[row, graph].tolist(), index.size[at].tolist()
    known = range(min(int(index.num_communities[at]), int(index.capacity[0])))
    order = sorted((c for c in known if sizes[c] > 0 and scores[c] > -torch.inf), key=lambda c: (scores[c], c))[::-1]
    room, taken = budget - reserved - mandatory, 0
    while taken < len(order) and sum(sizes[c] for c in order[: taken + 1]) <= room:
        taken += 1
    taken = max(taken, int(room > 0))
    return sorted(order[taken : taken + min(reserved, max(0, budget - mandatory))])


def check(index, first, length=62, budget=30, reserved=4):
    before = index.tally.clone()
    ids = ckv.select_summaries(*arguments(index, first, length, budget, reserved))
    assert ids.dtype == torch.int32
    found = [[[c for c in graph if c >= 0] for graph in row] for row in ids.tolist()]
    want = [
        [expected(index, row, graph, length, first, budget, reserved) for graph in range(ids.shape[1])]
        for row in range(ids.shape[0])
    ]
    assert found == want
    for graph in ids.flatten(0, 1).tolist():
        listed = [c for c in graph if c >= 0]
        assert graph == listed + [-1] * (reserved - len(listed)), "none stand last"
    grown = index.tally - before
    assert grown.tolist() == [[0, 0], [sum(len(graph) for row in want for graph in row), 0]]
    return want


@pytest.mark.parametrize("reserved", [1, 4, 9])
@pytest.mark.parametrize("budget", [18, 25, 40])
def test_the_best_communities_that_are_not_retrieved_are_listed(budget, reserved):
    for seed in range(3):
        want = check(*make(seed=seed), budget=budget, reserved=min(reserved, budget - SINKS - WINDOW - 1))
        assert any(graph for row in want for graph in row)


def test_no_retrieved_token_is_of_a_listed_community():
    index, first = make(n_indexed=(60, 60))
    index.log_first[:] = 53
    budget, reserved, length = 30, 4, 62
    names = (
        "scores", "start", "stored", "size", "member", "log_community", "log_first", "num_communities", "n_indexed",
    )  # fmt: skip
    shortlist = torch.zeros(2, 2, 5, 64, dtype=torch.int32), torch.full((2, 2, 64), torch.inf)
    tokens, count = ckv.retrieve(
        *shortlist, *(index.nominal(name) for name in names), index.capacity, int32(length), first,
        index.nominal("tally"), LAYER, 2, 2, budget, SINKS, WINDOW, True, 1, reserved,
    )  # fmt: skip
    ids = ckv.select_summaries(*arguments(index, first, length, budget, reserved))
    for row in range(2):
        for graph in range(2):
            used = int(count[row, graph])
            assert 0 < used <= budget - reserved - SINKS - WINDOW
            labels = index.label[LAYER, row, graph][tokens[row, graph, :used].long()]
            assert not set(labels.tolist()) & set(ids[row, graph].tolist())


@pytest.mark.parametrize("levels", [1, 3])
def test_equal_scores_fall_to_the_larger_id(levels):
    scores = torch.randint(levels, (2, 2, 12), generator=torch.Generator().manual_seed(0)) - 1.0
    scores[..., ::2] *= -1 if levels > 1 else 1  # -0.0 is 0.0
    check(*make(scores=scores))


def test_nan_infinite_and_empty_communities():
    index, first = make()
    index.scores[..., :6] = torch.tensor([torch.nan, -torch.inf, torch.inf, torch.inf, 2.0, 1.0])
    index.size[..., 4:6] = 0
    check(index, first)
    index.scores.fill_(-torch.inf)
    assert check(index, first) == [[[], []], [[], []]]


def test_the_best_community_counts_as_retrieved_where_it_does_not_fit():
    index, first = make(communities=3)
    (row, _) = check(index, first, budget=16, reserved=4)
    best = index.scores[0, 0, :3].argmax()
    assert best not in row[0]
    assert len(row[0]) == 2


def test_fewer_are_listed_where_fewer_are_left():
    want = check(*make(communities=5), budget=40, reserved=20)
    assert all(0 < len(graph) < 5 for graph in want[0])
    assert want[1] == [list(range(5))] * 2  # sinks and tail leave no room to retrieve any


def test_the_budget_of_the_tail_is_not_exceeded():
    index, first = make()
    want = check(index, first, length=70, budget=17, reserved=4)  # of row 0, sinks and tail take 15
    assert [len(graph) for graph in want[0]] == [2, 2]
    assert [len(graph) for graph in want[1]] == [0, 0]


@pytest.mark.parametrize(("length", "budget"), [(62, 63), (62, 200)])
def test_a_context_within_the_budget_has_none(length, budget):
    index, first = make(first=(0, 0), n_indexed=(60, 60))
    assert check(index, first, length, budget) == [[[], []], [[], []]]


def test_rows_without_an_index_have_none():
    index, first = make()
    index.n_indexed[:, 1] = 0
    index.num_communities[:, 1] = 0
    want = check(index, first)
    assert want[0][0]
    assert want[1] == [[], []]


def test_operator_contract():
    index, first = make()
    state, rest = (index.scores, index.size, index.num_communities, index.n_indexed), arguments(index, first, 62, 30, 4)
    torch.library.opcheck(ckv.select_summaries.default, (*state, *rest[4:7], index.tally, *rest[8:]))


def test_wrong_arguments_are_refused():
    index, first = make()
    good = arguments(index, first, 62, 30, 4)
    for place, bad, message in (
        (0, nominal_state(index.scores.double()), "scores must be float32"),
        (12, 0, "reserved must be at least 1"),
        (11, 3, "budget must be at least 4"),
    ):
        with pytest.raises(ValueError, match=message):
            ckv.select_summaries(*good[:place], bad, *good[place + 1 :])
