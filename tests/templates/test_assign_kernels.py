"""Kernels of the operators that assign new tokens, against the operators themselves; edges against float64."""

import dataclasses

import pytest
import torch

import ckv_compile.ops  # noqa: F401
from ckv_compile import rendered
from ckv_compile.testing import IndexState, nominal_cache, random_cache, random_index

ckv = torch.ops.ckv
SINKS, WINDOW, LAYER = 4, 6, 1
CAPACITY = torch.tensor([0, 0, 0, LAYER], dtype=torch.int32)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # of the kernels; the operators run on the CPU
ASSIGN_STATE = (
    "centroid", "centroid_scale", "channel_scale", "centroid_mean", "start", "stored", "size", "num_communities",
    "n_indexed", "log_community", "log_first", "label", "community_weight", "total_weight", "edge_neighbor",
    "edge_weight", "gamma",
)  # fmt: skip


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def on_device(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.to(DEVICE) for tensor in tensors]


def attended_case(
    heads, graphs, first=(0, 5), n_indexed=(90, 71), length=90, dim=64, budget=48, dtype=torch.float32, layout="slab"
):
    """(key, tokens, count, n_indexed, length, first): lists with entries that are not to be used, of uneven length."""
    generator = torch.Generator().manual_seed(length + dim + graphs)
    batch = len(first)
    key = random_cache(batch, heads, length + 5, dim, list(first), length + 1, dtype, layout)
    tokens = torch.randint(-9, length + 9, (batch, graphs, budget), generator=generator, dtype=torch.int32)
    count = torch.zeros(batch, graphs, dtype=torch.int32)
    for row in range(batch):
        low, high = first[row] + SINKS, min(n_indexed[row], length + 1 - WINDOW)
        for graph in range(graphs):
            own = (torch.randperm(max(0, high - low), generator=generator) + low)[: budget - graph % 3]
            tokens[row, graph, : len(own)] = own.int()
            count[row, graph] = len(own)
            if len(own) > 3:  # a sink, a token of the tail and no token
                tokens[row, graph, :3] = int32(first[row], length, -1)
    state = torch.stack([torch.zeros(batch, dtype=torch.int32), int32(*n_indexed)])
    return key, tokens, count, state, int32(length), int32(*first)


def both_key_edges(case, kappa, **tuned):
    key, tokens, count, state, length, first = case
    exact = ckv.key_edges(
        nominal_cache(key.double()), tokens, count, state.flatten()[:1], CAPACITY, length, first, LAYER, SINKS, WINDOW,
        kappa, tokens.shape[1],
    )  # fmt: skip
    found = rendered.key_edges(
        *on_device(key, tokens, count, state, CAPACITY, length, first), SINKS, WINDOW, kappa, tokens.shape[1], **tuned
    )
    return exact, [tensor.cpu() for tensor in found]


def both_approximate_edges(query, case, kappa, scale=0.2, **tuned):
    key, tokens, count, state, length, first = case
    exact = ckv.approximate_edges(
        query.double(), nominal_cache(key.double()), tokens, count, state.flatten()[:1], CAPACITY, length, first, LAYER,
        scale, SINKS, WINDOW, kappa,
    )  # fmt: skip
    found = rendered.approximate_edges(
        *on_device(query, key, tokens, count, state, CAPACITY, length, first), scale, SINKS, WINDOW, kappa, **tuned
    )
    return exact, [tensor.cpu() for tensor in found]


def assert_same_edges(exact, found):
    assert torch.equal(found[0], exact[0])
    torch.testing.assert_close(found[1], exact[1].float(), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("heads", "graphs", "kappa"), [(3, 3, 5), (3, 1, 5), (1, 1, 1), (1, 1, 2), (1, 1, 7), (2, 2, 8), (1, 1, 32)]
)
def test_key_edges(heads, graphs, kappa):
    assert_same_edges(*both_key_edges(attended_case(heads, graphs), kappa, SPLITS=4))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "graphs", "kappa"),
    [(6, 3, 3, 5), (6, 3, 6, 3), (6, 3, 1, 5), (2, 2, 2, 1), (1, 1, 1, 2), (16, 1, 1, 8), (1, 1, 1, 32)],
)
def test_approximate_edges(heads, kv_heads, graphs, kappa):
    query = torch.randn(2, heads, 1, 64, generator=torch.Generator().manual_seed(1))
    assert_same_edges(*both_approximate_edges(query, attended_case(kv_heads, graphs), kappa, SPLITS=4))


@pytest.mark.parametrize(("dim", "layout"), [(64, "slab"), (96, "static"), (128, "slab"), (256, "static")])
def test_edges_of_any_precision(dim, layout, dtype):
    case = attended_case(2, 2, dim=dim, dtype=dtype, layout=layout)
    query = torch.randn(2, 4, 1, dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert_same_edges(*both_key_edges(case, 8, SPLITS=2))
    assert_same_edges(*both_approximate_edges(query, case, 8, SPLITS=2))


@pytest.mark.parametrize(
    ("first", "n_indexed", "length"),
    [
        ((0, 0), (0, 0), 150),  # nothing is indexed
        ((0, 3), (5, 6), 5),
        ((0, 1), (0, 0), 2),
        ((0, 61), (60, 0), 60),  # a row of padding
        ((0, 40), (300, 41), 300),
    ],
)
def test_edges_of_short_and_unindexed_rows(first, n_indexed, length):
    case = attended_case(2, 2, first=first, n_indexed=n_indexed, length=length)
    query = torch.randn(2, 4, 1, 64, generator=torch.Generator().manual_seed(1))
    assert_same_edges(*both_key_edges(case, 7, SPLITS=4))
    assert_same_edges(*both_approximate_edges(query, case, 7, SPLITS=4))


def test_equal_scores_keep_the_latest_positions_in_any_split():
    key, *rest = attended_case(1, 1, first=(0, 0), n_indexed=(0, 0))
    key[:, :, :91] = key[:, :, 90:91]
    case = (key, *rest)
    query = torch.zeros(2, 1, 1, 64)
    for splits in (2, 8):
        _, (neighbor, weight) = both_key_edges(case, 5, SPLITS=splits)
        assert neighbor.tolist() == [[[89, 88, 87, 86, 85]]] * 2
        assert weight.eq(1).all()
        _, (neighbor, weight) = both_approximate_edges(query, case, 5, SPLITS=splits)
        assert neighbor.tolist() == [[[90, 89, 88, 87, 86]]] * 2
        torch.testing.assert_close(weight, torch.full_like(weight, 1 / 91))


def test_zero_keys_have_finite_similarity():
    key, *rest = attended_case(2, 1, first=(0, 0))
    key[:, :, :91] = 0
    _, (neighbor, _) = both_key_edges((key, *rest), 5, SPLITS=2)
    assert neighbor.ge(SINKS).all()
    assert neighbor.lt(90).all()


# ---------------------------------------------------------------------- assign_token


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
    key_new = torch.randn(batch, heads, 1, dim, generator=generator).to(index.centroid_mean.dtype)
    return neighbor, weight, key_new, index, int32(*first)


def check_assignment(case, length=40, lam=0.5):
    """Runs both and compares all state. Returns the communities of the token [B, G], -1 where it has none."""
    neighbor, weight, key_new, index, first = case
    expected = index.clone()
    graphs = index.num_communities.shape[2]
    before = index.clone()
    ckv.assign_token(
        neighbor, weight, key_new, key_new, *(expected.nominal(name) for name in ASSIGN_STATE), expected.capacity,
        int32(length), first, LAYER, graphs, SINKS, lam,
    )  # fmt: skip
    changed = IndexState(**{f.name: getattr(index, f.name).to(DEVICE) for f in dataclasses.fields(index)})
    neighbor, weight, key_new, first, at = on_device(neighbor, weight, key_new, first, int32(length))
    done = rendered.assign_token(neighbor, weight, key_new, changed, at, first, LAYER, graphs, SINKS, lam)
    for field in dataclasses.fields(index):
        getattr(index, field.name).copy_(getattr(changed, field.name))
        found, wanted = getattr(index, field.name), getattr(expected, field.name)
        if field.name in ("community_weight", "total_weight", "centroid_mean", "centroid_scale"):
            rtol = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[found.dtype]
            torch.testing.assert_close(found, wanted, rtol=rtol, atol=1e-6 if rtol == 2e-6 else 1e-4, equal_nan=True)
        elif field.name == "centroid":
            assert (found.int() - wanted.int()).abs().max() <= 1
            assert (found != wanted).sum() <= 2
        else:
            assert torch.equal(found.nan_to_num(7, 8, 9), wanted.nan_to_num(7, 8, 9)), field.name
        untouched = getattr(before, field.name)
        if found.shape[0] == 2 and field.name not in ("scores", "tally"):
            assert torch.equal(found[0].nan_to_num(), untouched[0].nan_to_num()), f"{field.name} of the other layer"
    advanced = (index.n_indexed[LAYER] - before.n_indexed[LAYER]).tolist()
    assert done.tolist() == advanced
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
    case[3].size[LAYER, :, :, 0] = 1_000_000
    check_assignment(case)


@pytest.mark.parametrize("length", [2, 39, 41, 45])
def test_rows_that_are_not_ready_keep_their_edges_only(length):
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
