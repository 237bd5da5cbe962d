"""Kernels of ``ckv::sparse_attention_edges`` against the operator in float64; caches are NaN outside of what is read."""

import functools

import pytest
import torch

import ckv_compile.ops  # noqa: F401
from ckv_compile import index_layout, rendered
from ckv_compile.testing import nominal_cache, random_cache, random_index, random_summaries

SINKS, WINDOW, LAYER, SCALE = 4, 6, 1, 0.2
CAPACITY = torch.tensor([0, 0, 0, LAYER], dtype=torch.int32)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # of the kernels; the operator runs on the CPU
SOURCES = ("keys", "attention")


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def attended_case(
    heads, graphs, first=(0, 5), n_indexed=(90, 71), length=90, dim=64, budget=48, dtype=torch.float32, layout="slab"
):
    """(query, key, value, tokens, count, n_indexed, length, first) of (query heads, KV heads).

    Lists have entries that are not to be used and are of uneven length.
    """
    generator = torch.Generator().manual_seed(length + dim + graphs)
    batch = len(first)
    query = torch.randn(batch, heads[0], 1, dim, generator=generator).to(dtype)
    key, value = (
        random_cache(batch, heads[1], length + 5, dim, list(first), length + 1, dtype, layout, seed) for seed in (0, 1)
    )
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
    return query, key, value, tokens, count, state, int32(length), int32(*first)


@pytest.fixture(autouse=True)
def short_tail(monkeypatch):
    """Few places for the tail, so that the longer ones of these small caches have some that find none."""
    monkeypatch.setattr(index_layout, "CANDIDATE_TAIL", 32)


def new_state(case, kappa, source, dtype):
    """Poisoned candidates and new_key of two layers; the layer that is not looked at holds none."""
    query, key, _, tokens, *_ = case
    batch, heads, graphs, kv_heads = *query.shape[:2], tokens.shape[1], key.shape[1]
    lists, places = (graphs, graphs) if source == "keys" else (heads, max(graphs, kv_heads))
    slots = index_layout.candidate_slots(tokens.shape[2], SINKS)
    shapes = (
        ((places, slots), torch.int32), ((lists, slots), torch.float32),
        ((lists, index_layout.rest_slots(kappa)), torch.int64), ((lists,), torch.float32),
        ((kv_heads, key.shape[3]), dtype),
    )  # fmt: skip
    return [rendered.poisoned((2, batch, *shape), kind, "cpu") for shape, kind in shapes]


def picks(state, case, kappa, source, pick=None):
    """(neighbor, weight) of the layer."""
    tokens, first = case[3], case[7]
    places, lists = state[0].shape[2], state[1].shape[2]
    sizes = (tokens.shape[2], SINKS, kappa, source)
    if pick is None:
        nominal = [tensor[LAYER:].flatten()[:1] for tensor in state[:4]]
        found = torch.ops.ckv.pick_edges(*nominal, first, 1, places, lists, *sizes)
    else:
        found = pick(*(tensor[LAYER:].contiguous() for tensor in state[:4]), places, *sizes)
    return [tensor[0].cpu() for tensor in found]


def both(case, kappa, source, sink_logits=None, **tuned):
    """(neighbor, weight, new key, output) of the layer: the operator's in float64 and the kernels'."""
    query, key, value, tokens, count, state, length, first = case
    exact = new_state(case, kappa, source, torch.float64)
    out = torch.ops.ckv.sparse_attention_edges(
        query.double(), nominal_cache(key.double()), nominal_cache(value.double()), tokens, count, state.flatten()[:1],
        CAPACITY, length, first, sink_logits, *(tensor.flatten()[:1] for tensor in exact), LAYER, SCALE, SINKS, WINDOW,
        kappa, source,
    )  # fmt: skip
    found = [tensor.to(DEVICE) for tensor in new_state(case, kappa, source, key.dtype)]
    given = [tensor.to(DEVICE) for tensor in (query, key, value, tokens, count, state, CAPACITY, length, first)]
    logits = None if sink_logits is None else sink_logits.to(DEVICE)
    got = rendered.sparse_attention_edges(
        *given,
        logits,
        *found,
        LAYER,
        SCALE,
        SINKS,
        WINDOW,
        kappa,
        source,
        **{"BLOCK_N": max(16, kappa), "LIST_N": max(16, kappa), **tuned},
    )
    for tensor, poison in zip(found, new_state(case, kappa, source, key.dtype), strict=True):
        assert torch.equal(tensor[0].cpu().nan_to_num(7), poison[0].nan_to_num(7)), "the other layer changed"
    kernel = picks(found, case, kappa, source, functools.partial(rendered.pick_edges, BLOCK=64))
    again = picks([tensor.cpu() for tensor in found], case, kappa, source)
    assert torch.equal(kernel[0], again[0])
    torch.testing.assert_close(kernel[1], again[1], rtol=1e-6, atol=0)
    expected = picks(exact, case, kappa, source)
    return [*expected, exact[4][LAYER], out], [*kernel, found[4][LAYER].cpu(), got.cpu()]


def check(case, kappa, source, sink_logits=None, **tuned):
    exact, found = both(case, kappa, source, sink_logits, **tuned)
    assert torch.equal(found[0], exact[0])
    torch.testing.assert_close(found[1], exact[1], rtol=2e-5, atol=1e-6)
    assert torch.equal(found[2].double().nan_to_num(7), exact[2].nan_to_num(7))
    # 2e-6: products of 128 channels in a row, as a GPU adds them, and the matrix product of some processors.
    allowed = 2e-6 if found[3].dtype == torch.float32 else 0.75 * torch.finfo(found[3].dtype).eps
    assert (found[3].double() - exact[3]).norm() <= allowed * exact[3].norm()
    return found


@pytest.mark.parametrize(
    ("heads", "graphs", "kappa"),
    [((6, 3), 3, 5), ((3, 3), 1, 5), ((6, 2), 1, 8), ((1, 1), 1, 1), ((4, 1), 1, 2), ((1, 1), 1, 7), ((2, 2), 2, 32)],
)
def test_cosine_nearest_keys(heads, graphs, kappa):
    check(attended_case(heads, graphs), kappa, "keys", SPLITS=4)


@pytest.mark.parametrize(
    ("heads", "graphs", "kappa"),
    [
        ((6, 3), 3, 5), ((6, 3), 6, 3), ((6, 3), 1, 5), ((2, 2), 2, 1), ((1, 1), 1, 2), ((16, 1), 1, 8), ((1, 1), 1, 32),
        ((3, 1), 1, 8), ((7, 1), 1, 4),
    ],
)  # fmt: skip
def test_strongest_keys(heads, graphs, kappa):
    check(attended_case(heads, graphs), kappa, "attention", SPLITS=4)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("dim", "layout"), [(64, "slab"), (96, "static"), (128, "slab"), (256, "static")])
def test_any_precision(dim, layout, source, dtype):
    check(attended_case((4, 2), 2, dim=dim, dtype=dtype, layout=layout), 8, source, SPLITS=2)


@pytest.mark.parametrize(("source", "graphs"), [("keys", 2), ("keys", 1), ("attention", 2)])
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
def test_short_and_unindexed_rows(first, n_indexed, length, source, graphs):
    check(attended_case((4, 2), graphs, first=first, n_indexed=n_indexed, length=length), 7, source, SPLITS=4)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("sink", [-torch.inf, 0.0, 300.0, torch.inf])
def test_learned_sink_logits_take_no_part_in_the_weights(source, sink):
    case = attended_case((4, 2), 2)
    plain = check(case, 5, source, SPLITS=4)
    found = check(case, 5, source, torch.tensor([sink, 0.5, sink, -1.0]), SPLITS=4)
    assert all(torch.equal(a, b) for a, b in zip(plain[:3], found[:3], strict=True))


@pytest.mark.parametrize(("heads", "graphs"), [((1, 1), 1), ((4, 2), 1)])
def test_equal_scores_keep_the_latest_positions_in_any_split(heads, graphs):
    query, key, *rest = attended_case(heads, graphs, first=(0, 0), n_indexed=(0, 0))
    key[:, :, :91] = key[:, :, 90:91]
    case = (torch.zeros_like(query), key, *rest)
    for splits in (2, 8):
        _, (neighbor, weight, *_) = both(case, 5, "keys", SPLITS=splits)
        assert neighbor.tolist() == [[[89, 88, 87, 86, 85]]] * 2
        assert weight.eq(1).all()
        _, (neighbor, weight, *_) = both(case, 5, "attention", SPLITS=splits)
        assert neighbor.tolist() == [[[90, 89, 88, 87, 86]] * heads[0]] * 2
        torch.testing.assert_close(weight, torch.full_like(weight, 1 / 91))


@pytest.mark.parametrize("graphs", [1, 2])
def test_zero_keys_have_finite_similarity(graphs):
    query, key, *rest = attended_case((2, 2), graphs, first=(0, 0))
    key[:, :, :91] = 0
    _, (neighbor, *_) = both((query, key, *rest), 5, "keys", SPLITS=2)
    assert neighbor.ge(SINKS).all()
    assert neighbor.lt(90).all()


@pytest.mark.parametrize("source", SOURCES)
def test_default_configuration(source, monkeypatch):
    monkeypatch.setattr(index_layout, "CANDIDATE_TAIL", 1024)
    check(attended_case((4, 1), 1, (3,), (400,), 430, 128, 300), 8, source, SPLITS=64, BLOCK_N=64, LIST_N=64)


@pytest.mark.parametrize(("source", "graphs"), [("keys", 2), ("keys", 1), ("attention", 2), ("attention", 4)])
@pytest.mark.parametrize("sink", [None, 0.5])
def test_communities_change_no_edge_and_the_new_value_is_kept(source, graphs, sink):
    case = attended_case((4, 2), graphs)
    query, key, value, tokens, count, state, length, first = case
    batch, heads, _, dim = key.shape
    index = random_index(
        batch, graphs, dim * heads if graphs == 1 else dim, first.tolist(), state[LAYER].tolist(), 12,
        num_sink_tokens=SINKS,
    )  # fmt: skip
    summaries = random_summaries(index, 6, LAYER)
    names = ("centroid", "centroid_scale", "channel_scale", "size", "mean_value")
    logits = None if sink is None else torch.full((4,), sink)
    want = torch.ops.ckv.sparse_attention(
        query.double(), nominal_cache(key.double()), nominal_cache(value.double()), tokens, count, state.flatten()[:1],
        index.capacity_of(LAYER), length, first, logits, LAYER, SCALE, SINKS, WINDOW, summaries,
        *(index.nominal(name) for name in names[:4]), index.mean_value.double().flatten()[:1],
    )  # fmt: skip
    _, (neighbor, weight, new_key, without) = both(case, 5, source, logits, SPLITS=4)
    found = [tensor.to(DEVICE) for tensor in new_state(case, 5, source, key.dtype)]
    new_value = rendered.poisoned((2, batch, heads, dim), key.dtype, DEVICE)
    given = [tensor.to(DEVICE) for tensor in (query, key, value, tokens, count, state)]
    at = [tensor.to(DEVICE) for tensor in (index.capacity_of(LAYER), length, first)]
    described = (summaries.to(DEVICE), *(getattr(index, name).to(DEVICE) for name in names), new_value)
    got = rendered.sparse_attention_edges(
        *given, *at, None if logits is None else logits.to(DEVICE), *found, LAYER, SCALE, SINKS, WINDOW, 5, source,
        described, SPLITS=4, BLOCK_N=16, LIST_N=16,
    ).cpu()  # fmt: skip
    assert (got.double() - want).norm() <= 1e-6 * want.norm()
    assert not torch.allclose(got, without)
    edges = picks([tensor.cpu() for tensor in found], case, 5, source)
    for tensor, alone in zip((*edges, found[4][LAYER].cpu()), (neighbor, weight, new_key), strict=True):
        torch.testing.assert_close(tensor.nan_to_num(7), alone.nan_to_num(7), rtol=1e-6, atol=0)
    assert torch.equal(new_value[LAYER].cpu(), value[:, :, int(length)])
    assert new_value[0].isnan().all()
