"""Through Inductor: what the compiled graphs hold, how many there are, and what the caches key on."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from transformers import DynamicCache

import ckv_compile
from ckv_compile import backend
from ckv_compile.passes import graph_edit
from ckv_compile.testing import prompt, tiny_model

EXACT = {"min_context": 0, "workers": 0}


@pytest.fixture
def generated(monkeypatch):
    """Pairs of (rewritten graph, Inductor's generated code), in order of compilation."""
    from torch._inductor.graph import GraphLowering

    pairs, codes = [], []
    original = backend._compile
    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(codes.append))

    def compile_and_keep(gm, fakes, patches):
        del codes[:]
        compiled = original(gm, fakes, {**patches, "force_disable_caches": True})
        pairs.append((gm, list(codes)))
        return compiled

    monkeypatch.setattr(backend, "_compile", compile_and_keep)
    return pairs


def compiled(model, **options):
    return torch.compile(model, backend="communitykv", options={**EXACT, **options})


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_the_decode_graph_has_no_symbolic_size(compilations, interpreted, cache):
    static = {"cache_implementation": "static"} if cache == "static" else {}
    compiled(tiny_model("llama")).generate(
        **prompt(tokens=20, padded=True), max_new_tokens=4, do_sample=False, **static
    )
    decodes = [plan for plan in compilations if plan.phase == "decode"]
    assert len(decodes) == 1
    assert decodes[0].symbolic == []


def test_a_loop_without_position_ids_keeps_no_symbol_either(compilations, interpreted):
    module = compiled(tiny_model("llama"))
    with torch.no_grad():
        out = module(prompt(tokens=20)["input_ids"], use_cache=True)
        name = "cache" if "cache" in out else "past_key_values"
        for _ in range(3):
            out = module(prompt(tokens=1)["input_ids"], use_cache=True, **{name: out[name]})
    (decode,) = (plan for plan in compilations if plan.phase == "decode")
    assert decode.symbolic == []


@pytest.mark.parametrize("options", [{}, {"graph": "attention"}], ids=str)
def test_inductor_gives_eagers_tokens_without_copying_the_cache(options):
    model = tiny_model("llama")
    inputs = prompt(tokens=24, padded=True)
    expected = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    counters.clear()
    module = compiled(model, **options)
    assert torch.equal(module.generate(**inputs, max_new_tokens=8, do_sample=False), expected)
    longer = prompt(tokens=40, padded=True)  # compiled code of attention has been wrong for the second shape only
    expected = model.generate(**longer, max_new_tokens=2, do_sample=False)
    assert torch.equal(module.generate(**longer, max_new_tokens=2, do_sample=False), expected)
    missed = {key: count for key, count in counters["inductor"].items() if "missed" in key and "bytes" in key}
    assert not any(missed.values()), missed
    assert ckv_compile.explain(module, show=False).sparse_steps == 8


def test_the_decode_code_holds_no_copy_of_keys_values_or_state(generated):
    compiled(tiny_model("llama")).generate(**prompt(tokens=24), max_new_tokens=4, do_sample=False)
    decode = [pair for pair in generated if any("append_kv" in str(n.target) and n.args[0].name == "ckv_key_0"
                                                for n in pair[0].graph.nodes)][-1]  # fmt: skip
    gm, (code,) = decode
    assert graph_edit.symbolic_nodes(gm.graph) == []
    body = code[code.index("def call(") :]
    assert "empty_strided_cpu((2, 2, 128, 16)" not in body
    assert "cat" not in [str(node.target) for node in gm.graph.nodes if "key_" in node.name]
    assert body.count("torch.ops.ckv.append_kv.default") == 2


def test_prompt_lengths_share_graphs_and_decoding_adds_none(compilations, interpreted):
    model = tiny_model("llama")
    module = compiled(model)
    counters.clear()
    for tokens in (17, 33, 50, 64):
        inputs = prompt(tokens=tokens)
        expected = model.generate(**inputs, max_new_tokens=8, do_sample=False)
        assert torch.equal(module.generate(**inputs, max_new_tokens=8, do_sample=False), expected)
    assert len(compilations) <= 4
    before = len(compilations)
    module.generate(**prompt(tokens=64), max_new_tokens=64, do_sample=False)
    assert len(compilations) == before
    assert counters["frames"]["total"] == counters["frames"]["ok"]
    assert not counters["graph_break"]


def test_both_phases_match_when_the_sequence_is_marked_dynamic(compilations, interpreted):
    model = tiny_model("llama")
    module = compiled(model)
    ids = prompt(tokens=20)["input_ids"]
    torch._dynamo.mark_dynamic(ids, 1)
    with torch.no_grad():
        out = module(ids, use_cache=True)
        name = "cache" if "cache" in out else "past_key_values"
        logits = module(ids[:, :1].clone(), use_cache=True, **{name: out[name]}).logits
        expected = model(torch.cat([ids, ids[:, :1]], 1)).logits[:, -1:]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert [plan.phase for plan in compilations] == ["prefill", "decode"]


def test_the_backend_leaves_other_backends_and_the_model_as_they_were(interpreted):
    model, other = tiny_model("llama"), tiny_model("llama", seed=1)
    calls = []

    def counting(gm, example_inputs):
        calls.append(gm)
        return gm.forward

    plain = torch.compile(other, backend=counting)
    inputs = prompt(tokens=12)
    expected = other.generate(**inputs, max_new_tokens=4, do_sample=False)
    state = dict(model.__dict__)
    module = compiled(model)
    module.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert torch.equal(plain.generate(**inputs, max_new_tokens=4, do_sample=False), expected)
    assert calls == []  # generate of another backend's module stays what it was
    torchs_own = {"_is_torch_compile"}
    assert {k: v for k, v in model.__dict__.items() if k not in torchs_own} == state
    with pytest.raises(TypeError):
        module.generate(no_such_argument_type=object(), max_new_tokens="x")
    assert "_compiled_call_impl" not in model.__dict__ or model.__dict__["_compiled_call_impl"] is None


def test_inductors_modes_are_taken_and_unknown_ones_raise(interpreted):
    model = tiny_model("llama")
    inputs = prompt(tokens=12)
    expected = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    for mode in ("default", "reduce-overhead", "max-autotune-no-cudagraphs"):
        torch._dynamo.reset()
        module = torch.compile(model, backend="communitykv", mode=mode)
        assert torch.equal(module.generate(**inputs, max_new_tokens=4, do_sample=False), expected)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="fastest"):
        torch.compile(model, backend="communitykv", mode="fastest").generate(**inputs, max_new_tokens=4)


class TestCacheKey:
    def test_sources_options_and_the_users_pass_are_in_the_uuid(self, monkeypatch):
        from torch._inductor.custom_graph_pass import CustomGraphPass

        from ckv_compile.config import CommunityConfig

        class Users(CustomGraphPass):
            def __init__(self):
                self.calls = 0

            def __call__(self, graph):
                self.calls += 1

            def uuid(self):
                return "the user's"

        users = Users()
        keys = [
            backend.CacheKeyPass(CommunityConfig()).uuid(),
            backend.CacheKeyPass(CommunityConfig(budget=256)).uuid(),
            backend.CacheKeyPass(CommunityConfig(), users).uuid(),
        ]
        monkeypatch.setattr(backend, "sources_digest", lambda: "an edited operator schema")
        keys.append(backend.CacheKeyPass(CommunityConfig()).uuid())
        assert len({json.dumps(key) for key in keys}) == 4
        backend.CacheKeyPass(CommunityConfig(), users)(torch.fx.Graph())
        assert users.calls == 1

    def test_the_digest_covers_every_source_of_the_package(self):
        backend.sources_digest.cache_clear()
        before = backend.sources_digest()
        from pathlib import Path

        for folder in (Path(ckv_compile.__file__).parent / "ops", Path(graph_edit.__file__).parent):
            path = folder / "zz_not_there_before.py"
            try:
                path.write_text("# a new source\n")
                backend.sources_digest.cache_clear()
                assert backend.sources_digest() != before
            finally:
                path.unlink()
        backend.sources_digest.cache_clear()
        assert backend.sources_digest() == before


SCRIPT = textwrap.dedent(
    """
    import json, sys, torch, ckv_compile
    from torch._dynamo.utils import counters
    from ckv_compile.testing import prompt, tiny_model
    torch.set_num_threads(1)
    module = torch.compile(tiny_model("llama"), backend="communitykv",
                           options={"min_context": 0, "workers": 0, "budget": int(sys.argv[1])})
    out = module.generate(**prompt(tokens=200), max_new_tokens=6, do_sample=False,
                          output_logits=True, return_dict_in_generate=True)
    e = ckv_compile.explain(module, show=False)
    print(json.dumps({"attended": e.tokens_attended, "rewritten": len(e.rewritten), "sparse": e.sparse_steps,
                      "hits": counters["inductor"].get("fxgraph_cache_hit", 0) + counters["aot_autograd"].get(
                          "autograd_cache_hit", 0),
                      "logits": out.logits[-1].flatten()[:8].tolist()}))
    """
)


@pytest.mark.slow
def test_a_warm_compile_cache_reports_right_and_is_keyed_by_the_options(tmp_path):
    def run(budget):
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(budget)], capture_output=True, text=True, env=environment
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    cold, warm, other = run(96), run(96), run(1024)
    assert warm["hits"] > 0
    for name in ("attended", "rewritten", "sparse"):
        assert warm[name] == cold[name]
    assert warm["logits"] == cold["logits"]
    assert cold["sparse"] == other["sparse"] == 5
    assert other["attended"] > 2 * cold["attended"]
    assert other["logits"] != cold["logits"]


@pytest.mark.parametrize("options", [{}, {"graph": "attention"}, {"graph": "mixed"}], ids=str)
def test_a_prefill_computes_nothing_on_the_host(options):
    """A copied ticket would be C++ to compile beside the kernels of a GPU; operators only pass it on."""
    graphs = []
    model = tiny_model("llama")
    options = {**options, "workers": 0, "post_grad_custom_post_pass": graphs.append}
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="communitykv", options=options)
    with torch.no_grad(), inductor_config.patch(force_disable_caches=True):
        compiled(**prompt(1, 30), past_key_values=DynamicCache(config=model.config), use_cache=True)
    (graph,) = graphs
    tickets = [node for node in graph.nodes if _is_ticket(node.meta.get("val"))]
    assert len(tickets) == 1 or all(node.target is torch.ops.aten.copy_.default for node in tickets[1:])
    for node in tickets[1:]:
        assert node.args[0] is node.args[1], "a ticket is copied"


def _is_ticket(value):
    return isinstance(value, torch.Tensor) and value.dtype == torch.int64 and tuple(value.shape) == (2,)
