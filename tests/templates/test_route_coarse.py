"""The kernel of ``ckv::route_coarse`` against its definition, and that of ``ckv::route`` over the groups it lists."""

import dataclasses

import pytest
import torch

import ckv_compile.ops  # noqa: F401
from ckv_compile import rendered
from ckv_compile.index_layout import GROUP, PROGRAMS
from ckv_compile.reference.route_coarse import route_coarse
from ckv_compile.testing import group_index, random_index

LAYER, SCALE, LENGTH = 1, 0.3, 50
STATE = ("coarse", "coarse_scale", "channel_scale", "num_grouped", "num_communities")
FINE = ("centroid", "centroid_scale", "channel_scale", "size", "start", "stored", "num_communities")
SMALL = {"PROGRAMS": 2, "BLOCK_K": 16, "CHUNK": 16}


def case(device, heads=(4, 2), graphs=2, communities=150, batch=1, dim=64, dtype=torch.float32, seed=0, queries=1):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, heads[0], queries, dim, generator=generator).to(device, dtype)
    width = dim * heads[1] if graphs == 1 else dim
    index = random_index(
        batch, graphs, width, [3] * batch, [2 * communities + 9] * batch, communities, num_sink_tokens=4, seed=seed,
        communities_room=communities + 5,
    )  # fmt: skip
    return query, moved(index, device)


def moved(index, device):
    return type(index)(**{f.name: getattr(index, f.name).to(device) for f in dataclasses.fields(index)})


def check(query, index, heads, graphs, least=4, start=16, slots=PROGRAMS, scale=SCALE, **tuned):
    """Scores to what 16 bits allow; the lists are those that the definition makes of the kernel's own scores."""
    tuned = {**SMALL, **tuned}
    parts, exact, before = tuned["PROGRAMS"], index.clone(), index.clone()
    sizes = (LAYER, graphs, heads[1], scale, least, start, slots)
    want_visit, want_count = route_coarse(
        query.double(), *(exact.nominal(name) for name in STATE), exact.capacity, exact.nominal("coarse_scores"),
        exact.nominal("scores"), *sizes, parts,
    )  # fmt: skip
    visit, count = rendered.route_coarse(query, index, LAYER, graphs, heads[1], scale, least, start, slots, **tuned)
    assert torch.equal(count, want_count)
    assert torch.equal(index.scores.isnan(), exact.scores.isnan())
    assert torch.equal(index.scores == -torch.inf, exact.scores == -torch.inf)
    for row in range(query.shape[0]):
        for graph in range(graphs):
            at, listed = (row, graph), int(count[row, graph])
            groups = -(-int(index.num_communities[LAYER, row, graph]) // GROUP)
            if listed < 0:
                assert index.coarse_scores[at].isnan().all()
                continue
            got, want = index.coarse_scores[at][:groups], exact.coarse_scores[at][:groups]
            assert index.coarse_scores[at][groups:].isnan().all(), "written beyond the last group"
            assert torch.equal(got.abs() >= 3e38, want.abs() >= 3e38)
            usual = want.abs() < 3e38
            # q, its square and the square of a spread are rounded to 11 bits, sums are of some size of the largest term
            largest = float(want[usual].abs().max()) if usual.any() else 0.0
            torch.testing.assert_close(got[usual], want[usual], rtol=0, atol=2e-3 * max(1.0, largest))
            for part in range(parts):
                quota, own = listed // parts, list(range(part, groups, parts))
                best = sorted(own, key=lambda group, got=got: (-float(got[group]), -group))[:quota]
                best += [-1] * (quota - len(best))
                assert visit[at][part * quota : (part + 1) * quota].tolist() == best
    for name in (*STATE, *FINE):
        assert torch.equal(getattr(index, name).nan_to_num(), getattr(before, name).nan_to_num()), f"{name} changed"
    return visit, count, want_visit


@pytest.mark.parametrize("group", [1, 2, 3, 7, 16])
def test_groups_of_heads_of_any_size(device, group):
    check(*case(device, (group, 1), 1), (group, 1), 1)


@pytest.mark.parametrize("graphs", [2, 6, 1], ids=["group", "head", "layer"])
def test_a_graph_per_group_head_or_layer(device, graphs):
    query, index = case(device, (6, 2), graphs, batch=2)
    index.num_communities[LAYER, 1, 0] -= 13
    check(query, index, (6, 2), graphs)


@pytest.mark.parametrize(("heads", "graphs", "queries"), [((6, 2), 2, 2), ((6, 2), 1, 3), ((8, 1), 1, 8)])
def test_several_queries_per_row(device, heads, graphs, queries):
    query, index = case(device, heads, graphs, batch=2, queries=queries)
    check(query.transpose(1, 2).contiguous().transpose(1, 2), index, heads, graphs)


@pytest.mark.parametrize("dim", [80, 128, 256])
def test_every_head_dim(device, dim):
    check(*case(device, (2, 1), 1, dim=dim), (2, 1), 1)


def test_every_dtype_of_the_query(device, dtype):
    query, index = case(device, dtype=dtype)
    check(query.transpose(1, 3).contiguous().transpose(1, 3), index, (4, 2), 2)


@pytest.mark.parametrize("communities", [16, 17, 24, 25, 128, 129, 300, 700])
def test_any_number_of_communities(device, communities):
    check(*case(device, (2, 1), 1, communities), (2, 1), 1)


def test_without_groups_everything_is_left_alone(device):
    query, index = case(device, (4, 2), 2)
    index.num_grouped[LAYER, 0, 0] = 0
    _, count, _ = check(query, index, (4, 2), 2)
    assert count.tolist() == [[-1, 6]]


def test_more_groups_than_are_compared_at_a_time(device):
    visit, _, _ = check(*case(device, (2, 1), 1, 1200), (2, 1), 1, slots=2 * PROGRAMS, least=32)
    again, _, _ = check(*case(device, (2, 1), 1, 1200), (2, 1), 1, slots=2 * PROGRAMS, least=32)
    assert torch.equal(visit, again), "equal inputs give equal bits"


def test_groups_that_decode_steps_opened_are_listed(device):
    query, index = case(device, (4, 2), 2)
    index.num_grouped[LAYER, 0, 0] = 100
    visit, count, _ = check(query, index, (4, 2), 2)
    assert set(range(12, 19)) <= set(visit[0, 0, : count[0, 0]].tolist())


def test_equal_empty_and_unknown_groups(device):
    query, index = case(device, (4, 2), 2)
    index.coarse[LAYER, 0, 0, 2:9] = index.coarse[LAYER, 0, 0, 2].clone()
    index.coarse_scale[LAYER, 0, 0, 2:9] = index.coarse_scale[LAYER, 0, 0, 2].clone()
    index.coarse_scale[LAYER, 0, 1, 4:7, 1] = -1
    index.coarse_scale[LAYER, 0, 1, 10] = torch.nan
    check(query, index, (4, 2), 2)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_zero_and_infinite_queries(device):
    query, index = case(device, (4, 2), 2)
    query[:, 0] = 0
    check(query, index, (4, 2), 2)
    query, index = case(device, (4, 2), 2)
    query[:, 2, :, 5] = torch.inf
    check(query, index, (4, 2), 2)


def test_negative_scale_still_takes_the_largest_score(device):
    check(*case(device), (4, 2), 2, scale=-0.3)


def test_default_configuration(device):
    query, index = case(device, (4, 1), 1, 700, dim=128)
    check(query, index, (4, 1), 1, least=16, slots=4 * PROGRAMS, PROGRAMS=PROGRAMS, BLOCK_K=32, CHUNK=128)


# ---------------------------------------------------------------------- scores of the listed groups


def routed(query, index, graphs, kv_heads, visit=None, **tuned):
    length = torch.tensor([LENGTH], dtype=torch.int32, device=query.device)
    tuned = {"PROGRAMS": 2, "RUN": 1, "BLOCK_C": 16, "CHUNK": 16, "QUOTA": 64, **tuned}
    return rendered.route(query, index, LAYER, graphs, kv_heads, SCALE, "max", length, 128, visit, **tuned)


@pytest.mark.parametrize("communities", [40, 150, 333])
def test_listed_communities_get_the_scores_they_would_have_anyway(device, communities):
    query, index = case(device, (4, 2), 2, communities, batch=2)
    index.size[LAYER, 0, :, 1] = 0
    whole = index.clone()
    routed(query, whole, 2, 2)
    visit = rendered.route_coarse(query, index, LAYER, 2, 2, SCALE, 2, 8, PROGRAMS, **SMALL)
    exact = index.clone()
    torch.ops.ckv.route(
        query.double(), *(exact.nominal(name) for name in FINE), exact.capacity, exact.nominal("scores"), LAYER, 2, 2,
        SCALE, "max", torch.tensor([LENGTH], dtype=torch.int32), 128, *visit,
    )  # fmt: skip
    shortlist, left_out = routed(query, index, 2, 2, visit)
    for at in ((row, graph) for row in range(2) for graph in range(2)):
        listed = {group for group in visit[0][at][: visit[1][at]].tolist() if group >= 0}
        own = torch.tensor([c // GROUP in listed for c in range(communities)])
        got = index.scores[at][:communities].cpu()
        assert torch.equal(got[own], whole.scores[at][:communities].cpu()[own])
        assert got[~own].eq(-torch.inf).all()
        assert torch.equal(got > -torch.inf, exact.scores[at][:communities].cpu() > -torch.inf)
        bits, ident, size, _, _ = shortlist[at].cpu()
        found = ident[size > 0].long()
        assert len(found.unique()) == len(found)
        assert torch.equal(bits[size > 0].view(torch.float32), got[found])
        rest = torch.ones(communities, dtype=torch.bool)
        rest[found] = False
        assert left_out[at].max() == got[rest].max()


@pytest.mark.parametrize("run", [1, 8])
def test_without_a_list_everything_is_as_it_was(device, run):
    query, index = case(device, (4, 2), 2, 333)
    visit = rendered.route_coarse(query, index, LAYER, 2, 2, SCALE, 2, 333, PROGRAMS, **SMALL)
    assert visit[1].eq(-1).all()
    plain = index.clone()
    want, got = (routed(query, one, 2, 2, listed, QUOTA=16, RUN=run) for one, listed in ((plain, None), (index, visit)))
    sizes = want[0][:, :, 2] > 0
    assert torch.equal(sizes, got[0][:, :, 2] > 0)
    assert torch.equal(want[0].movedim(2, 3)[sizes], got[0].movedim(2, 3)[sizes])
    assert torch.equal(want[1], got[1])
    assert torch.equal(plain.scores.nan_to_num(), index.scores.nan_to_num())


def test_new_communities_of_groups_are_scored(device):
    """What decode steps opened has a score although its group's mean does not know of it."""
    query, index = case(device, (4, 2), 2)
    index.num_communities[LAYER] = 141
    group_index(index)
    index.num_communities[LAYER] = 150
    visit = rendered.route_coarse(query, index, LAYER, 2, 2, SCALE, 1, 8, PROGRAMS, **SMALL)
    routed(query, index, 2, 2, visit)
    assert (index.scores[..., 136:150] > -torch.inf).eq(index.size[LAYER, ..., 136:150] > 0).all()
