"""Which attention of real models is found, and that a site says what its graph computes."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, fx

from ckv_compile.passes.match_attention import AttentionSite, Cache, find_sites
from ckv_compile.testing import (
    FULL_ATTENTION_FAMILIES,
    Captured,
    CaptureGraphs,
    capture_call,
    capture_generate,
    prompt,
    tiny_model,
)


@functools.cache
def generated(family: str, cache: str, padded: bool, implementation: str = "sdpa") -> tuple[Captured, ...]:
    return tuple(capture_generate(tiny_model(family, implementation), prompt(padded=padded), cache=cache))


def matched(captured: Captured, family: str, layers: int = 2) -> list[AttentionSite]:
    sites, refusals = find_sites(captured.gm)
    reasons = "; ".join(f"{r.name}: {r.reason}" for r in refusals)
    assert len(sites) == layers, f"{len(sites)} of {layers} attention layers matched in {family} ({reasons})"
    assert not refusals
    return sites


class _Values(fx.Interpreter):
    """Runs a graph and keeps what its nodes were when an attention read them."""

    def __init__(self, gm: fx.GraphModule, sites: list[AttentionSite]):
        super().__init__(gm, garbage_collect_values=False)
        self.wanted = {site.node: site for site in sites}
        self.seen: dict[fx.Node, dict[fx.Node, object]] = {}

    def run_node(self, node: fx.Node) -> object:
        if node in self.wanted:
            site = self.wanted[node]
            nodes = (site.query, site.key_new, site.value_new, site.key_cache, site.value_cache, site.past_key,
                     site.position, site.padding, site.mask, site.sink_logits)  # fmt: skip
            values = {n: self.env[n] for n in nodes if n is not None}
            self.seen[node] = {n: v.clone() if isinstance(v, Tensor) else v for n, v in values.items()}
        result = super().run_node(node)
        if node in self.wanted:
            self.seen[node][node] = result.clone()
        return result


def assert_sites_mean_what_the_graph_computes(captured: Captured, sites: list[AttentionSite]) -> None:
    """Attention computed from the fields of a site alone equals what the graph computes for the inputs of its first run."""
    values = _Values(captured.gm, sites)
    values.run(*captured.inputs)
    for site in sites:
        value = values.seen[site.node]
        query, key, v = (value[n].double() for n in (site.query, site.key_cache, site.value_cache))
        rows, _, num_queries, _ = query.shape
        num_keys = key.shape[2]
        own = torch.arange(num_queries)
        if not site.starts_empty:
            own = value[site.position] if site.cache is Cache.STATIC else own + value[site.past_key].shape[2]
        sees = (torch.arange(num_keys) <= own[:, None])[None, None].expand(rows, 1, -1, -1).clone()
        if site.padding is not None:
            padding = value[site.padding].bool()[:, None, None, :num_keys]
            sees &= F.pad(padding, (0, num_keys - padding.shape[-1]))
        if site.mask is not None:
            given = value[site.mask]
            sees &= given == 0 if given.is_floating_point() else given
        group = site.num_query_heads // site.num_kv_heads
        key, v = key.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = (query @ key.transpose(2, 3) * site.scale).masked_fill(~sees, -torch.inf)
        if site.sink_logits is not None:
            sinks = value[site.sink_logits].double()[None, :, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], -1)
        expected = scores.softmax(-1)[..., :num_keys] @ v
        valid = sees.any(-1).expand(-1, site.num_query_heads, -1)
        torch.testing.assert_close(value[site.node].double()[valid], expected[valid], rtol=1e-4, atol=1e-4)
        num_new = value[site.key_new].shape[2]
        if site.cache is not Cache.STATIC:
            assert torch.equal(value[site.key_cache][:, :, num_keys - num_new :], value[site.key_new])
        else:
            assert torch.equal(value[site.value_cache][:, :, own[:num_new]], value[site.value_new])


# ---------------------------------------------------------------------- generate


@pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "padded"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", FULL_ATTENTION_FAMILIES)
def test_every_layer_matches_under_generate(family, cache, padded):
    graphs = generated(family, cache, padded)
    assert len(graphs) == (3 if cache == "dynamic" else 2)
    for number, captured in enumerate(graphs):
        sites = matched(captured, family)
        for layer, site in enumerate(sites):
            assert (site.index, site.name) == (layer, f"model.layers.{layer}.self_attn")
            first = number == 0
            assert site.cache is (Cache.STATIC if cache == "static" else Cache.EMPTY if first else Cache.DYNAMIC)
            assert site.is_decode is not first
            assert site.starts_empty is first
            assert (site.num_query_heads, site.num_kv_heads, site.head_dim, site.scale) == (4, 2, 16, 0.25)
            assert (site.dtype, site.device.type, site.batch) == (torch.float32, "cpu", 2)
            assert site.sink_logits is None
            if padded:
                assert (site.padding if cache == "dynamic" else site.mask) is not None
            if cache == "dynamic":
                assert site.mask is None
                assert (site.past_key is None) == (site.past_value is None) == first
            else:
                assert site.write_key.args[0] is site.key_cache
                assert site.write_value.args[0] is site.value_cache
                assert site.write_key.args[2] is site.position
        assert_sites_mean_what_the_graph_computes(captured, sites)


@pytest.mark.parametrize(
    ("family", "cache", "padded"),
    [
        ("llama", "dynamic", False),
        ("llama", "static", True),
        ("gpt_oss_full", "dynamic", True),
        ("gpt_oss_full", "static", False),
    ],
)
def test_every_layer_of_eager_attention_matches_under_generate(family, cache, padded):
    for captured in generated(family, cache, padded, "eager"):
        sites = matched(captured, f"{family}, eager")
        for site in sites:
            assert (site.sink_logits is not None) is (family == "gpt_oss_full")
            assert (site.mask is not None) is (cache == "static")
            assert cache == "dynamic" or site.padding is None
            assert site.padding is not None or not (
                cache == "dynamic" and padded
            )  # older ones have it without need, too
        assert_sites_mean_what_the_graph_computes(captured, sites)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_batch_of_one_padded_row_matches(cache):
    for captured in capture_generate(tiny_model("llama"), prompt(1, padded=True), cache=cache, new_tokens=2):
        sites = matched(captured, "llama, batch 1")
        assert_sites_mean_what_the_graph_computes(captured, sites)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_prompt_of_one_token_is_a_prefill(cache):
    prefill, *decode = capture_generate(tiny_model("llama"), prompt(1, 1), cache=cache, new_tokens=2)
    assert [site.is_decode for site in matched(prefill, "llama")] == [False, False]
    for captured in decode:
        assert [site.is_decode for site in matched(captured, "llama")] == [True, True]


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (6, 1)])
def test_every_ratio_of_query_to_kv_heads_matches(heads):
    model = tiny_model("llama", hidden_size=96, num_attention_heads=heads[0], num_key_value_heads=heads[1])
    captured = capture_call(model, **prompt(padded=True), use_cache=False)
    sites = matched(captured, f"llama with {heads} heads")
    assert {(site.num_query_heads, site.num_kv_heads) for site in sites} == {heads}
    assert_sites_mean_what_the_graph_computes(captured, sites)


@pytest.mark.parametrize("head_dim", [24, 80, 256])
def test_head_dims_that_are_no_power_of_two_match(head_dim):
    captured = capture_call(tiny_model("llama", head_dim=head_dim), **prompt(), use_cache=False)
    site = matched(captured, f"llama with head_dim {head_dim}")[0]
    assert site.head_dim == head_dim
    assert site.scale == pytest.approx(head_dim**-0.5)


def test_a_compiled_forward_matches_like_a_compiled_model():
    torch._dynamo.reset()
    model, backend = tiny_model("llama"), CaptureGraphs()
    model.forward = torch.compile(model.forward, backend=backend)
    model.generate(**prompt(), max_new_tokens=2, do_sample=False)
    assert len(backend.graphs) == 2
    for captured in backend.graphs:
        assert [site.name for site in matched(captured, "llama")] == [
            "model.layers.0.self_attn",
            "model.layers.1.self_attn",
        ]


def test_a_compiled_module_matches_and_names_its_layers():
    torch._dynamo.reset()
    backend = CaptureGraphs()
    compiled = torch.compile(tiny_model("llama"), backend=backend)
    with torch.no_grad():
        compiled(**prompt())
    assert [site.name for site in matched(backend.graphs[0], "llama")] == [
        "model.layers.0.self_attn",
        "model.layers.1.self_attn",
    ]


# ---------------------------------------------------------------------- hand-written loops and later turns


def _cache(kind: str, model) -> transformers.Cache:
    if kind == "dynamic":
        return transformers.DynamicCache(config=model.config)
    return transformers.StaticCache(config=model.config, max_cache_len=24)


def _loop(model, kind: str, masks: list[Tensor | None], lengths: list[int], **compile_options) -> list[Captured]:
    """Calls of the model with ``lengths`` tokens each on one cache; no position_ids are passed."""
    torch._dynamo.reset()
    backend = CaptureGraphs()
    model.compile(backend=backend, **compile_options)
    cache = _cache(kind, model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for length, mask in zip(lengths, masks, strict=True):
            ids = torch.randint(1, 128, (2, length), generator=generator)
            model(ids, attention_mask=mask, past_key_values=cache, use_cache=True)
    return backend.graphs


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_loop_without_position_ids_and_a_later_turn_of_several_tokens_match(kind, padded):
    lengths, ends = [9, 1, 5], [9, 10, 15]
    masks: list[Tensor | None] = [None] * 3
    if padded:
        masks = [torch.ones(2, end, dtype=torch.long) for end in ends]
        for mask in masks:
            mask[0, :3] = 0
    graphs = _loop(tiny_model("llama"), kind, masks, lengths)
    assert len(graphs) == 3
    for captured, length, is_decode in zip(graphs, lengths, (False, True, False), strict=True):
        sites = matched(captured, f"llama, {kind} loop")
        for site in sites:
            assert site.mask is None
            assert site.padding is not None or not padded
            assert site.is_decode is is_decode
            assert site.starts_empty is (length == 9)
        assert_sites_mean_what_the_graph_computes(captured, sites)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_second_generate_on_the_same_cache_matches(cache):
    torch._dynamo.reset()
    model, backend = tiny_model("llama"), CaptureGraphs()
    model.compile(backend=backend)
    state, inputs = _cache(cache, model), prompt()
    options = {"do_sample": False, "disable_compile": True, "past_key_values": state}
    ids = model.generate(**inputs, max_new_tokens=2, **options)
    ids = torch.cat([ids, torch.randint(1, 128, (2, 4))], 1)
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, **options)
    turns = 0
    for captured in backend.graphs:
        sites = matched(captured, "llama, two turns")
        turns += not sites[0].is_decode and not sites[0].starts_empty
        assert_sites_mean_what_the_graph_computes(captured, sites)
    assert turns == 1


@pytest.mark.parametrize("padded", [False, True])
def test_dynamic_lengths_match_in_prefill_and_decode(padded):
    torch._dynamo.reset()
    model, backend = tiny_model("llama"), CaptureGraphs()
    model.compile(backend=backend)
    for tokens in (9, 13):
        inputs = prompt(tokens=tokens, padded=padded)
        for tensor in inputs.values():
            torch._dynamo.mark_dynamic(tensor, 1)
        cache = transformers.DynamicCache(config=model.config)
        mask = inputs["attention_mask"] if padded else None
        with torch.no_grad():
            model(inputs["input_ids"], attention_mask=mask, past_key_values=cache)
            for layer in cache.layers:
                torch._dynamo.mark_dynamic(layer.keys, 2)
                torch._dynamo.mark_dynamic(layer.values, 2)
            if padded:
                mask = F.pad(mask, (0, 1), value=1)
                torch._dynamo.mark_dynamic(mask, 1)
            model(inputs["input_ids"][:, :1], attention_mask=mask, past_key_values=cache)
    symbolic = 0
    for captured in backend.graphs:
        sites = matched(captured, "llama, dynamic lengths")
        symbolic += any(isinstance(size, torch.SymInt) for size in sites[0].key_cache.meta["example_value"].shape)
        assert_sites_mean_what_the_graph_computes(captured, sites)
    assert symbolic >= 2


def test_a_forward_without_cache_matches():
    model = tiny_model("qwen3")
    for padded in (False, True):
        captured = capture_call(model, **prompt(padded=padded), use_cache=False)
        sites = matched(captured, "qwen3 without cache")
        assert all(site.cache is Cache.NONE and site.starts_empty and site.key_cache is site.key_new for site in sites)
        assert_sites_mean_what_the_graph_computes(captured, sites)


def test_a_static_cache_that_the_prompt_fills_matches():
    torch._dynamo.reset()
    model, backend = tiny_model("llama"), CaptureGraphs()
    model.compile(backend=backend)
    cache = transformers.StaticCache(config=model.config, max_cache_len=9)
    with torch.no_grad():
        model(prompt()["input_ids"], past_key_values=cache)
    assert_sites_mean_what_the_graph_computes(backend.graphs[0], matched(backend.graphs[0], "llama, full static cache"))


def test_matching_leaves_the_graph_as_it_was():
    for captured in generated("llama", "dynamic", True):
        before = captured.gm.graph.python_code("self").src
        find_sites(captured.gm)
        assert captured.gm.graph.python_code("self").src == before


def test_matching_installs_no_guard():
    for captured in generated("llama", "dynamic", True):
        symbolic = [n.meta["example_value"] for n in captured.gm.graph.nodes if "example_value" in n.meta]
        environments = {v.node.shape_env for v in symbolic if isinstance(v, torch.SymInt)}
        before = [len(environment.guards) for environment in environments]
        find_sites(captured.gm)
        assert [len(environment.guards) for environment in environments] == before
