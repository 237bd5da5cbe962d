"""The list of a decode step under every policy: its limits for all of them, and each against its definition."""

import itertools

import pytest
import torch

from ckv_compile.config import TOKEN_POLICIES, CommunityConfig, Policy
from ckv_compile.policies import POLICIES, TokenPolicy
from ckv_compile.testing import bare_sequence, retrieve_step

CAPACITY, PROMPT, SINKS, WINDOW, BUDGET = 200, 150, 3, 9, 60
FIRST = [0, 21]
OPTIONS = {
    "min_context": 0, "workers": 0, "num_sink_tokens": SINKS, "recent_window": WINDOW, "mean_size": 6, "append_block": 16,
    "budget": BUDGET, "max_community_size": 16,
}  # fmt: skip
SCALE = 0.25


def queries_of(tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 4, tokens, 16, generator=generator) * 2


def sequence_of(policy, *, first=FIRST, prompt=PROMPT, **options):
    """Two rows, two layers, 4 query and 2 KV heads; the prompt was seen and is indexed."""
    sequence = bare_sequence(CommunityConfig(policy=policy, **OPTIONS, **options), CAPACITY, batch=2)
    sequence.restart(first)
    for layer in range(2):
        if POLICIES[policy].sees_prompt:
            sequence.observe(layer, queries_of(prompt, layer), sequence.keys(layer)[:, :, :prompt], 0, SCALE)
        sequence.offer(layer, sequence.keys(layer), 0, prompt, None, None)
    sequence.prefilled(prompt)
    sequence.publish()
    assert not sequence.statistics.failures, sequence.statistics.failures
    return sequence


def lists(sequence, query, layer=1, budget=BUDGET):
    tokens, count = retrieve_step(sequence, layer, query, budget, SCALE)
    return [[tokens[r, g, : count[r, g]].tolist() for g in range(tokens.shape[1])] for r in range(2)]


def gap_of(sequence, row):
    """First and end of what may be listed, and the room that a budget leaves for it."""
    tail = max(sequence.first[row], min(int(sequence.index.n_indexed[1, row]), sequence.length + 1 - WINDOW))
    sink_end = min(sequence.first[row] + SINKS, tail)
    return sink_end, tail, BUDGET - (sink_end - sequence.first[row]) - (sequence.length + 1 - tail)


def best(scores, low, room):
    """Positions of the largest scores, which are those of positions ``low ..``; of equals the newer."""
    order = sorted(range(len(scores)), key=lambda i: (float(scores[i]), i), reverse=True)
    return sorted(low + i for i in order[:room])


def grow(sequence, tokens):
    for _ in range(tokens):
        sequence.length += 1
        sequence.length_device.fill_(sequence.length)
        sequence.offer_appended()
        sequence.publish()


# ---------------------------------------------------------------------- all of them


def test_every_name_that_the_options_take_is_a_policy_of_its_kind():
    assert set(Policy.__args__) == set(POLICIES)
    assert {name for name, policy in POLICIES.items() if isinstance(policy, TokenPolicy)} == set(TOKEN_POLICIES)


@pytest.mark.parametrize("aggregation", ["group", pytest.param("layer", marks=pytest.mark.slow)])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_list_holds_indexed_tokens_once_and_keeps_the_budget(policy, queries, aggregation):
    sequence = sequence_of(policy, graph_aggregation=aggregation)
    for grown in (0, 7, 20):  # the last with a further block
        grow(sequence, grown)
        sequence.length_device.fill_(sequence.length)
        for row, graphs in enumerate(lists(sequence, queries_of(queries, grown))):
            low, tail, room = gap_of(sequence, row)
            room -= queries - 1
            for tokens in graphs:
                assert len(set(tokens)) == len(tokens)
                counted = [token for token in tokens if low <= token < tail]
                assert len(tokens) <= room
                if policy in TOKEN_POLICIES:
                    assert counted == tokens == sorted(tokens)
                    assert len(tokens) == min(room, tail - low)
                elif policy != "components":  # whose largest group may fit nothing beside it
                    assert len(tokens) > room - 2 * OPTIONS["max_community_size"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_budget_of_the_context_lists_everything(policy):
    sequence = sequence_of(policy)
    grow(sequence, 23)
    context = sequence.length + 1
    for row, graphs in enumerate(lists(sequence, queries_of(1), budget=context)):
        low, tail, _ = gap_of(sequence, row)
        for tokens in graphs:
            assert set(range(low, tail)) <= set(tokens)


@pytest.mark.parametrize("policy", POLICIES)
def test_attention_over_a_list_of_the_context_is_dense_attention(policy):
    sequence = sequence_of(policy)
    query, at = queries_of(1), sequence.index.nominal
    key, value = sequence.keys(1), sequence.values(1)
    tokens, count = retrieve_step(sequence, 1, query, CAPACITY, SCALE)
    out = torch.ops.ckv.sparse_attention(
        query, key, value, tokens, count, at["n_indexed"], at["capacity_1"], sequence.length_device,
        sequence.first_device, None, 1, SCALE, SINKS, WINDOW,
    )  # fmt: skip
    for row, first in enumerate(FIRST):
        seen = slice(first, PROMPT + 1)
        want = torch.nn.functional.scaled_dot_product_attention(
            query[row : row + 1],
            key[row : row + 1, :, seen],
            value[row : row + 1, :, seen],
            enable_gqa=True,
            scale=SCALE,
        )
        torch.testing.assert_close(out[row : row + 1], want)


@pytest.mark.parametrize("policy", TOKEN_POLICIES)
def test_the_tally_counts_what_is_attended_and_the_context(policy):
    sequence = sequence_of(policy)
    sequence.index.tally.zero_()
    found = lists(sequence, queries_of(1))
    attended = 0
    for row, graphs in enumerate(found):
        low, tail, _ = gap_of(sequence, row)
        attended += sum(len(tokens) + low - FIRST[row] + PROMPT + 1 - tail for tokens in graphs)
    assert sequence.index.tally[1].tolist() == [attended, 2 * sum(PROMPT + 1 - first for first in FIRST)]


# Communities remember the resolutions of earlier partitions, and random pages are drawn by the position.
@pytest.mark.parametrize("policy", [name for name in POLICIES if name not in ("communities", "random")])
def test_a_crop_forgets_what_lay_behind(policy):
    """After a crop and other tokens in place of the old ones, lists are those of a cache that never held them."""
    sequence, other = sequence_of(policy), sequence_of(policy)
    query = queries_of(1, seed=5)
    grow(sequence, 20)
    lists(sequence, query)
    sequence.truncate(PROMPT)
    grow(sequence, 20)
    grow(other, 20)
    for layer in range(2):
        assert lists(sequence, query, layer) == lists(other, query, layer)


def test_a_policy_that_forms_groups_lists_no_tokens_itself():
    sequence = sequence_of("communities")
    at = sequence.index.nominal
    with pytest.raises(ValueError, match=r"policy must be one of .*'quest'.*, got 'communities'"):
        torch.ops.ckv.select_tokens(
            queries_of(1), sequence.keys(0), at["n_indexed"], at["capacity_0"], sequence.length_device,
            sequence.first_device, at["tally"], None, None, None, None, None, "communities", 0, SCALE, 2, BUDGET, SINKS,
            WINDOW, 1,
        )  # fmt: skip


# ---------------------------------------------------------------------- each by its definition


def each_list(sequence, query):
    """(row, graph, what was listed, keys of the graph up to the query, its heads' queries [2, 16], low, tail, room)."""
    found = lists(sequence, query)
    for row, graph in itertools.product(range(2), range(2)):
        keys = sequence.keys(1)[row, graph, : sequence.length + 1]
        yield row, graph, found[row][graph], keys, query[row, 2 * graph : 2 * graph + 2, 0], *gap_of(sequence, row)


def attention(query, keys, first):
    """Softmax over positions ``first ..``, at their own places: [heads, n]."""
    scores = (query @ keys.T) * SCALE
    scores[:, :first] = -torch.inf
    return scores.softmax(-1)


def test_oracle_lists_what_the_heads_attend_to_most():
    for row, _, tokens, keys, query, low, tail, room in each_list(sequence_of("oracle"), queries_of(1)):
        assert tokens == best(attention(query, keys, FIRST[row]).sum(0)[low:tail], low, room)


def test_sparq_reads_the_largest_channels_of_the_query():
    for row, _, tokens, keys, query, low, tail, room in each_list(sequence_of("sparq"), queries_of(1)):
        channels = query.abs().sum(0).topk(4).indices
        share = query[:, channels].abs().sum(-1) / query.abs().sum(-1)
        scaled = query[:, channels] / share.sqrt()[:, None]
        assert tokens == best(attention(scaled, keys[:, channels], FIRST[row]).sum(0)[low:tail], low, room)


def page_bound(query, keys, page, sink_end, stop):
    members = keys[max(16 * page, sink_end) : min(16 * page + 16, stop)]
    return torch.maximum(query * members.amin(0), query * members.amax(0)).sum(-1)


def test_quest_lists_pages_by_the_bound_of_their_keys():
    for row, _, tokens, keys, query, low, tail, room in each_list(sequence_of("quest"), queries_of(1)):
        bounds = [
            max(page_bound(q, keys, p // 16, FIRST[row] + SINKS, PROMPT) for q in query) for p in range(low, tail)
        ]
        assert tokens == best(bounds, low, room)


def test_quest_keeps_pages_right_that_were_not_full():
    sequence = sequence_of("quest")
    grow(sequence, 20)
    for layer, row, group in itertools.product(range(2), range(2), range(2)):
        keys, stop = sequence.keys(layer)[row, group], int(sequence.index.n_indexed[layer, row])
        assert stop > PROMPT
        for page in range((FIRST[row] + SINKS) // 16, -(-stop // 16)):
            members = keys[max(16 * page, FIRST[row] + SINKS) : min(16 * page + 16, stop)]
            assert torch.equal(sequence.index.page_low[layer, row, group, page], members.amin(0))
            assert torch.equal(sequence.index.page_high[layer, row, group, page], members.amax(0))


def freekv_list(query, keys, row, low, tail, room):
    pages = range(low // 16, -(-tail // 16))
    bounds = torch.stack(
        [torch.stack([page_bound(q, keys, p, FIRST[row] + SINKS, PROMPT) for p in pages]) for q in query]
    )
    share = (bounds * SCALE).softmax(-1).mean(0)
    return best([share[p // 16 - low // 16] for p in range(low, tail)], low, room)


def test_freekv_lists_what_the_step_before_would_have():
    sequence = sequence_of("freekv")
    one, other = queries_of(1, seed=1), queries_of(1, seed=2)
    near = one + 0.3 * other  # of every head closer than tau
    assert torch.nn.functional.cosine_similarity(one, near, dim=-1).min() > 0.8
    for before, present, used in ((None, one, one), (one, near, one), (near, other, other)):
        differs = 0
        for row, graph, tokens, keys, query, low, tail, room in each_list(sequence, present):
            own = used[row, 2 * graph : 2 * graph + 2, 0]
            assert tokens == freekv_list(own, keys, row, low, tail, room)
            differs += tokens != freekv_list(query, keys, row, low, tail, room)
        assert differs > 0 or before is not one


def test_tokenselect_lets_all_heads_vote_and_keeps_the_selection_of_a_like_query():
    sequence = sequence_of("tokenselect")
    one, other = queries_of(1, seed=1), queries_of(1, seed=2)
    near, nearer = one + 0.4 * other, one + 0.35 * other
    for query, used in ((one, one), (near, one), (nearer, one), (other, other)):
        for row, _, tokens, _, _, low, tail, room in each_list(sequence, query):
            keys = sequence.keys(1)[row, :, : PROMPT + 1]
            total = sum(attention(used[row, 2 * g : 2 * g + 2, 0], keys[g], FIRST[row]).sum(0) for g in range(2))
            assert tokens == best(total[low:tail], low, room)
    assert lists(sequence_of("tokenselect"), near) != lists(sequence_of("tokenselect"), one)


def prompt_attention(row, graph, layer=1):
    """Causal probabilities of the graph's two heads over the prompt: [2, n, n]; queries of padding give zeros."""
    keys = bare_sequence(CommunityConfig(**OPTIONS), CAPACITY, batch=2).keys(layer)[row, graph, :PROMPT]
    query = queries_of(PROMPT, layer)[row, 2 * graph : 2 * graph + 2]
    scores = (query @ keys.T) * SCALE
    allowed = torch.ones(PROMPT, PROMPT, dtype=torch.bool).tril()
    allowed[:, : FIRST[row]] = False
    return scores.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num(0.0), keys


def test_h2o_lists_what_the_prompt_attended_to():
    for row, graph, tokens, _, _, low, tail, room in each_list(sequence_of("h2o"), queries_of(1)):
        probability, _ = prompt_attention(row, graph)
        assert tokens == best(probability.sum((0, 1))[low:tail], low, room)


def pooled_votes(row, graph):
    probability, keys = prompt_attention(row, graph)
    votes = probability[:, -32:].sum((0, 1))
    inside = range(FIRST[row], PROMPT)
    means = [sum(votes[p] for p in range(at - 3, at + 4) if p in inside) / 7 for at in range(PROMPT)]
    return torch.tensor([float(mean) if at in inside else 0.0 for at, mean in enumerate(means)]), keys


def close_enough(tokens, scores, low, room):
    """The list of ``best``, up to positions whose scores are equal in float32."""
    want = best(scores, low, room)
    unlike = set(tokens) ^ set(want)
    threshold = min(float(scores[t - low]) for t in want)
    assert len(tokens) == len(want)
    assert all(abs(float(scores[t - low]) - threshold) < 1e-5 for t in unlike), unlike


def test_snapkv_lists_what_the_end_of_the_prompt_looks_at():
    for row, graph, tokens, _, _, low, tail, room in each_list(sequence_of("snapkv"), queries_of(1)):
        close_enough(tokens, pooled_votes(row, graph)[0][low:tail], low, room)


def test_graphkv_drops_what_is_like_a_stronger_token():
    sequence, kept = sequence_of("graphkv"), lists(sequence_of("snapkv"), queries_of(1))
    for row, graph, tokens, _, _, low, tail, room in each_list(sequence, queries_of(1)):
        votes, keys = pooled_votes(row, graph)
        sources = votes.topk(PROMPT // 16).indices
        unit = torch.nn.functional.normalize(keys, dim=-1)
        decayed = votes * (1 - (unit @ unit[sources].T).amax(-1).clamp(0, 1))
        decayed[sources] = votes[sources]
        close_enough(tokens, decayed[low:tail], low, room)
        assert tokens != kept[row][graph]


@pytest.mark.parametrize("policy", ["h2o", "snapkv", "graphkv"])
def test_eviction_keeps_what_was_generated_since(policy):
    sequence = sequence_of(policy)
    grow(sequence, 30)
    for row, graphs in enumerate(lists(sequence, queries_of(1))):
        _, tail, room = gap_of(sequence, row)
        assert PROMPT < tail < PROMPT + room
        assert all(set(range(PROMPT, tail)) < set(tokens) for tokens in graphs)


@pytest.mark.parametrize("policy", ["h2o", "snapkv"])
def test_h2o_adds_up_over_prefills_and_snapkv_votes_anew(policy):
    split, query = 90, queries_of(PROMPT, 1)
    sequence, whole = (sequence_of(policy, first=[0, 0]) for _ in range(2))
    sequence.truncate(0)
    for begin, end in ((0, split), (split, PROMPT)):
        sequence.observe(1, query[:, :, begin:end], sequence.keys(1)[:, :, :end], begin, SCALE)
    found, want = (one.index.importance[1, ..., :PROMPT] for one in (sequence, whole))
    torch.testing.assert_close(found, want)


def test_neighborhoods_take_seeds_one_by_one_with_all_within_a_hop():
    for row, graph, tokens, keys, query, low, tail, room in each_list(sequence_of("neighborhoods"), queries_of(1)):
        unit = torch.nn.functional.normalize(keys, dim=-1)
        begin, near = FIRST[row] + SINKS, {}
        for token in range(begin, PROMPT):
            earlier = unit[begin:token] @ unit[token]
            near[token] = (earlier.topk(min(3, len(earlier))).indices + begin).tolist()
        linked = {token: {*others} | {t for t in near if token in near[t]} for token, others in near.items()}
        score = (query @ keys.T).amax(0)
        line = sorted(range(low, tail), key=lambda t: -float(score[t]))
        taken: list[int] = []
        for seed in line:
            own = [t for t in line if t == seed or t in linked[seed]]
            taken += [t for t in own if t not in taken]
        assert tokens == sorted(taken[:room]), (row, graph)


def test_streaming_lists_the_newest_pages_and_random_ones_change_from_step_to_step():
    sequence = sequence_of("streaming")
    for row, _, tokens, _, _, _low, _tail, room in each_list(sequence, queries_of(1)):
        assert tokens == list(range(tokens[0], PROMPT))
        assert room - 16 < len(tokens) <= room
        assert (tokens[0] - FIRST[row] - SINKS) % 16 == 0
    sequence = sequence_of("random")
    first = lists(sequence, queries_of(1))
    assert lists(sequence, queries_of(1, seed=3)) == first
    grow(sequence, 1)
    assert lists(sequence, queries_of(1)) != first
