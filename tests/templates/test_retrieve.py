"""The kernel of ``ckv::retrieve`` against the operator, on shortlists that leave out whatever they like."""

import dataclasses

import pytest
import torch

import ckv_compile.ops  # noqa: F401
from ckv_compile import rendered
from ckv_compile.testing import GARBAGE, random_index

SINKS, WINDOW, LAYER = 4, 6, 1
STATE = (
    "scores", "start", "stored", "size", "member", "log_community", "log_first", "num_communities", "n_indexed",
)  # fmt: skip
SMALL = {"PROGRAMS": 4, "PARTS": 2, "BLOCK_J": 4, "LOG_N": 4}


def case(device, communities=12, first=(5,), n_indexed=(60,), graphs=1, log_entries=7, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    index = random_index(
        len(first), graphs, 8, list(first), list(n_indexed), max(communities, 1), num_sink_tokens=SINKS,
        log_entries=log_entries, seed=seed, **options,
    )  # fmt: skip
    index.scores[..., :communities] = torch.randn(len(first), graphs, communities, generator=generator)
    index.num_communities.clamp_(max=communities)
    tensors = {field.name: getattr(index, field.name).to(device) for field in dataclasses.fields(index)}
    return type(index)(**tensors), torch.tensor(first, dtype=torch.int32, device=device)


def shortlist_of(index, slots, programs, keep, seed=0):
    """``keep(score)`` of a program's entries are listed, at most as many as there is room for; any may be left out."""
    generator = torch.Generator().manual_seed(seed)
    batch, graphs, _ = index.scores.shape
    shortlist = torch.full((batch, graphs, 5, slots), GARBAGE, dtype=torch.int32)
    shortlist[:, :, 2] = 0
    left_out = torch.full((batch, graphs, programs), -torch.inf)
    quota = slots // programs
    scores, numbers = index.scores.cpu(), index.num_communities[LAYER].cpu()
    sizes, starts, stored = (getattr(index, name)[LAYER].cpu() for name in ("size", "start", "stored"))
    for row in range(batch):
        for graph in range(graphs):
            number = int(numbers[row, graph])
            score, size = scores[row, graph, :number], sizes[row, graph, :number]
            score = torch.where(size > 0, score, -torch.inf)
            for program in range(programs):
                own = torch.arange(programs * -(-number // programs)).view(-1, programs)[:, program]
                own = own[own < number]
                own = own[score[own] > -torch.inf]
                own = own[torch.randperm(len(own), generator=generator)]
                listed = own[keep(score[own])][:quota] if len(own) else own
                rest = own[~torch.isin(own, listed)]
                if len(rest):
                    left_out[row, graph, program] = score[rest].max()
                slot = slice(program * quota, program * quota + len(listed))
                begin, held = starts[row, graph, listed], stored[row, graph, listed]
                shortlist[row, graph, :, slot] = torch.stack(
                    [score[listed].view(torch.int32), listed.int(), size[listed], begin, held]
                )
    return shortlist.to(index.scores.device), left_out.to(index.scores.device)


def everything(score):
    return torch.ones_like(score, dtype=torch.bool)


def nothing(score):
    return torch.zeros_like(score, dtype=torch.bool)


def check(index, first, length, budget, keep=everything, slots=64, has_log=True, seed=0, num_new=1, **tuned):
    """Kernel and operator list the same tokens and count the same. Returns the kernel's (tokens, count)."""
    tuned = {**SMALL, **tuned}
    tuned.setdefault("OWN", slots // tuned["PARTS"])
    batch, graphs = index.num_communities.shape[1:]
    shortlist = shortlist_of(index, slots, tuned["PROGRAMS"], keep, seed)
    length = torch.tensor([length], dtype=torch.int32, device=first.device)
    want_state = index.clone()
    want, want_count = torch.ops.ckv.retrieve(
        *shortlist, *(want_state.nominal(name) for name in STATE), want_state.capacity, length, first,
        want_state.nominal("tally"), LAYER, batch, graphs, budget, SINKS, WINDOW, has_log, num_new,
    )  # fmt: skip
    before = index.clone()
    got, count = rendered.retrieve(
        *shortlist, index, length, first, LAYER, graphs, budget, SINKS, WINDOW, has_log, num_new, **tuned
    )
    assert torch.equal(count, want_count)
    for row in range(batch):
        for graph in range(graphs):
            used = int(count[row, graph])
            assert got[row, graph, :used].sort().values.tolist() == want[row, graph, :used].tolist()
            assert got[row, graph, used:].eq(rendered.poisoned((), torch.int32, first.device)).all(), "beyond count"
    assert torch.equal(index.tally, want_state.tally)
    for field in dataclasses.fields(index):
        if field.name != "tally":
            left, right = getattr(index, field.name), getattr(before, field.name)
            assert torch.equal(left.nan_to_num(), right.nan_to_num()), f"{field.name} changed"
    return got, count


@pytest.mark.parametrize("keep", [everything, nothing, lambda s: s > 0.3, lambda s: s < 0.3], ids="anlh")
@pytest.mark.parametrize(("length", "log_entries"), [(60, 0), (63, 7)])
def test_any_shortlist_gives_the_tokens_of_the_best_communities(device, keep, length, log_entries):
    for seed, budget in enumerate((20, 33, 200)):
        index, first = case(device, log_entries=log_entries, seed=seed)
        check(index, first, length, budget, keep, has_log=log_entries > 0, seed=seed)


@pytest.mark.parametrize("num_new", [2, 8])
@pytest.mark.parametrize("budget", [20, 33, 66])
def test_several_new_tokens_count_in_tail_and_context(device, budget, num_new):
    index, first = case(device)
    check(index, first, 63, budget, num_new=num_new)


@pytest.mark.parametrize("keep", [everything, nothing], ids="an")
@pytest.mark.parametrize("levels", [1, 3])
def test_equal_scores_fall_to_the_larger_id(device, levels, keep):
    for seed, budget in enumerate((20, 33)):
        index, first = case(device, communities=30, seed=seed)
        levelled = torch.randint(levels, index.scores.shape, generator=torch.Generator().manual_seed(seed)) - 1.0
        levelled[..., ::2] *= -1 if levels > 1 else 1  # -0.0 is 0.0
        index.scores.copy_(levelled)
        check(index, first, 60, budget, keep, seed=seed)


def test_left_out_ties_of_the_last_listed_score_are_found(device):
    for seed in range(2):
        index, first = case(device, communities=40, seed=seed)
        index.scores.copy_(torch.randint(2, index.scores.shape, generator=torch.Generator().manual_seed(seed)))
        check(index, first, 62, 26, everything, slots=16, seed=seed)


@pytest.mark.parametrize("keep", [everything, nothing], ids="an")
@pytest.mark.parametrize(("log_entries", "has_log"), [(0, False), (7, True)])
def test_community_larger_than_the_room_gives_its_newest_tokens(device, log_entries, has_log, keep):
    for communities in (1, 2):
        index, first = case(device, communities=communities, log_entries=log_entries)
        for budget in (11, 14, 30):
            check(index, first, 60, budget, keep, has_log=has_log)


@pytest.mark.parametrize("keep", [everything, nothing], ids="an")
def test_best_of_equal_communities_may_be_larger_than_the_room(device, keep):
    index, first = case(device, communities=3, graphs=2)
    index.scores.fill_(1.5)
    check(index, first, 60, 18, keep)


@pytest.mark.parametrize("keep", [everything, nothing], ids="an")
def test_nan_infinite_and_excluded_scores(device, keep):
    index, first = case(device, first=(0, 5), n_indexed=(60, 47), graphs=2)
    index.scores[0, 0] = torch.nan
    index.scores[0, 1] = -torch.inf
    index.scores[1, 0, 3:6] = torch.inf
    index.scores[1, 0, 6:9] = torch.nan
    index.scores[1, 1, 2:9] = -torch.inf
    _, count = check(index, first, 60, 40, keep)
    assert count[0].tolist() == [0, 0]


@pytest.mark.parametrize("keep", [everything, nothing], ids="an")
def test_empty_communities_and_graphs_without_one(device, keep):
    index, first = case(device, communities=20, first=(0, 5), n_indexed=(60, 47), graphs=2, log_entries=0)
    index.size[:, :, :, ::3] = 0
    index.num_communities[LAYER, 0, 0] = 0
    index.num_communities[LAYER, 1, 1] = 1
    check(index, first, 60, 40, keep)


@pytest.mark.parametrize(
    ("first", "n_indexed", "length"),
    [
        ((0, 0), (0, 0), 0),  # one token
        ((0, 5), (0, 0), 63),  # nothing is indexed
        ((0, 3), (5, 6), 5),  # the tail begins among the sinks
        ((61, 0), (0, 60), 60),  # a row of padding
        ((0, 40), (60, 52), 60),
    ],
)
def test_rows_of_any_coverage(device, first, n_indexed, length):
    index, first = case(device, first=first, n_indexed=n_indexed, log_entries=min(7, *n_indexed))
    for row, covered in enumerate(n_indexed):
        if covered == 0:
            index.num_communities[:, row] = 0
    for budget in (12, 64):
        check(index, first, length, budget)


def test_budget_without_room_lists_nothing(device):
    index, first = case(device)
    for budget in (1, 10):
        _, count = check(index, first, 60, budget)
        assert count.eq(0).all()


@pytest.mark.slow
@pytest.mark.parametrize("keep", [everything, nothing], ids="an")
def test_many_communities_and_larger_buffers(device, keep):
    options = {"first": (0,), "n_indexed": (1500,), "graphs": 1, "communities_room": 1900, "tokens_room": 2100}
    index, first = case(device, communities=1400, log_entries=9, log_room=40, **options)
    for budget in (300, 900, 1600):
        check(index, first, 1503, budget, keep, slots=512, PARTS=1)


def test_default_configuration(device):
    index, first = case(device, communities=90, first=(3,), n_indexed=(400,), graphs=1)
    check(index, first, 400, 130, slots=1024, PROGRAMS=64, PARTS=32, BLOCK_J=16)


def test_equal_inputs_give_equal_lists(device):
    index, first = case(device, communities=40, n_indexed=(300,), graphs=2)
    index.scores.round_()
    runs = [check(index, first, 300, 90) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_one_launch_serves_rows_and_graphs(device):
    index, first = case(device, first=(0, 5), n_indexed=(60, 47), graphs=2)
    check(index, first, 63, 30)
