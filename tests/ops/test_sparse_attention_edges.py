import pytest
import torch

import ckv_compile.ops  # noqa: F401
from ckv_compile.index_layout import candidate_slots, rest_slots
from ckv_compile.testing import (
    attended_positions,
    nominal_cache,
    nominal_state,
    random_cache,
    random_index,
    random_summaries,
)

ckv = torch.ops.ckv
CAPACITY = torch.zeros(4, dtype=torch.int32)  # the operator takes the number of the layer as an argument
SINKS, WINDOW, LAYER = 4, 6, 1
GROUPINGS = [((3, 3), 3), ((6, 3), 3), ((8, 2), 2), ((7, 1), 1), ((6, 2), 1), ((6, 2), 6)]
SOURCES = ("keys", "attention")


def case(heads=(6, 2), graphs=2, first=(0, 5), n_indexed=(60, 47), length=60, dtype=torch.float32, dim=80):
    """(query, key, value, tokens, count, n_indexed, length, first), with NaN around what is in use."""
    torch.manual_seed(0)
    batch = len(first)
    query = torch.randn(batch, heads[0], 1, dim).to(dtype)
    key, value = (
        random_cache(batch, heads[1], length + 5, dim, list(first), length + 1, dtype, seed=seed) for seed in (0, 1)
    )
    tokens = torch.full((batch, graphs, 20), -1, dtype=torch.int32)
    count = torch.zeros(batch, graphs, dtype=torch.int32)
    for row in range(batch):
        low, high = first[row] + SINKS, max(first[row] + SINKS, min(n_indexed[row], length + 1 - WINDOW))
        for graph in range(graphs):
            own = (torch.randperm(high - low) + low)[: 11 + graph % 2]
            tokens[row, graph, : len(own)] = own.int()
            count[row, graph] = len(own)
    state = torch.tensor([[0] * batch, list(n_indexed)], dtype=torch.int32)
    return query, key, value, tokens, count, state, length, list(first)


def run(arguments, source, kappa=4, scale=0.3):
    """(neighbor, weight) of the layer. The rest of what the operator writes and returns is checked here."""
    query, key, value, tokens, count, state, length, first = arguments
    state_of = new_state(arguments, source, kappa)
    attended = (
        query, nominal_cache(key), nominal_cache(value), tokens, count, nominal_state(state), CAPACITY,
        torch.tensor([length]), torch.tensor(first, dtype=torch.int32), torch.linspace(-2, 2, query.shape[1]),
    )  # fmt: skip
    sizes = (LAYER, scale, SINKS, WINDOW)
    out = ckv.sparse_attention_edges(*attended, *map(nominal_state, state_of), *sizes, kappa, source)
    assert torch.equal(out.nan_to_num(), ckv.sparse_attention(*attended, *sizes).nan_to_num())
    assert torch.equal(state_of[4][LAYER].nan_to_num(), key[:, :, length].nan_to_num())
    for tensor, before in zip(state_of, new_state(arguments, source, kappa), strict=True):
        assert torch.equal(tensor[0].nan_to_num(), before[0].nan_to_num())
    return picks(state_of, arguments, source, kappa)


def new_state(arguments, source, kappa):
    """candidate, candidate_score, candidate_rest, candidate_norm and new_key of two layers, filled with garbage."""
    query, key, _, tokens, *_ = arguments
    (batch, heads), graphs = query.shape[:2], tokens.shape[1]
    lists, places = (graphs, graphs) if source == "keys" else (heads, max(graphs, key.shape[1]))
    slots, rests = candidate_slots(tokens.shape[2], SINKS), rest_slots(kappa)
    return [
        torch.full((2, batch, places, slots), 3, dtype=torch.int32),
        torch.full((2, batch, lists, slots), torch.nan),
        torch.full((2, batch, lists, rests), 77),
        torch.full((2, batch, lists), torch.nan),
        torch.full((2, *key.shape[:2], key.shape[3]), torch.nan, dtype=key.dtype),
    ]


def picks(state_of, arguments, source, kappa):
    """(neighbor, weight) of the layer, as ``pick_edges`` finds them."""
    candidates = [nominal_state(tensor[LAYER].clone()) for tensor in state_of[:4]]
    first = torch.zeros(state_of[0].shape[1], dtype=torch.int32)
    sizes = (1, state_of[0].shape[2], state_of[1].shape[2], arguments[3].shape[2], SINKS, kappa, source)
    neighbor, weight = ckv.pick_edges(*candidates, first, *sizes)
    return neighbor[0], weight[0]


def check(arguments, source, kappa):
    """Cosines of keys, or eq. 6 in float64, whose denominator holds the attended sinks as well."""
    query, key, _, tokens, count, state, length, first = arguments
    neighbor, weight = run(arguments, source, kappa)
    lists, graphs, kv_heads = neighbor.shape[1], tokens.shape[1], key.shape[1]
    for row in range(query.shape[0]):
        for edge_list in range(lists):
            graph = edge_list * graphs // lists
            own = tokens[row, graph, : count[row, graph]].tolist()
            parts = attended_positions(own, int(state[LAYER, row]), length, first[row], SINKS, WINDOW)
            attended = [p for part in parts for p in part]
            if source == "keys":
                heads = range(kv_heads) if graphs < kv_heads else [graph]
                keys, new = key[row][heads][:, attended].double(), key[row][heads][:, length].double()
                score = torch.cosine_similarity(new[:, None], keys, dim=-1).sum(0)
                attended, score = attended[:-1], score[:-1]  # the token itself is the last
            else:
                keys = key[row, edge_list * kv_heads // lists, attended].double()
                score = torch.softmax(keys @ query[row, edge_list, 0].double() * 0.3, 0)
            score_of = {p: float(s) for p, s in zip(attended, score, strict=True) if p >= first[row] + SINKS}
            best = sorted(score_of.values(), reverse=True)[:kappa]
            listed = neighbor[row, edge_list].tolist()
            assert listed[len(best) :] == [-1] * (kappa - len(best))
            assert len(set(listed[: len(best)])) == len(best)
            assert [score_of[p] for p in listed[: len(best)]] == pytest.approx(best, rel=1e-5, abs=1e-6)
            expected = [1.0] * len(best) if source == "keys" else best
            assert weight[row, edge_list].tolist() == pytest.approx(expected + [0.0] * (kappa - len(best)), rel=1e-5)


@pytest.mark.parametrize(("heads", "graphs"), GROUPINGS)
@pytest.mark.parametrize("kappa", [1, 8])
def test_edges_are_the_strongest_attended_keys_without_sinks(heads, graphs, kappa):
    check(case(heads, graphs), "attention", kappa)


@pytest.mark.parametrize(("heads", "graphs"), [((3, 3), 3), ((6, 3), 1), ((4, 1), 1), ((8, 2), 2)])
@pytest.mark.parametrize("kappa", [1, 8])
def test_edges_are_the_nearest_attended_keys_without_sinks_and_itself(heads, graphs, kappa):
    check(case(heads, graphs), "keys", kappa)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    ("first", "n_indexed", "length"),
    [((0, 0), (0, 0), 60), ((0, 3), (5, 6), 5), ((0, 1), (0, 0), 2), ((0, 5), (60, 0), 63)],
)
def test_short_and_unindexed_rows_list_only_what_they_attend_to(first, n_indexed, length, source):
    check(case(first=first, n_indexed=n_indexed, length=length), source, 8)


@pytest.mark.parametrize("source", SOURCES)
def test_row_of_pads_has_no_edges(source):
    neighbor, weight = run(case(first=(0, 61), n_indexed=(60, 0)), source)
    assert neighbor[1].eq(-1).all()
    assert weight[1].eq(0).all()


def test_low_precision_keys_are_scored_in_float32():
    query, key, value, *rest = case(dtype=torch.bfloat16)
    low = run((query, key, value, *rest), "attention")
    exact = run((query.float(), key.float(), value.float(), *rest), "attention")
    assert torch.equal(low[0], exact[0])
    torch.testing.assert_close(low[1], exact[1])


def test_zero_keys_have_finite_similarity():
    arguments = case(first=(0, 0))
    arguments[1][:, :, :61] = 0
    neighbor, _ = run(arguments, "keys")
    assert neighbor.ge(SINKS).all()
    assert neighbor.lt(60).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kappa": 0}, "kappa must be at least 1, got 0"),
        ({"source": "values"}, "source must be one of .* got values"),
        ({"arguments": case(graphs=6), "source": "keys"}, "tokens must hold 1 list or 2, one per KV head, got 6"),
    ],
)
def test_invalid_argument_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        run(**{"arguments": case(), "source": "attention", **changes})


def zeroed_state(arguments, source):
    return [torch.zeros_like(tensor) for tensor in new_state(arguments, source, 4)]


@pytest.mark.parametrize("source", SOURCES)
def test_opcheck(source):
    query, key, value, tokens, count, state, length, first = case(dim=8)
    torch.library.opcheck(
        ckv.sparse_attention_edges.default,
        (
            query, key.nan_to_num(), value.nan_to_num(), tokens, count, state, CAPACITY, torch.tensor([length]),
            torch.tensor(first, dtype=torch.int32), None, *zeroed_state(case(dim=8), source), LAYER, 0.3, SINKS, WINDOW, 4,
            source,
        ),
    )  # fmt: skip


def described_by(arguments):
    """(capacity, summaries and what describes them, new_value) for these arguments."""
    query, key, _, tokens, _, state, _, first = arguments
    graphs, dim = tokens.shape[1], key.shape[3] * (key.shape[1] if tokens.shape[1] == 1 else 1)
    index = random_index(
        query.shape[0], graphs, dim, first, state[LAYER].tolist(), 9, num_sink_tokens=SINKS, dtype=key.dtype
    )
    summaries = random_summaries(index, 4, LAYER)
    index.centroid_scale.nan_to_num_()
    index.mean_value.nan_to_num_()
    means = (index.centroid, index.centroid_scale, index.channel_scale, index.size, index.mean_value)
    return index.capacity_of(LAYER), (summaries, *means), torch.full((2, *key.shape[:2], key.shape[3]), torch.nan)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("graphs", [2, 1])
def test_communities_change_the_output_but_no_edge_and_the_new_value_is_kept(source, graphs):
    arguments = case(graphs=graphs, first=(0, 0))
    query, key, value, tokens, count, state, length, first = arguments
    neighbor, weight = run(arguments, source)
    capacity, described, new_value = described_by(arguments)
    attended = (
        query, nominal_cache(key), nominal_cache(value), tokens, count, nominal_state(state), capacity,
        torch.tensor([length]), torch.tensor(first, dtype=torch.int32), torch.linspace(-2, 2, query.shape[1]),
    )  # fmt: skip
    new = zeroed_state(arguments, source)
    sizes = (LAYER, 0.3, SINKS, WINDOW)
    out = ckv.sparse_attention_edges(*attended, *new, *sizes, 4, source, *described, new_value)
    again = picks(new, arguments, source, 4)
    assert torch.equal(again[0], neighbor)
    assert torch.equal(again[1], weight)
    assert torch.equal(new_value[LAYER], value[:, :, length])
    assert new_value[0].isnan().all()
    assert torch.equal(out, ckv.sparse_attention(*attended, *sizes, *described))
    assert not torch.allclose(out, ckv.sparse_attention(*attended, *sizes))
    with pytest.raises(ValueError, match="new_value must be given exactly where summaries are"):
        ckv.sparse_attention_edges(*attended, *new, *sizes, 4, source, *described)


def test_opcheck_with_communities():
    arguments = case(dim=8)
    query, key, value, tokens, count, state, length, first = arguments
    capacity, described, new_value = described_by(arguments)
    torch.library.opcheck(
        ckv.sparse_attention_edges.default,
        (
            query, key.nan_to_num(), value.nan_to_num(), tokens, count, state, capacity, torch.tensor([length]),
            torch.tensor(first, dtype=torch.int32), None, *zeroed_state(arguments, "keys"), LAYER, 0.3, SINKS, WINDOW, 4,
            "keys", *described, new_value.nan_to_num(),
        ),
    )  # fmt: skip
