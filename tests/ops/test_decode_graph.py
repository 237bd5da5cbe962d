"""A decode step of several layers, compiled: the operators keep their order and nothing copies the caches or state."""

import re

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

import ckv_compile.ops  # noqa: F401
from ckv_compile.index_layout import CANDIDATES, candidate_slots, rest_slots
from ckv_compile.testing import GARBAGE, IndexState, nominal_cache, nominal_state, random_cache, random_index

ckv = torch.ops.ckv
BATCH, HEADS, KV_HEADS, DIM, LAYERS = 2, 6, 2, 16, 2
SINKS, WINDOW, BUDGET, KAPPA, SLOTS = 4, 6, 30, 3, 128
STATE = tuple(IndexState.__dataclass_fields__)
NOMINAL = 3
CHAIN = ("route", "retrieve", "sparse_attention_edges")  # each before the next, layer by layer


def decode(query, key_new, value_new, length, first, caches, **state):
    """Two layers of append, route, retrieve and attend, then the new token is assigned in both and the step is over."""
    hidden = query
    s = state
    for layer in range(LAYERS):
        key, value = caches[2 * layer], caches[2 * layer + 1]
        new = key_new + hidden[:, ::3]
        ckv.append_kv(key, value, new, value_new, length)
        shortlist, left_out = ckv.route(
            hidden, s["centroid"], s["centroid_scale"], s["channel_scale"], s["size"], s["start"],
            s["stored"], s["num_communities"], s["capacity"], s["scores"], layer, KV_HEADS, KV_HEADS, 0.3, "max",
            length, SLOTS,
        )  # fmt: skip
        tokens, count = ckv.retrieve(
            shortlist, left_out, s["scores"], s["start"], s["stored"], s["size"], s["member"], s["log_community"],
            s["log_first"], s["num_communities"], s["n_indexed"], s["capacity"], length, first, s["tally"], layer,
            BATCH, KV_HEADS, BUDGET, SINKS, WINDOW, True,
        )  # fmt: skip
        attended = ckv.sparse_attention_edges(
            hidden, key, value, tokens, count, s["n_indexed"], s["capacity"], length, first, None,
            *(s[name] for name in CANDIDATES), s["new_key"], layer, 0.3, SINKS, WINDOW, KAPPA, "attention",
        )  # fmt: skip
        hidden = attended + hidden
    kept = (s[name] for name in CANDIDATES)
    edges = ckv.pick_edges(*kept, first, LAYERS, KV_HEADS, HEADS, BUDGET, SINKS, KAPPA, "attention")
    ckv.assign_tokens(
        *edges, s["new_key"], s["centroid"], s["centroid_scale"], s["channel_scale"],
        s["log_mean"], s["mean_at"], s["start"], s["stored"], s["size"], s["num_communities"], s["n_indexed"],
        s["log_community"], s["log_first"], s["label"], s["community_weight"], s["total_weight"], s["edge_neighbor"],
        s["edge_weight"], s["gamma"], s["capacity"], length, first, LAYERS, KV_HEADS, DIM, HEADS, KAPPA, KV_HEADS, SINKS,
        0.5,
    )  # fmt: skip
    length.add_(1)
    return hidden


def build(tokens_room, layout="slab"):
    first, n_indexed = [0, 5], [60, 60]
    index = random_index(
        BATCH, KV_HEADS, DIM, first, n_indexed, 9, num_sink_tokens=SINKS, log_entries=5, lists=HEADS, kappa=KAPPA,
        layers=LAYERS, tokens_room=tokens_room, log_room=24,
    )  # fmt: skip
    caches = [
        random_cache(BATCH, KV_HEADS, tokens_room, DIM, first, 60, layout=layout, seed=seed)
        for seed in range(2 * LAYERS)
    ]
    return index, caches, torch.tensor([60], dtype=torch.int32), torch.tensor(first, dtype=torch.int32)


def clone_cache(cache):
    return torch.empty_strided(cache.shape, cache.stride()).copy_(cache)


def steps(function, index, caches, length, first, count=3):
    torch.manual_seed(0)
    views = [nominal_cache(cache, NOMINAL) for cache in caches]
    state = {name: index.nominal(name) if name != "capacity" else index.capacity for name in STATE}
    slots, rests = candidate_slots(BUDGET, SINKS), rest_slots(KAPPA)
    for name, shape, dtype in (
        ("candidate", (KV_HEADS, slots), torch.int32), ("candidate_score", (HEADS, slots), torch.float32),
        ("candidate_rest", (HEADS, rests), torch.int64), ("candidate_norm", (HEADS,), torch.float32),
    ):  # fmt: skip
        state[name] = nominal_state(torch.full((LAYERS, BATCH, *shape), GARBAGE, dtype=dtype))
    state["new_key"] = nominal_state(torch.full((LAYERS, BATCH, KV_HEADS, DIM), torch.nan))
    outputs = []
    for _ in range(count):
        query = torch.randn(BATCH, HEADS, 1, DIM)
        key_new, value_new = (torch.randn(BATCH, KV_HEADS, 1, DIM) for _ in range(2))
        outputs.append(function(query, key_new, value_new, length, first, views, **state))
    return outputs


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    counters.clear()
    with torch._inductor.config.patch(force_disable_caches=True):  # their keys know nothing of our operators' fakes
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("layout", ["slab", "static"])
def test_compiled_steps_equal_eager_steps_and_copy_no_buffer(fresh_dynamo, layout):
    index, caches, length, first = build(96, layout)
    other = index.clone(), [clone_cache(c) for c in caches], length.clone(), first
    want = steps(decode, index, caches, length, first)
    compiled = torch.compile(decode, fullgraph=True, backend="inductor")
    got, code = run_and_get_code(steps, compiled, *other)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(other[1], caches, strict=True))
    for name in STATE:
        assert torch.equal(getattr(other[0], name).nan_to_num(), getattr(index, name).nan_to_num()), name
    assert (index.n_indexed == 63).all()
    assert int(length) == int(other[2]) == 63

    (body,) = [text[text.index("def call(") :] for text in code]
    nominal_cache_shape = f"({BATCH}, {KV_HEADS}, {NOMINAL}, {DIM})"
    for line in body.splitlines():
        if "empty_strided" in line and "assert_size_stride" not in line:
            shape = line.split("empty_strided")[1]
            assert nominal_cache_shape not in shape, line
            assert "((1, )" not in shape, line  # a flat view of state
    calls = re.findall(r"torch\.ops\.ckv\.(\w+)\.default\(", body)
    assert sorted(calls) == sorted(["append_kv", *CHAIN] * LAYERS + ["pick_edges", "assign_tokens"])
    assert calls[-2:] == ["pick_edges", "assign_tokens"]
    at = {name: [i for i, call in enumerate(calls) if call == name] for name in calls}
    for layer in range(LAYERS):
        places = [at[name][layer] for name in CHAIN]
        assert places == sorted(places)
        assert at["append_kv"][layer] < at["sparse_attention_edges"][layer]


def test_one_compiled_graph_serves_every_capacity_and_length(fresh_dynamo):
    compiled = torch.compile(decode, fullgraph=True, backend="inductor")
    for tokens_room in (96, 160):
        index, caches, length, first = build(tokens_room)
        want = steps(decode, index.clone(), [clone_cache(c) for c in caches], length.clone(), first)
        got = steps(compiled, index, caches, length, first)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert counters["stats"]["unique_graphs"] == 1
