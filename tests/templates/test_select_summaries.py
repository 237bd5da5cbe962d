"""The kernel of ``ckv::select_summaries`` against the operator."""

import dataclasses

import pytest
import torch

import ckv_compile.ops  # noqa: F401
from ckv_compile import rendered
from ckv_compile.testing import random_index

SINKS, WINDOW, LAYER = 4, 6, 1


def case(device, communities=12, first=(0, 5), n_indexed=(60, 47), graphs=2, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    index = random_index(
        len(first), graphs, 8, list(first), list(n_indexed), max(communities, 1), num_sink_tokens=SINKS, log_entries=7,
        seed=seed, **options,
    )  # fmt: skip
    index.scores[..., :communities] = torch.randn(len(first), graphs, communities, generator=generator)
    index.num_communities.clamp_(max=communities)
    tensors = {field.name: getattr(index, field.name).to(device) for field in dataclasses.fields(index)}
    return type(index)(**tensors), torch.tensor(first, dtype=torch.int32, device=device)


def check(index, first, length=62, budget=30, reserved=4, slots=16):
    """Kernel and operator list the same and count the same. Returns the ids."""
    batch, graphs = index.num_communities.shape[1:]
    length = torch.tensor([length], dtype=torch.int32, device=first.device)
    other = index.clone()
    names = ("scores", "size", "num_communities", "n_indexed")
    want = torch.ops.ckv.select_summaries(
        *(other.nominal(name) for name in names), other.capacity, length, first, other.nominal("tally"), LAYER, batch,
        graphs, budget, reserved, SINKS, WINDOW,
    )  # fmt: skip
    got, count = rendered.select_summaries(
        index, length, first, LAYER, graphs, budget, reserved, SINKS, WINDOW, SLOTS=slots
    )
    assert torch.equal(got, want)
    assert torch.equal(count, (want >= 0).sum(-1))
    for field in dataclasses.fields(index):
        left, right = getattr(index, field.name), getattr(other, field.name)
        assert torch.equal(left.nan_to_num(), right.nan_to_num()), f"{field.name} differs"
    return got


@pytest.mark.parametrize("slots", [4, 64])
@pytest.mark.parametrize("reserved", [1, 3, 4, 20])
def test_the_best_communities_that_are_not_retrieved(device, reserved, slots):
    for seed, budget in enumerate((18, 25, 40)):
        found = check(*case(device, seed=seed), budget=budget, reserved=min(reserved, budget - 11), slots=slots)
        assert (found >= 0).any()


@pytest.mark.parametrize("levels", [1, 3])
def test_equal_scores_fall_to_the_larger_id(device, levels):
    for seed in range(3):
        index, first = case(device, communities=30, seed=seed)
        levelled = torch.randint(levels, index.scores.shape, generator=torch.Generator().manual_seed(seed)) - 1.0
        levelled[..., ::2] *= -1 if levels > 1 else 1  # -0.0 is 0.0
        index.scores.copy_(levelled)
        check(index, first, reserved=5)


def test_nan_infinite_and_empty_communities(device):
    index, first = case(device)
    index.scores[..., :6] = torch.tensor([torch.nan, -torch.inf, torch.inf, torch.inf, 2.0, 1.0], device=device)
    index.size[..., 4:6] = 0
    check(index, first)
    index.scores.fill_(-torch.inf)
    assert (check(index, first) < 0).all()


def test_scores_of_any_scale(device):
    index, first = case(device, communities=40)
    index.scores.mul_(1e30)
    check(index, first)
    index.scores.div_(1e30).mul_(1e-30)
    check(index, first)


@pytest.mark.parametrize("communities", [1, 2, 3])
def test_the_best_community_counts_as_retrieved_where_it_does_not_fit(device, communities):
    index, first = case(device, communities=communities)
    index.scores[..., :communities] = 1.5
    for budget in (15, 16, 17):
        check(index, first, budget=budget)


def test_fewer_are_left_or_none(device):
    check(*case(device, communities=5), budget=40, reserved=20)
    assert (check(*case(device, communities=0)) < 0).all()


@pytest.mark.parametrize("length", [60, 66, 70, 90])
def test_the_budget_of_the_tail_is_not_exceeded(device, length):
    check(*case(device), length=length, budget=17)


@pytest.mark.parametrize("budget", [58, 63, 200])
def test_a_context_within_the_budget_has_none(device, budget):
    check(*case(device), budget=budget)


def test_rows_without_an_index_have_none(device):
    index, first = case(device)
    index.n_indexed[:, 1] = 0
    index.num_communities[:, 1] = 0
    found = check(index, first)
    assert (found[0] >= 0).any()
    assert (found[1] < 0).all()


def test_default_configuration(device):
    index, first = case(device, communities=40)
    check(index, first, slots=2048)
