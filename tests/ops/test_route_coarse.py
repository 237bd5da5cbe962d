import math

import pytest
import torch

import ckv_compile.ops  # noqa: F401
from ckv_compile.config import GROUP, CommunityConfig, coarse_from, least_groups
from ckv_compile.index_layout import DEVIATIONS, MOST_COVERAGE, PROGRAMS, coarse_parts, visit_slots
from ckv_compile.reference.route_coarse import part_quota
from ckv_compile.reference.route_coarse import route_coarse as reference
from ckv_compile.testing import random_index

route_coarse = torch.ops.ckv.route_coarse
STATE = ("coarse", "coarse_scale", "channel_scale", "num_grouped", "num_communities")
LAYER = 1


def case(heads=(6, 2), graphs=2, communities=150, dim=12, dtype=torch.float32, queries=1, seed=0):
    torch.manual_seed(seed)
    query = torch.randn(2, heads[0], queries, dim).to(dtype)
    width = dim * heads[1] if graphs == 1 else dim
    tokens = 4 * communities
    index = random_index(2, graphs, width, [0, 3], [tokens, tokens - 9], communities, num_sink_tokens=4, seed=seed)
    return query, index


def call(query, index, graphs=2, kv_heads=2, scale=0.3, least=4, start=16, slots=PROGRAMS, parts=None):
    arguments = (
        query, *(index.nominal(name) for name in STATE), index.capacity, index.nominal("coarse_scores"),
        index.nominal("scores"), LAYER, graphs, kv_heads, scale, least, start, slots,
    )  # fmt: skip
    return route_coarse(*arguments) if parts is None else reference(*arguments, parts)


def bounds(query, index, heads, graphs, scale=0.3):
    """What the best community of each group may reach, in float64: [B, G, K]; one head and query after another."""
    rows, dim = query.shape[0], query.shape[3]
    want = torch.full(index.coarse_scores.shape, -torch.inf, dtype=torch.float64)
    for row in range(rows):
        for graph in range(graphs):
            at = (LAYER, row, graph)
            for group in range(math.ceil(int(index.num_communities[at]) / GROUP)):
                if index.coarse_scale[at][group, 1] < 0:
                    continue
                mean, spread = index.coarse[at][group].double() * index.coarse_scale[at][group, :, None].double()
                for head in range(heads[0]):
                    if head // (heads[0] // graphs) != graph:
                        continue
                    kv_head = head // (heads[0] // heads[1]) if graphs == 1 else 0
                    own = slice(kv_head * dim, (kv_head + 1) * dim)
                    for one in query[row, head].double():
                        weight = one * index.channel_scale[at][own].double() * scale
                        reached = weight @ mean[own] + DEVIATIONS * ((weight * spread[own]) ** 2).sum().sqrt()
                        want[row, graph, group] = max(want[row, graph, group], reached)
    return want


GROUPINGS = [((9, 3), 3), ((9, 3), 9), ((9, 3), 1), ((7, 1), 1), ((8, 2), 2)]


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize(("heads", "graphs"), GROUPINGS)
def test_scores_are_what_the_best_of_a_group_may_reach(heads, graphs, queries):
    query, index = case(heads, graphs, queries=queries)
    call(query, index, graphs, heads[1])
    want = bounds(query, index, heads, graphs)
    torch.testing.assert_close(index.coarse_scores[..., :19].double(), want[..., :19], atol=2e-6, rtol=1e-5)


def test_every_part_lists_its_best():
    query, index = case(communities=300)
    visit, count = call(query, index, parts=4, least=8)
    quota = part_quota(38, 0, 8, 4)
    assert quota == math.ceil(math.ceil(math.sqrt(38 * 8) / 2) / 4) == 3
    assert count.eq(4 * quota).all()
    for row in range(2):
        for graph in range(2):
            scores = index.coarse_scores[row, graph, :38]
            for part in range(4):
                own = list(range(part, 38, 4))
                best = sorted(own, key=lambda group: (-scores[group], -group))[:quota]
                assert visit[row, graph, part * quota : (part + 1) * quota].tolist() == best
            assert visit[row, graph, 4 * quota :].eq(-1).all()
    assert index.scores[..., :300].eq(-torch.inf).all(), "what is not scored counts as excluded"
    assert index.scores[..., 300:].isnan().all()


def test_few_communities_are_left_alone():
    query, index = case()
    index.num_communities[LAYER, 0, 1] = 17
    visit, count = call(query, index, start=17)
    assert count.tolist() == [[8, -1], [8, 8]]
    assert index.scores[0, 1].isnan().all()
    assert index.coarse_scores[0, 1].isnan().all()
    assert visit[0, 1].eq(-1).all()


def test_without_groups_everything_is_left_alone():
    query, index = case()
    index.coarse = index.coarse[:1, :1, :1, :1]
    index.coarse_scale = index.coarse_scale[:1, :1, :1, :1]
    index.num_grouped[LAYER] = 0
    _, count = call(query, index, start=16)
    assert count.eq(-1).all()
    assert index.scores.isnan().all()


def test_equal_groups_are_listed_from_the_last():
    query, index = case()
    index.coarse[:], index.coarse_scale[:] = index.coarse[:, :, :, :1].clone(), index.coarse_scale[:, :, :, :1].clone()
    visit, _ = call(query, index, parts=2, least=4)
    assert visit[0, 0, :6].tolist() == [18, 16, 14, 17, 15, 13]


def test_groups_that_are_not_known_are_listed():
    query, index = case()
    index.coarse_scale[LAYER, 0, 0, 7] = torch.nan
    index.num_grouped[LAYER, 1, 0] = 130  # 130 ... 149 were opened since: groups 16, 17 and 18
    visit, count = call(query, index, parts=1, least=1)
    assert 7 in visit[0, 0, : count[0, 0]]
    assert count[1, 0] == part_quota(19, 3, 1, 1) == 6
    assert {16, 17, 18} <= set(visit[1, 0, :6].tolist())
    assert index.coarse_scores[1, 0, 16:19].eq(3e38).all()


def test_a_group_without_members_is_listed_last():
    query, index = case()
    index.coarse_scale[LAYER, 0, 0, 3, 1] = -1
    visit, count = call(query, index, parts=1, least=18, slots=PROGRAMS)
    assert count[0, 0] == 18
    assert sorted(visit[0, 0, :18].tolist()) == [group for group in range(19) if group != 3]


def test_the_lists_grow_like_a_square_root_up_to_a_bound():
    least = 512
    quotas = {groups: part_quota(groups, 0, least, 1) for groups in (600, 2048, 8192, 32768, 131072, 10**7)}
    assert quotas == {600: 512, 2048: 512, 8192: 1024, 32768: 2048, 131072: 2048, 10**7: 2048}
    assert MOST_COVERAGE * least == 2048


def test_parts_list_some_each():
    assert [coarse_parts(least) for least in (1, 31, 32, 64, 255, 256, 512, 4096)] == [8, 8, 8, 16, 32, 64, 64, 64]


@pytest.mark.parametrize("options", [{}, {"budget": 256}, {"mean_size": 16}, {"graph": "attention"}], ids=str)
def test_there_is_room_for_what_parts_list(options):
    config = CommunityConfig(hierarchy="auto", **options)
    least, slots = least_groups(config), visit_slots(config)
    assert least * GROUP >= config.budget
    assert coarse_from(config) == 4 * GROUP * least
    opened = 4 * config.refresh_interval // GROUP + 2 if config.graph == "attention" else 0
    for parts in (8, 16, 32, 64):
        assert part_quota(10**6, opened, least, parts) <= slots // parts


def test_a_list_as_long_as_the_index_scores_all_of_it():
    query, index = case()
    visit, count = call(query, index, least=PROGRAMS, start=0)
    assert set(visit[0, 0, : count[0, 0]].tolist()) == {-1, *range(19)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"graphs": 3}, r"num_graphs must be 1, the number of KV heads \(2\) or of query heads \(6\), got 3"),
        ({"kv_heads": 4}, "num_kv_heads must divide the 6 query heads, got 4"),
        ({"least": 0}, "least must be at least 1, got 0"),
        ({"slots": 100}, "slots must be a multiple of 64 from 4 on, got 100"),
        ({"least": 65}, "slots must be a multiple of 64 from 65 on, got 64"),
    ],
)
def test_invalid_argument_is_named(change, message):
    query, index = case()
    with pytest.raises(ValueError, match=message):
        call(query, index, **change)


def test_groups_of_another_type_are_refused():
    query, index = case()
    index.coarse = index.coarse.float()
    with pytest.raises(ValueError, match=r"coarse must be int8, got torch\.float32"):
        call(query, index)


def test_opcheck():
    query, index = case(dim=8)
    state = [getattr(index, name).nan_to_num() for name in STATE]
    scores = index.coarse_scores.zero_(), index.scores.zero_()
    arguments = (query, *state, index.capacity, *scores, LAYER, 2, 2, 0.3, 4, 16, PROGRAMS)
    torch.library.opcheck(route_coarse.default, arguments)
