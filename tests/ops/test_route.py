import pytest
import torch

import ckv_compile.ops  # noqa: F401
from ckv_compile.index_layout import PROGRAMS
from ckv_compile.testing import random_index

route = torch.ops.ckv.route
STATE = ("centroid", "centroid_scale", "channel_scale", "size", "start", "stored", "num_communities")


def call(query, index, graphs, kv_heads, score="max", layer=1, scale=0.3, length=50, slots=1024):
    return route(
        query, *(index.nominal(name) for name in STATE), index.capacity, index.nominal("scores"), layer, graphs,
        kv_heads, scale, score, torch.tensor([length]), slots,
    )  # fmt: skip


def run(query, index, *arguments, **options):
    call(query, index, *arguments, **options)
    return index.scores


def case(heads, graphs, communities=11, dtype=torch.float32, dim=80, queries=1):
    torch.manual_seed(0)
    query = torch.randn(2, heads[0], queries, dim).to(dtype)
    width = dim * heads[1] if graphs == 1 else dim
    index = random_index(2, graphs, width, [0, 3], [50, 40], communities, num_sink_tokens=4, log_entries=5, dtype=dtype)
    index.num_communities[1, 1, 0] -= 2
    index.size[1, 0, :, 1] = 0
    return query, index


def oracle(query, index, heads, graphs, score, layer=1, scale=0.3):
    rows, dim = query.shape[0], query.shape[3]
    want = torch.full(index.scores.shape, -torch.inf, dtype=torch.float64)
    for row in range(rows):
        for graph in range(graphs):
            number = int(index.num_communities[layer, row, graph])
            ids = [c for c in range(number) if index.size[layer, row, graph, c] > 0]
            rows_of = []  # per head and query
            for head in range(heads[0]):
                if head // (heads[0] // graphs) != graph:
                    continue
                centroids = index.centroid[layer, row, graph].double() * index.channel_scale[layer, row, graph].double()
                centroids *= index.centroid_scale[layer, row, graph, :, None].double()
                if graphs == 1:
                    kv_head = head // (heads[0] // heads[1])
                    centroids = centroids[:, kv_head * dim : (kv_head + 1) * dim]
                for one in query[row, head].double():
                    products = torch.stack([centroids[c] @ one * scale for c in ids])
                    if score == "relative":
                        part = head // (heads[0] // heads[1]) if graphs == 1 else 0
                        channels = index.channel_scale[layer, row, graph].double()[part * dim : (part + 1) * dim]
                        products /= (one * channels * scale).norm()
                    rows_of.append(torch.softmax(products, 0) if score == "softmax" else products)
            stacked = torch.stack(rows_of)
            want[row, graph, ids] = stacked.sum(0) if score == "softmax" else stacked.amax(0)
    return want


GROUPINGS = [((9, 3), 3), ((9, 3), 9), ((9, 3), 1), ((7, 1), 1), ((8, 2), 2), ((8, 8), 8), ((12, 4), 4)]


@pytest.mark.parametrize("score", ["max", "relative", "softmax"])
@pytest.mark.parametrize(("heads", "graphs"), GROUPINGS)
def test_score_combines_the_heads_of_a_graph(heads, graphs, score):
    query, index = case(heads, graphs)
    got = run(query, index, graphs, heads[1], score).double()
    torch.testing.assert_close(got, oracle(query, index, heads, graphs, score), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("queries", [2, 8])
@pytest.mark.parametrize("score", ["max", "relative", "softmax"])
@pytest.mark.parametrize(("heads", "graphs"), GROUPINGS)
def test_score_combines_the_queries_of_a_row(heads, graphs, score, queries):
    query, index = case(heads, graphs, queries=queries)
    got = run(query, index, graphs, heads[1], score).double()
    torch.testing.assert_close(got, oracle(query, index, heads, graphs, score), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_queries_are_scored_in_float32(dtype):
    query, index = case((6, 2), 2, dtype=dtype)
    got = run(query, index, 2, 2).double()
    torch.testing.assert_close(got, oracle(query, index, (6, 2), 2, "max"), atol=2e-6, rtol=1e-5)


def test_negative_scale_still_takes_the_largest_score():
    query, index = case((6, 2), 2)
    got = run(query, index, 2, 2, scale=-0.3).double()
    torch.testing.assert_close(got, oracle(query, index, (6, 2), 2, "max", scale=-0.3), atol=2e-6, rtol=1e-5)


def test_recency_prefers_the_youngest_community():
    query, index = case((6, 2), 2)
    got = run(query, index, 2, 2, "recency")
    assert got[0, 0].tolist() == [0, -torch.inf, 2, 3, 4, 5, 6, 7, 8, 9, 10, -torch.inf, -torch.inf, -torch.inf]
    assert got[1, 0, 8:].tolist() == [8, *[-torch.inf] * 5]


def test_random_scores_depend_on_id_length_and_layer_only():
    query, index = case((6, 2), 2, communities=300)
    index.size.clamp_(min=1)
    once = run(query, index, 2, 2, "random").clone()
    assert torch.equal(run(query + 1, index, 2, 2, "random"), once)
    used = once[0, 0, :300]
    assert used.ge(0).all()
    assert used.lt(1).all()
    assert len(used.unique()) == 300
    assert 0.4 < used.mean() < 0.6
    for other in (run(query, index, 2, 2, "random", length=51), run(query, index, 2, 2, "random", layer=0)):
        assert (other[0, 0, :300] != used).sum() > 290


def test_random_score_has_this_value():
    """Kernels repeat the hash bit for bit, so it may not change."""

    def scalar(community, length, layer):
        word = 2**32 - 1
        x = (community * 0x9E3779B1 + length * 0x85EBCA77 + layer * 0xC2B2AE3D) & word
        x = (x ^ x >> 16) * 0x7FEB352D & word
        x = (x ^ x >> 15) * 0x846CA68B & word
        return ((x ^ x >> 16) >> 8) / 2**24

    query, index = case((6, 2), 2)
    index.size.clamp_(min=1)
    got = run(query, index, 2, 2, "random", length=131_071)
    assert got[1, 1, :11].tolist() == [scalar(c, 131_071, 1) for c in range(11)]


@pytest.mark.parametrize("score", ["max", "softmax", "recency", "random"])
def test_index_without_communities_scores_nothing(score):
    query, index = case((6, 2), 2)
    index.num_communities.zero_()
    assert run(query, index, 2, 2, score).eq(-torch.inf).all()


def test_state_behind_a_copied_view_raises():
    query, index = case((6, 2), 2)
    index.centroid = index.centroid.flatten()[:8].clone()
    with pytest.raises(ValueError, match="centroid must be a view of a buffer"):
        run(query, index, 2, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"score": "best"}, "score must be one of 'max', 'relative', 'softmax', 'recency', 'random', got 'best'"),
        ({"graphs": 3}, r"num_graphs must be 1, the number of KV heads \(2\) or of query heads \(6\), got 3"),
        ({"kv_heads": 4}, "num_kv_heads must divide the 6 query heads, got 4"),
        ({"slots": 96}, "slots must be a power of 2 from 64 on, got 96"),
        ({"slots": 32}, "slots must be a power of 2 from 64 on, got 32"),
    ],
)
def test_invalid_argument_is_named(change, message):
    query, index = case((6, 2), 2)
    with pytest.raises(ValueError, match=message):
        run(query, index, **{"graphs": 2, "kv_heads": 2, **change})


def test_centroids_of_another_type_are_refused():
    query, index = case((6, 2), 2)
    index.centroid = index.centroid.float()
    with pytest.raises(ValueError, match=r"centroid must be int8, got torch\.float32"):
        run(query, index, 2, 2)


def test_the_reference_lists_nothing_and_says_so():
    query, index = case((6, 2), 2)
    shortlist, left_out = call(query, index, 2, 2, slots=256)
    assert shortlist.shape == (2, 2, 5, 256)
    assert shortlist[:, :, 2].eq(0).all()
    assert left_out.shape == (2, 2, PROGRAMS)
    assert left_out.eq(torch.inf).all()


@pytest.mark.parametrize("score", ["max", "random"])
def test_opcheck(score):
    query, index = case((6, 2), 2, dim=8)
    state = [getattr(index, name).nan_to_num() for name in STATE]
    arguments = (query, *state, index.capacity, index.scores.zero_(), 1, 2, 2, 0.3, score, torch.tensor([50]), 128)
    torch.library.opcheck(route.default, arguments)
