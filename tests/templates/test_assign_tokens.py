"""Kernels of ``ckv::assign_tokens`` against the operator itself, in both of two layers."""

import dataclasses

import numpy as np
import pytest
import torch

import ckv_compile.ops  # noqa: F401
from ckv_compile import rendered
from ckv_compile.testing import IndexState, nominal_state, random_index

ckv = torch.ops.ckv
SINKS, LAYER = 4, 1
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # of the kernels; the operator runs on the CPU
ASSIGN_STATE = (
    "centroid", "centroid_scale", "channel_scale", "log_mean", "mean_at", "start", "stored", "size", "num_communities",
    "n_indexed", "log_community", "log_first", "label", "community_weight", "total_weight", "edge_neighbor",
    "edge_weight", "gamma",
)  # fmt: skip
KEPT_VALUES = ("mean_value", "log_value")


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def on_device(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.to(DEVICE) for tensor in tensors]


def assign_case(
    heads=2, graphs=2, lists=6, kappa=5, first=(0, 3), n_indexed=(40, 40), communities=8, seed=0, dim=8, **options
):
    """(neighbor, weight, key_new, index, first): random lists with repeated, unusable and unlabelled entries."""
    generator = torch.Generator().manual_seed(seed)
    batch, width = len(first), dim * heads if graphs == 1 else dim
    index = random_index(
        batch, graphs, width, list(first), list(n_indexed), communities, num_sink_tokens=SINKS, lists=lists,
        kappa=kappa, seed=seed, **{"log_entries": 4, **options},
    )  # fmt: skip
    neighbor = torch.randint(-1, 42, (batch, lists, kappa), generator=generator, dtype=torch.int32)
    neighbor[:, ::2, -1] = 40  # the token itself
    weight = torch.rand(batch, lists, kappa, generator=generator)
    key_new = torch.randn(batch, heads, 1, dim, generator=generator).to(index.log_mean.dtype)
    return neighbor, weight, key_new, index, int32(*first)


def check_assignment(case, length=40, lam=0.5, new_value=None):
    """Runs both and compares all state. Returns the communities of the token [B, G], -1 where it has none.

    Layer 0 gets the edges of the other one in another order.
    """
    neighbor, weight, key_new, index, first = case
    new = [torch.stack([tensor.flip(1), tensor]) for tensor in (neighbor, weight, key_new[:, :, 0])]
    expected = index.clone()
    graphs = index.num_communities.shape[2]
    before = index.clone()
    ckv.assign_tokens(
        *(nominal_state(tensor) for tensor in new), *(expected.nominal(name) for name in ASSIGN_STATE),
        expected.capacity, int32(length), first, *new[0].shape[:1], *new[2].shape[2:], *neighbor.shape[1:], graphs, SINKS,
        lam, *((nominal_state(new_value), *map(expected.nominal, KEPT_VALUES)) if new_value is not None else ()),
    )  # fmt: skip
    changed = IndexState(**{f.name: getattr(index, f.name).to(DEVICE) for f in dataclasses.fields(index)})
    *new, first, at = on_device(*new, first, int32(length))
    values = () if new_value is None else (new_value.to(DEVICE), *(getattr(changed, name) for name in KEPT_VALUES))
    done = rendered.assign_tokens(*new, changed, at, first, graphs, SINKS, lam, *values)
    for field in dataclasses.fields(index):
        getattr(index, field.name).copy_(getattr(changed, field.name))
        found, wanted = getattr(index, field.name), getattr(expected, field.name)
        if field.name in ("community_weight", "total_weight", "log_mean", "centroid_scale", "mean_value"):
            rtol = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[found.dtype]
            torch.testing.assert_close(found, wanted, rtol=rtol, atol=1e-6 if rtol == 2e-6 else 1e-4, equal_nan=True)
        elif field.name == "centroid":
            assert (found.int() - wanted.int()).abs().max() <= 1
            assert (found != wanted).sum() <= 2
        else:
            assert torch.equal(found.nan_to_num(7, 8, 9), wanted.nan_to_num(7, 8, 9)), field.name
    assert done.tolist() == (index.n_indexed - before.n_indexed).tolist()
    if length >= index.label.shape[3]:
        return []
    return index.label[LAYER, :, :, length].tolist()


GRAPHS = [(2, 2, 6), (2, 2, 2), (3, 9, 9), (2, 1, 6), (1, 1, 7), (2, 2, 32)]  # heads, graphs, lists


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("heads", "graphs", "lists"), GRAPHS)
def test_token_joins_the_community_of_largest_gain(heads, graphs, lists, lam):
    for seed in range(3):
        check_assignment(assign_case(heads, graphs, lists, seed=seed), lam=lam)


@pytest.mark.parametrize(("lists", "kappa"), [(1, 1), (4, 8), (7, 11), (16, 32)])
def test_lists_of_any_size(lists, kappa):
    case = assign_case(1, 1, lists, kappa, n_indexed=(40, 40), communities=20)
    if lists * kappa > 200:
        case[1][:] *= torch.rand(case[1].shape, generator=torch.Generator().manual_seed(5)) < 0.3
    check_assignment(case)


def test_joining_and_new_communities_both_occur():
    chosen = []
    for gamma in (0.5, 20.0):
        case = assign_case()
        case[3].gamma.fill_(gamma)
        chosen += [c for row in check_assignment(case) for c in row]
    assert any(c == 8 for c in chosen)
    assert any(0 <= c < 8 for c in chosen)


def test_repeated_unusable_and_unlabelled_entries():
    case = assign_case(lists=8, kappa=7)
    neighbor, weight, _, index, _ = case
    neighbor[:, :, 1] = neighbor[:, :, 0]
    neighbor[:, :4, 4] = neighbor[:, :4, 0]
    neighbor[:, 2] = 40
    for i, value in enumerate((torch.inf, -1.0, torch.nan, 0.0)):
        weight[:, i, 2] = value
        weight[:, i, 0] = value  # then the repetition is the first that counts
    index.label[LAYER, :, :, 10:20] = -1
    index.label[LAYER, :, :, 20:25] = 2**30
    check_assignment(case)


def test_token_without_usable_edges_forms_its_own_community():
    case = assign_case()
    neighbor, weight, _, index, _ = case
    neighbor[0] = -1
    neighbor[1, 0] = 2  # a sink
    neighbor[1, 1:] = 40  # only itself
    weight[1, 2] = torch.nan
    assert check_assignment(case) == [[8, 8], [8, 8]]
    assert index.size[LAYER, :, :, 8].eq(1).all()


def test_equal_gains_take_the_smallest_community():
    neighbor, weight, key_new, index, first = assign_case(graphs=1, lists=1, first=(0,), n_indexed=(40,))
    index.community_weight[:, :, :, :8] = 1.0
    index.label[LAYER, 0, 0, 30:34] = int32(5, 3, 7, 3)
    neighbor[0, 0] = int32(30, 31, 32, -1, -1)
    weight[:] = 0.25
    index.total_weight.fill_(8.0)
    assert check_assignment((neighbor, weight, key_new, index, first)) == [[3]]


def test_a_community_of_most_tokens():
    case = assign_case(communities=2)
    case[3].community_weight[LAYER, :, :, 0] = 1e6
    case[3].size[LAYER, :, :, 0] = 1_000_000  # the log has its mean
    check_assignment(case)


@pytest.mark.parametrize(("heads", "graphs", "lists"), [(2, 2, 6), (2, 1, 6)])
def test_means_of_tokens_one_after_the_other(heads, graphs, lists):
    """New communities, published ones and those that others joined before: means move from each to the log's entries."""
    seen = set()
    for gamma in (0.01, 20.0):
        generator = torch.Generator().manual_seed(0)
        neighbor, weight, key_new, index, first = assign_case(heads, graphs, lists, log_entries=0, communities_room=24)
        index.gamma.fill_(gamma)
        for length in range(40, 46):
            before = index.clone()
            neighbor = torch.randint(4, length + 1, neighbor.shape, generator=generator, dtype=torch.int32)
            key_new = torch.randn(key_new.shape, generator=generator)
            chosen = check_assignment((neighbor, weight, key_new, index, first), length=length)
            for row, graph in np.ndindex(2, graphs):
                at = (LAYER, row, graph, chosen[row][graph])
                if chosen[row][graph] == before.num_communities[LAYER, row, graph]:
                    seen.add("new")
                else:
                    seen.add("joined" if before.size[at] > before.stored[at] else "published")
                entry = int(index.mean_at[at])
                assert entry == length - 40
                assert index.log_mean[LAYER, row, graph, entry + 1 :].isnan().all()
    assert seen == {"new", "joined", "published"}


@pytest.mark.parametrize("length", [2, 39, 41, 45])
def test_rows_that_are_not_ready_only_log_their_token(length):
    before = assign_case(n_indexed=(40, 40))[3]
    case = assign_case(n_indexed=(40, 40))
    check_assignment(case, length=length)
    assert torch.equal(case[3].size, before.size)


def test_rows_differ_in_readiness():
    case = assign_case(first=(0, 3, 0, 38), n_indexed=(40, 37, 40, 40), communities=6)
    case[3].num_communities[LAYER, 2, 1] = case[3].capacity[0]  # no room, needed or not
    chosen = check_assignment(case)
    assert min(chosen[0]) >= 0
    assert chosen[1] == [-1, -1]
    assert chosen[3] == [-1, -1]  # a sink


def test_one_graph_without_room_leaves_the_row_as_it_is():
    case = assign_case(communities_room=8)
    case[0][0, 3:] = -1  # graph 1 of row 0 needs a new community
    case[3].gamma.fill_(0.01)
    before = case[3].clone()
    check_assignment(case)
    assert torch.equal(case[3].size[LAYER, 0], before.size[LAYER, 0])
    assert int(case[3].n_indexed[LAYER, 0]) == 40
    assert int(case[3].n_indexed[LAYER, 1]) == 41


@pytest.mark.parametrize(
    ("heads", "graphs", "lists"),
    [(2, 2, 6), pytest.param(2, 1, 6, marks=pytest.mark.slow), pytest.param(3, 9, 9, marks=pytest.mark.slow)],
)
def test_tokens_that_wait_are_caught_up(heads, graphs, lists):
    neighbor, weight, key_new, index, first = assign_case(
        heads, graphs, lists, communities_room=40, tokens_room=64, log_room=32
    )
    generator = torch.Generator().manual_seed(1)
    for length in range(40, 49):
        if length == 40:
            index.n_indexed.fill_(3)
        if length == 43:
            index.n_indexed.copy_(int32(40, 41))  # the second row's first token keeps none
        neighbor = torch.randint(4, length + 1, neighbor.shape, generator=generator, dtype=torch.int32)
        weight = torch.rand(weight.shape, generator=generator)
        key_new = torch.randn(key_new.shape, generator=generator)
        value = torch.randn(2, 2, heads, 8, generator=generator)
        check_assignment((neighbor, weight, key_new, index, first), length, new_value=value)
    assert index.n_indexed[LAYER].tolist() == [49, 49]


def test_full_log_and_full_labels():
    check_assignment(assign_case(log_room=4))
    check_assignment(assign_case(tokens_room=40))
    check_assignment(assign_case(log_room=5))
    check_assignment(assign_case(tokens_room=41))


@pytest.mark.parametrize("dim", [64, 96, 128])
def test_means_of_any_precision(dim, dtype):
    check_assignment(assign_case(dim=dim, dtype=dtype))
    check_assignment(assign_case(graphs=1, dim=dim, dtype=dtype))


def test_first_token_of_an_empty_index():
    case = assign_case(n_indexed=(4, 7), communities=1, log_entries=0)
    case[3].num_communities.zero_()
    case[3].total_weight.zero_()
    neighbor = case[0]
    neighbor[:] = -1
    chosen = check_assignment(case, length=4)
    assert chosen[0] == [0, 0]


@pytest.mark.parametrize(("heads", "graphs", "lists"), GRAPHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_mean_values_move_with_the_new_value(heads, graphs, lists, dtype):
    for seed, n_indexed in ((0, (40, 40)), (1, (40, 39))):
        case = assign_case(heads, graphs, lists, n_indexed=n_indexed, seed=seed, dtype=dtype)
        before = case[3].mean_value.clone()
        value = torch.randn(2, 2, heads, 8, generator=torch.Generator().manual_seed(seed)).to(dtype)
        check_assignment(case, new_value=value)
        moved = (case[3].mean_value.nan_to_num(7) != before.nan_to_num(7)).flatten(3).any(-1)
        assert moved[LAYER].tolist() == [[n == 40] * graphs for n in n_indexed]


def test_a_new_community_begins_with_the_new_value():
    case = assign_case()
    case[0].fill_(-1)
    value = torch.randn(2, 2, 2, 8, generator=torch.Generator().manual_seed(0))
    assert check_assignment(case, new_value=value) == [[8, 8], [8, 8]]
    assert torch.equal(case[3].mean_value[LAYER, :, :, 8], value[LAYER])
