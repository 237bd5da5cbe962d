"""The kernels of ``ckv::route`` against the operator: scores in float64, and what a shortlist must hold."""

import dataclasses

import pytest
import torch

import ckv_compile.ops  # noqa: F401
from ckv_compile import rendered
from ckv_compile.index_layout import PROGRAMS
from ckv_compile.testing import random_index

LAYER, SCALE, LENGTH = 1, 0.3, 50
STATE = ("centroid", "centroid_scale", "channel_scale", "size", "start", "stored", "num_communities")
SMALL = {"PROGRAMS": 2, "RUN": 4, "BLOCK_C": 16, "CHUNK": 32}
QUOTA = 8


def case(device, heads=(4, 2), graphs=2, communities=21, batch=1, dim=64, dtype=torch.float32, seed=0, queries=1):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, heads[0], queries, dim, generator=generator).to(device, dtype)
    width = dim * heads[1] if graphs == 1 else dim
    index = random_index(
        batch, graphs, width, [3] * batch, [2 * communities + 9] * batch, max(communities, 1), num_sink_tokens=4,
        seed=seed, communities_room=communities + 5,
    )  # fmt: skip
    index.num_communities.clamp_(max=communities)
    tensors = {field.name: getattr(index, field.name).to(device) for field in dataclasses.fields(index)}
    return query, type(index)(**tensors)


def check(query, index, heads, graphs, score="max", length=LENGTH, scale=SCALE, **tuned):
    """Scores of the existing communities, and the contract of shortlist and left_out. Returns the scores."""
    tuned = {**SMALL, "QUOTA": QUOTA, **tuned}
    programs, run, quota = tuned["PROGRAMS"], tuned["RUN"], tuned["QUOTA"]
    exact, before = index.clone(), index.clone()
    length = torch.tensor([length], dtype=torch.int32, device=query.device)
    torch.ops.ckv.route(
        query.double(), *(exact.nominal(name) for name in STATE), exact.capacity, exact.nominal("scores"), LAYER,
        graphs, heads[1], scale, score, length, 1024,
    )  # fmt: skip
    shortlist, left_out = rendered.route(
        query, index, LAYER, graphs, heads[1], scale, score, length, programs * quota, **tuned
    )
    for row in range(query.shape[0]):
        for graph in range(graphs):
            number = int(index.num_communities[LAYER, row, graph])
            got, want = index.scores[row, graph], exact.scores[row, graph, :number]
            assert got[number:].isnan().all(), "written beyond the last community"
            assert_close(got[:number], want, score)
            listed = shortlist[row, graph].cpu(), left_out[row, graph].cpu()
            check_list(*listed, got[:number].cpu(), index, row, graph, programs, run, quota)
    for name in STATE:
        assert torch.equal(getattr(index, name).nan_to_num(), getattr(before, name).nan_to_num()), f"{name} changed"
    return index.scores


def assert_close(got, want, score):
    """Queries are read as 15-bit integers: an error is some 3e-5 of the products."""
    assert torch.equal(got == -torch.inf, want == -torch.inf)
    got, want = (torch.where(s == -torch.inf, 0.0, s).double() for s in (got, want))
    if score in ("recency", "random"):
        assert torch.equal(got, want)
    elif score in ("max", "relative"):
        torch.testing.assert_close(got, want, rtol=0, atol=2e-4 * max([1.0, *want.abs().tolist()]))
    else:
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-7)


def check_list(shortlist, left_out, scores, index, row, graph, programs, run, quota):
    sizes, starts, stored = (getattr(index, name)[LAYER, row, graph].cpu() for name in ("size", "start", "stored"))
    known = scores > -torch.inf
    for program in range(programs):
        bits, ident, size, start, held = shortlist[:, program * quota : (program + 1) * quota]
        listed = ident[size > 0].long()
        assert len(listed.unique()) == len(listed)
        assert torch.equal(bits[size > 0], scores.view(torch.int32)[listed])
        assert torch.equal(size[size > 0], sizes[listed])
        assert torch.equal(start[size > 0], starts[listed])
        assert torch.equal(held[size > 0], stored[listed])
        assert size[len(listed) :].eq(0).all(), "entries come first"
        own = torch.arange(len(scores))
        own = own[(own // run % programs == program) & known]
        assert torch.isin(listed, own).all()
        rest = own[~torch.isin(own, listed)]
        assert left_out[program] == (scores[rest].max() if len(rest) else -torch.inf)
        if len(own) <= quota:
            assert len(rest) == 0


GROUPS = [1, 2, 3, 4, 6, 7, 8, 16]  # query heads per KV head


@pytest.mark.parametrize("score", ["max", "softmax"])
@pytest.mark.parametrize("group", GROUPS)
def test_scores_of_groups_of_any_size(device, group, score):
    heads = (group, 1)
    check(*case(device, heads, 1), heads, 1, score)


@pytest.mark.parametrize("score", ["max", "relative", "softmax"])
@pytest.mark.parametrize("graphs", [2, 6, 1], ids=["group", "head", "layer"])
def test_a_graph_per_group_head_or_layer(device, graphs, score):
    query, index = case(device, (6, 2), graphs, batch=2)
    index.num_communities[LAYER, 1, 0] -= 13
    index.size[LAYER, 0, :, 1] = 0
    check(query, index, (6, 2), graphs, score)


@pytest.mark.parametrize("score", ["max", "relative", "softmax"])
@pytest.mark.parametrize(
    ("heads", "graphs", "queries"), [((6, 2), 2, 2), ((6, 2), 6, 5), ((6, 2), 1, 3), ((8, 1), 1, 8)]
)
def test_several_queries_per_row(device, heads, graphs, queries, score):
    query, index = case(device, heads, graphs, batch=2, queries=queries)
    query = query.transpose(1, 2).contiguous().transpose(1, 2)  # as models have it
    check(query, index, heads, graphs, score)


@pytest.mark.parametrize("score", ["max", "softmax"])
@pytest.mark.parametrize("dim", [80, 96, 128, 256])
def test_every_head_dim(device, dim, score):
    check(*case(device, (2, 1), 1, dim=dim), (2, 1), 1, score)


def test_every_dtype_of_the_query(device, dtype):
    query, index = case(device, dtype=dtype)
    check(query.transpose(1, 3).contiguous().transpose(1, 3), index, (4, 2), 2)


@pytest.mark.parametrize("score", ["max", "softmax", "recency", "random"])
@pytest.mark.parametrize("communities", [0, 1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 150])
def test_any_number_of_communities(device, communities, score):
    check(*case(device, (2, 1), 1, communities), (2, 1), 1, score)


@pytest.mark.parametrize("score", ["max", "relative"])
@pytest.mark.parametrize("queries", [1, 3])
def test_shares_in_registers_and_in_memory_list_the_same(device, queries, score):
    query, index = case(device, communities=100, queries=queries)
    length = torch.tensor([LENGTH], dtype=torch.int32, device=device)
    found = []
    for chunk in (32, 64, 128):  # of 52 scores: a part, all, and all in half of it
        tuned = {**SMALL, "CHUNK": chunk, "QUOTA": QUOTA}
        listed = rendered.route(query, index, LAYER, 2, 2, SCALE, score, length, 2 * QUOTA, **tuned)
        found.append((*listed, index.scores.clone()))
    (shortlist, left_out, scores), *others = found
    used = (shortlist[:, :, 2] > 0)[:, :, None].expand_as(shortlist)
    for other in others:
        assert torch.equal(scores.nan_to_num(), other[2].nan_to_num())
        torch.testing.assert_close(left_out, other[1], rtol=1e-6, atol=0)
        assert torch.equal(shortlist[used], other[0][used])


@pytest.mark.parametrize("score", ["max", "recency", "random"])
def test_thousands_of_communities(device, score):
    query, index = case(device, (2, 1), 1, 2500)
    scores = check(query, index, (2, 1), 1, score, QUOTA=64, CHUNK=256, BLOCK_C=128)
    shortlist = check(query, index, (2, 1), 1, score, QUOTA=64, CHUNK=256, BLOCK_C=128)
    assert torch.equal(scores.nan_to_num(), shortlist.nan_to_num()), "equal inputs give equal bits"


def test_a_program_lists_most_of_its_quota(device):
    """Else ``retrieve`` would look at all scores too often."""
    query, index = case(device, (2, 1), 1, 1500)
    length = torch.tensor([LENGTH], dtype=torch.int32, device=device)
    shortlist, _ = rendered.route(query, index, LAYER, 1, 1, SCALE, "max", length, 128, **SMALL, QUOTA=64)
    assert shortlist[0, 0, 2].gt(0).sum() >= 0.6 * 128


@pytest.mark.parametrize("score", ["max", "softmax"])
def test_more_equal_scores_than_fit_are_left_out(device, score):
    query, index = case(device, (2, 1), 1, 60)
    index.centroid[:] = index.centroid[:, :, :, :1].clone()
    index.centroid_scale[:] = index.centroid_scale[:, :, :, :1].clone()
    check(query, index, (2, 1), 1, score)


@pytest.mark.parametrize("score", ["max", "relative", "softmax"])
def test_zero_queries_and_zero_centroids(device, score):
    query, index = case(device, (4, 2), 2)
    query[:, 0] = 0
    index.centroid_scale[LAYER, :, :, 3:6] = 0
    check(query, index, (4, 2), 2, score)


def test_nan_scores_are_not_listed(device):
    query, index = case(device, (4, 2), 2)
    index.centroid_scale[LAYER, 0, 0, 2:9] = torch.nan
    length = torch.tensor([LENGTH], dtype=torch.int32, device=device)
    shortlist, left_out = rendered.route(query, index, LAYER, 2, 2, SCALE, "max", length, 64, **SMALL, QUOTA=32)
    listed = shortlist[0, 0, 1][shortlist[0, 0, 2] > 0]
    assert not set(listed.tolist()) & set(range(2, 9))
    assert left_out.eq(-torch.inf).all()
    assert len(listed) == int((index.size[LAYER, 0, 0, :21] > 0).sum() - (index.size[LAYER, 0, 0, 2:9] > 0).sum())


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("infinite", [1, 5, 60])
def test_infinite_scores_are_the_best(device, infinite):
    query, index = case(device, (1, 1), 1, 60)
    query.abs_()
    index.centroid.abs_()
    index.centroid_scale[LAYER, 0, 0, :infinite] = torch.inf
    length = torch.tensor([LENGTH], dtype=torch.int32, device=device)
    shortlist, left_out = rendered.route(
        query, index, LAYER, 1, 1, SCALE, "max", length, 2 * QUOTA, **SMALL, QUOTA=QUOTA
    )
    scores = index.scores[0, 0, :60].cpu()
    assert scores[:infinite].ge(2.9e38).sum() == (index.size[LAYER, 0, 0, :infinite] > 0).sum()
    check_list(shortlist[0, 0].cpu(), left_out[0, 0].cpu(), scores, index, 0, 0, 2, 4, QUOTA)


@pytest.mark.parametrize("score", ["max", "relative"])
def test_negative_scale_still_takes_the_largest_score(device, score):
    check(*case(device), (4, 2), 2, score, scale=-0.3)


def test_default_configuration(device):
    query, index = case(device, (4, 1), 1, 700, dim=128)
    check(query, index, (4, 1), 1, PROGRAMS=PROGRAMS, RUN=8, BLOCK_C=64, CHUNK=256, QUOTA=16)
