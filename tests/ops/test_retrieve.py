import pytest
import torch

import ckv_compile.ops  # noqa: F401
from ckv_compile.index_layout import PROGRAMS
from ckv_compile.testing import GARBAGE, attended_positions, nominal_state, random_index

retrieve = torch.ops.ckv.retrieve
SINKS, WINDOW = 4, 6
STATE = (
    "scores", "start", "stored", "size", "member", "log_community", "log_first", "num_communities", "n_indexed",
)  # fmt: skip


def empty_shortlist(batch, graphs, slots=PROGRAMS):
    """A shortlist without entries, which left everything out."""
    left_out = torch.full((batch, graphs, PROGRAMS), torch.inf)
    return torch.zeros(batch, graphs, 5, slots, dtype=torch.int32), left_out


def run(index, length, first, budget, layer=1, sinks=SINKS, window=WINDOW, has_log=True, num_new=1):
    batch, graphs = index.num_communities.shape[1:]
    return retrieve(
        *empty_shortlist(batch, graphs), *(index.nominal(name) for name in STATE), index.capacity,
        torch.tensor([length], dtype=torch.int32), torch.tensor(first, dtype=torch.int32), index.nominal("tally"),
        layer, batch, graphs, budget, sinks, window, has_log, num_new,
    )  # fmt: skip


def oracle(index, length, first, budget, row, graph, layer=1, sinks=SINKS, window=WINDOW, has_log=True, num_new=1):
    """The definition: communities by score, whole ones while they fit, or the newest of the best."""
    at = (layer, row, graph)
    covered = int(index.n_indexed[layer, row])
    sink_list, _, tail = attended_positions([], covered, length, first[row], sinks, window, num_new)
    context = length + num_new - first[row]
    room = context if budget >= context else budget - len(sink_list) - len(tail)
    scores, sizes = index.scores[row, graph].tolist(), index.size[at].tolist()
    ids = [c for c in range(int(index.num_communities[at])) if scores[c] > -torch.inf and sizes[c] > 0]
    ids.sort(key=lambda c: (-scores[c], -c))

    def members(c):
        begin, stored = int(index.start[at][c]), int(index.stored[at][c])
        own = index.member[at][begin : begin + stored].tolist()
        log_first = int(index.log_first[layer, row])
        if has_log:
            own += [log_first + e for e in range(covered - log_first) if index.log_community[at][e] == c]
        return sorted(own)

    if room <= 0 or not ids or len(sink_list) + len(tail) == context:
        return []
    if sizes[ids[0]] > room:
        return members(ids[0])[-room:]
    chosen, total = [], 0
    for c in ids:
        total += sizes[c]
        if total > room:
            break
        chosen += members(c)
    return sorted(chosen)


def check(index, length, first, budget, layer=1, **options):
    tally = index.tally.clone()
    tokens, count = run(index, length, first, budget, layer, **options)
    assert tokens.dtype == count.dtype == torch.int32
    attended = context = 0
    num_new = options.get("num_new", 1)
    for row in range(tokens.shape[0]):
        for graph in range(tokens.shape[1]):
            want = oracle(index, length, first, budget, row, graph, layer, **options)
            assert tokens[row, graph].tolist() == want + [-1] * (budget - len(want))
            assert count[row, graph] == len(want)
            sinks, _, tail = attended_positions(
                [], int(index.n_indexed[layer, row]), length, first[row],
                options.get("sinks", SINKS), options.get("window", WINDOW), num_new,
            )  # fmt: skip
            attended += min(len(want) + len(sinks) + len(tail), length + num_new - first[row])
            context += length + num_new - first[row]
    tally[layer] += torch.tensor([attended, context])
    assert torch.equal(index.tally, tally)
    return tokens, count


def case(first=(0, 5), n_indexed=(60, 47), communities=12, log_entries=7, graphs=3, seed=0, sinks=SINKS):
    index = random_index(
        len(first), graphs, 8, list(first), list(n_indexed), communities, num_sink_tokens=sinks,
        log_entries=log_entries, seed=seed,
    )  # fmt: skip
    index.scores[..., :communities] = torch.randn(
        len(first), graphs, communities, generator=torch.Generator().manual_seed(seed)
    )
    return index, list(first)


@pytest.mark.parametrize("budget", [1, 9, 11, 14, 20, 33, 64, 200])
@pytest.mark.parametrize(("length", "log_entries"), [(60, 0), (63, 7), (90, 7)])
def test_best_whole_communities_that_fit_are_listed(budget, length, log_entries):
    for seed in range(3):
        index, first = case(log_entries=log_entries, seed=seed)
        check(index, length, first, budget)


@pytest.mark.parametrize("num_new", [2, 5, 8])
@pytest.mark.parametrize("budget", [9, 20, 33, 66, 67, 200])
def test_several_new_tokens_count_in_tail_and_context(budget, num_new):
    for length, log_entries in ((60, 0), (63, 7)):
        index, first = case(log_entries=log_entries)
        check(index, length, first, budget, num_new=num_new)


@pytest.mark.parametrize(("sinks", "window"), [(0, 1), (0, 100), (20, 1), (70, 3)])
def test_sinks_and_window_may_have_any_size(sinks, window):
    index, first = case(sinks=min(sinks, 20))
    check(index, 62, first, 40, sinks=sinks, window=window)


def test_community_larger_than_the_budget_gives_its_newest_tokens():
    index, first = case(communities=1, graphs=2)
    tokens, count = check(index, 60, first, 20)
    assert count[0].tolist() == [10, 10]
    assert tokens[0, 0, :10].tolist() == list(range(50, 60))  # charged in full, though the tail begins at 55


def test_log_is_not_read_without_has_log():
    index, first = case(log_entries=0)
    index.log_first.fill_(GARBAGE)
    for budget in (20, 64, 200):
        check(index, 60, first, budget, has_log=False)


def test_too_big_best_community_beside_one_that_fits():
    index, first = case(first=(0, 0), n_indexed=(60, 60), communities=3, graphs=2)
    index.scores[0, 0, :3] = torch.tensor([1.0, 2.0, 0.0])
    check(index, 60, first, 18)


def test_equal_scores_fall_to_the_larger_id():
    index, first = case()
    index.scores[..., :12] = 0.0
    index.scores[..., 1:12:2] = -0.0
    check(index, 60, first, 40)


def test_many_more_communities_than_a_first_look_takes():
    index, first = case(first=(0,), n_indexed=(1500,), communities=1400, graphs=1, log_entries=9)
    check(index, 1503, first, 900)
    index.scores[..., :1400] = 3.0
    check(index, 1503, first, 900)


def test_nan_and_excluded_scores_are_left_out():
    index, first = case()
    index.scores[0, 0, :12] = torch.nan
    index.scores[0, 1, :12] = -torch.inf
    index.scores[0, 2, 3] = torch.inf
    index.scores[0, 2, 4] = torch.nan
    index.scores[0, 2, 4] = -torch.inf
    tokens, count = run(index, 60, first, 40)
    assert count[0, :2].tolist() == [0, 0]
    assert tokens[0, 2][: count[0, 2]].tolist() == oracle(index, 60, first, 40, 0, 2)


@pytest.mark.parametrize("number", [0, 5])
def test_row_without_an_index_lists_nothing(number):
    index, first = case()
    index.n_indexed[1, 0] = 0
    index.log_first[1, 0] = 0
    index.num_communities[1, 0] = number
    _, count = check(index, 60, first, 40)
    assert count[0].eq(0).all()
    assert count[1].gt(0).all()


def test_budget_used_up_by_mandatory_tokens_lists_nothing():
    index, first = case()
    _, count = check(index, 80, first, 20)
    assert count.eq(0).all()


def test_same_input_gives_the_same_tokens():
    index, first = case(communities=40, n_indexed=(400, 300))
    index.scores.round_()
    assert all(torch.equal(a, b) for a, b in zip(run(index, 400, first, 90), run(index, 400, first, 90), strict=True))


def test_tally_of_other_layers_is_untouched():
    index, first = case()
    check(index, 60, first, 40, layer=0)
    check(index, 61, first, 40, layer=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget": 0}, "budget must be at least 1, got 0"),
        ({"window": 0}, "recent_window must be at least 1, got 0"),
        ({"num_new": 0}, "num_new must be at least 1, got 0"),
        ({"first": [0]}, r"first must be \[2\]"),
    ],
)
def test_invalid_argument_is_named(change, message):
    index, first = case()
    with pytest.raises(ValueError, match=message):
        run(index, 60, **{"first": first, "budget": 40, **change})


def test_copied_state_raises():
    index, first = case()
    index.member = nominal_state(index.member).clone()
    with pytest.raises(ValueError, match="member must be a view of a buffer"):
        run(index, 60, first, 40)


def test_opcheck():
    index, first = case(log_entries=3)
    index.scores.nan_to_num_()
    arguments = [getattr(index, name) for name in (*STATE, "capacity")]
    first = torch.tensor(first, dtype=torch.int32)
    torch.library.opcheck(
        retrieve.default,
        (
            *empty_shortlist(2, 3), *arguments, torch.tensor([60]), first, index.tally, 1, 2, 3, 40, SINKS, WINDOW,
            True,
        ),
    )  # fmt: skip
