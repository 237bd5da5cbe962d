"""Ways of calling a compiled model beside generate's plain one: what they give is what eager gives."""

import copy
import io
import threading
import types

import pytest
import torch
from transformers import Cache, DynamicCache, GenerationConfig, StaticCache
from transformers.cache_utils import DynamicLayer

import ckv_compile
from ckv_compile import backend
from ckv_compile.community.workers import shared_pool
from ckv_compile.policies import POLICIES
from ckv_compile.runtime.registry import REGISTRY
from ckv_compile.testing import TINY_VOCAB, prompt, tiny_model

EXACT = {"min_context": 0, "workers": 0}


@pytest.fixture
def model():
    return tiny_model("llama", num_hidden_layers=1)


def compiled(model, *, fullgraph=False, dynamic=None, **options):
    options = {**EXACT, **options}
    return torch.compile(model, backend="communitykv", options=options, fullgraph=fullgraph, dynamic=dynamic)


def greedy(module, inputs, new_tokens=5, **kwargs):
    return module.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, **kwargs)


def assert_every_step_was_sparse(module):
    explanation = ckv_compile.explain(module, show=False)
    assert explanation.sparse_steps == explanation.decode_steps > 0, str(explanation)


# ---------------------------------------------------------------------- who calls


def test_a_pipeline_reaches_the_compiled_model(interpreted, model):
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast, pipeline

    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(TINY_VOCAB)}, unk_token="w0")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", padding_side="left")
    texts = [" ".join(f"w{i * 7 % 99 + 1}" for i in range(30)), "w1 w2"]

    def texts_of(module):
        generator = pipeline("text-generation", model=module, tokenizer=tokenizer)
        return generator(texts, max_new_tokens=5, do_sample=False, batch_size=2)

    module = compiled(model)
    assert texts_of(module) == texts_of(model)
    assert_every_step_was_sparse(module)


def test_a_generation_method_of_the_callers_is_compiled(interpreted, model):
    """``custom_generate``, as methods that transformers keeps on the hub are called (contrastive search, DoLa)."""

    def loop(model, input_ids, **_):
        cache, new = DynamicCache(config=model.config), input_ids
        for _ in range(4):
            logits = model(input_ids=new, past_key_values=cache, use_cache=True).logits
            new = logits[:, -1:].argmax(-1)
            input_ids = torch.cat([input_ids, new], 1)
        return input_ids

    inputs, module = prompt(tokens=20), compiled(model)
    expected = model.generate(**inputs, custom_generate=loop)
    assert torch.equal(module.generate(**inputs, custom_generate=loop), expected)
    assert_every_step_was_sparse(module)


@pytest.mark.parametrize("method", [{"penalty_alpha": 0.6, "top_k": 4}, {"dola_layers": "high"}], ids=str)
def test_methods_that_left_transformers_say_so_as_eager_does(model, method):
    inputs, said = prompt(tokens=12), []
    for module in (model, compiled(model)):
        with pytest.raises(ValueError, match="trust_remote_code") as raised:
            greedy(module, inputs, **method)
        said.append(str(raised.value))
    assert said[0] == said[1]


def test_a_streamer_gets_every_token(interpreted, model):
    from transformers.generation.streamers import BaseStreamer

    class Keeping(BaseStreamer):
        def __init__(self):
            self.seen = []

        def put(self, value):
            self.seen += value.flatten().tolist()

        def end(self):
            self.seen.append("end")

    inputs, seen = prompt(tokens=12, batch=1), []
    for module in (model, compiled(model)):
        streamer = Keeping()
        tokens = greedy(module, inputs, streamer=streamer)
        assert streamer.seen == [*tokens[0].tolist(), "end"]
        seen.append(streamer.seen)
    assert seen[0] == seen[1]


@pytest.mark.parametrize("form", ["torch.compile", "Module.compile", "a layer", "an attention"])
def test_a_part_of_the_model_may_be_compiled(interpreted, model, form):
    """A part below the decoder sees a padding mask only as a 4-D tensor of somebody else's."""
    inputs = prompt(tokens=20, padded=form.endswith("compile"))
    expected = greedy(model, inputs)
    (layer,) = model.model.layers
    if form == "torch.compile":
        model.model = compiled(model.model)
    else:
        part = {"a layer": layer, "an attention": layer.self_attn}.get(form, model.model)
        part.compile(backend="communitykv", options=EXACT)
    assert torch.equal(greedy(model, inputs), expected)
    assert_every_step_was_sparse(model)


def test_a_layer_alone_behind_a_padding_mask_is_dense_and_says_so(interpreted, model):
    inputs = prompt(tokens=20, padded=True)
    expected = greedy(model, inputs)
    model.model.layers[0].compile(backend="communitykv", options=EXACT)
    with pytest.warns(UserWarning, match="4-D tensor given by the caller"):
        assert torch.equal(greedy(model, inputs), expected)


# ---------------------------------------------------------------------- how it is compiled


@pytest.mark.parametrize(
    ("arguments", "cache"),
    [
        ({"dynamic": True}, "dynamic"),
        ({"dynamic": True}, "static"),
        ({"dynamic": False}, "static"),
        ({"fullgraph": True}, "dynamic"),
        ({"fullgraph": True}, "static"),
    ],
    ids=str,
)
def test_arguments_of_torch_compile(interpreted, model, arguments, cache):
    inputs = prompt(tokens=20, padded=True)
    static = {"cache_implementation": "static"} if cache == "static" else {}
    expected = greedy(model, inputs, **static)
    module = compiled(model, **arguments)
    assert torch.equal(greedy(module, inputs, **static), expected)
    assert_every_step_was_sparse(module)


def test_without_dynamic_sizes_every_length_is_compiled_and_right(interpreted, model):
    inputs = prompt(tokens=20)
    module = compiled(model, dynamic=False)
    assert torch.equal(greedy(module, inputs), greedy(model, inputs))
    assert_every_step_was_sparse(module)


def test_a_training_step_has_eagers_gradients_and_the_report_says_why_it_is_dense(interpreted, model):
    model.train()
    module, inputs = compiled(model), prompt(tokens=20)
    gradients = []
    for one in (model, module):
        model.zero_grad()
        one(**inputs, labels=inputs["input_ids"], use_cache=True).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for ours, eagers in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, eagers, atol=1e-4, rtol=1e-4)
    (reasons,) = ckv_compile.explain(module, show=False).refused.values()
    assert "gradients are recorded" in reasons[0]


def test_an_input_that_requires_grad_has_eagers_gradient_though_no_weight_does(interpreted, model):
    model.requires_grad_(False)
    module, gradients = compiled(model), []
    for one in (model, module):
        embedded = model.get_input_embeddings()(prompt(tokens=12)["input_ids"]).requires_grad_()
        one(inputs_embeds=embedded, use_cache=True).logits.square().mean().backward()
        gradients.append(embedded.grad)
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)
    (reasons,) = ckv_compile.explain(module, show=False).refused.values()
    assert "gradients are recorded" in reasons[0]


# ---------------------------------------------------------------------- what is generated


def test_rows_may_end_early(interpreted, model):
    inputs = prompt(tokens=20)
    model.generation_config.eos_token_id = int(greedy(model, inputs)[0, 22])
    module = compiled(model)
    expected = greedy(model, inputs, 12)
    assert (expected == model.generation_config.pad_token_id).any()
    assert torch.equal(greedy(module, inputs, 12), expected)


def test_generation_beyond_the_positions_of_the_model_is_eagers(interpreted):
    model, inputs = tiny_model("llama", num_hidden_layers=1, max_position_embeddings=24), prompt(tokens=20)
    assert torch.equal(greedy(compiled(model), inputs, 10), greedy(model, inputs, 10))


def test_a_static_cache_that_is_full_raises_as_in_eager(interpreted, model):
    for module in (model, compiled(model)):
        cache = StaticCache(config=model.config, max_cache_len=22)
        with pytest.raises(IndexError, match="out of bounds"):
            greedy(module, prompt(tokens=20), past_key_values=cache)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padded", [True, False])
def test_a_prompt_in_chunks_is_indexed(interpreted, model, padded, cache):
    inputs, module = prompt(tokens=40, padded=padded), compiled(model)
    static = {"cache_implementation": "static"} if cache == "static" else {}
    expected = greedy(model, inputs)
    assert torch.equal(greedy(module, inputs, prefill_chunk_size=16, **static), expected)
    explanation = ckv_compile.explain(module, show=False)
    assert (explanation.prefills, explanation.sparse_steps) == (2, 5)  # the last 8 tokens are a decode step


@pytest.mark.parametrize(("tokens", "sparse"), [(98, 0), (99, 0), (100, 1), (101, 2)])
def test_contexts_around_the_budget(interpreted, model, tokens, sparse):
    """A prompt longer than the budget is indexed at once, a shorter one behind the first step that is longer."""
    module = torch.compile(
        model, backend="communitykv", options={"workers": 0, "budget": 100, "append_block": 16, "block_size": 64}
    )
    inputs = prompt(tokens=tokens, batch=1)
    out = greedy(module, inputs, 3)
    explanation = ckv_compile.explain(module, show=False)
    assert (explanation.decode_steps, explanation.sparse_steps) == (2, sparse), str(explanation)
    if not sparse:
        assert torch.equal(out, greedy(model, inputs, 3))


def test_an_unseen_prompt_is_dense_until_its_index_is_there(interpreted, model, monkeypatch):
    """The index is made from the keys behind the first step, a block at a time, and no step waits for it."""
    policy = type(POLICIES["communities"])
    sizes, original = [], policy.block_input

    def measured(self, key, first, start, stop, *rest):
        sizes.append(stop - start)
        return original(self, key, first, start, stop, *rest)

    monkeypatch.setattr(policy, "block_input", measured)
    module = compiled(model, workers=1, block_size=64, append_block=16)
    cache, release, pool = DynamicCache(config=model.config), threading.Event(), shared_pool(1, 60.0)
    blocker = pool.submit(lambda stop: release.wait(30))

    def decode(count):
        for _ in range(count):
            module(input_ids=torch.ones(1, 1, dtype=torch.long), past_key_values=cache, use_cache=True)

    try:
        with torch.no_grad():
            model(**prompt(tokens=200, batch=1), past_key_values=cache, use_cache=True)
            decode(2)
            release.set()
            pool.wait(blocker)
            for sequence in REGISTRY.sequences():
                sequence.wait()
            decode(2)
    finally:
        release.set()
    explanation = ckv_compile.explain(module, show=False)
    assert sizes == [64, 64, 64, 8]
    assert explanation.caches_adopted == 1
    assert explanation.dense_steps == {"the partition was not ready yet": 2}
    assert explanation.sparse_steps == 2


# ---------------------------------------------------------------------- what is refused, before it generates


class _Quantized:
    """Stands for a layer of a quantized cache, which needs packages of its own."""

    def _quantize(self):
        raise AssertionError


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"cache_implementation": "offloaded"}, "cache_implementation must be 'dynamic' or 'static', got 'offloaded'"),
        ({"cache_implementation": "offloaded_static"}, "got 'offloaded_static'"),
        ({"cache_implementation": "quantized"}, "got 'quantized'"),
        ({"past_key_values": types.SimpleNamespace(offloading=True, layers=[])}, "an offloaded SimpleNamespace"),
        ({"past_key_values": types.SimpleNamespace(layers=[_Quantized()])}, "a quantized SimpleNamespace"),
    ],
    ids=["offloaded", "offloaded_static", "quantized", "an offloaded cache", "a quantized cache"],
)
def test_caches_that_do_not_stay_in_place_are_refused(monkeypatch, model, arguments, said):
    monkeypatch.setattr(backend, "_compile", None)  # nothing is compiled
    with pytest.raises(ValueError, match=said):
        greedy(compiled(model), prompt(tokens=12), **arguments)


@pytest.mark.parametrize("kind", ["offloaded", "offloaded_static", "quantized"])
def test_a_positional_configuration_is_refused_like_an_argument(monkeypatch, model, kind):
    monkeypatch.setattr(backend, "_compile", None)  # nothing is compiled
    config = GenerationConfig(max_new_tokens=4, cache_implementation=kind, pad_token_id=0)
    with pytest.raises(ValueError, match=f"got '{kind}'"):
        compiled(model).generate(prompt(tokens=12)["input_ids"], config)


def test_a_default_of_the_model_is_refused_like_an_argument(model):
    model.generation_config.cache_implementation = "quantized"
    with pytest.raises(ValueError, match="got 'quantized'"):
        greedy(compiled(model), prompt(tokens=12))


def test_weights_that_are_offloaded_are_refused(model):
    accelerate = pytest.importorskip("accelerate")
    offloaded = accelerate.cpu_offload(copy.deepcopy(model), execution_device="cpu")
    with pytest.raises(ValueError, match="needs all weights on the device"):
        greedy(compiled(offloaded), prompt(tokens=12))


def test_a_quantized_cache_in_a_loop_is_dense_and_says_so(interpreted, model):
    """Its keys are put together from quantized and recent ones, which no operator reads in place."""
    from transformers.cache_utils import QuantizedLayer

    class Rounded(QuantizedLayer):
        def __init__(self):
            super().__init__(nbits=4, axis_key=0, axis_value=0, q_group_size=16, residual_length=4)

        def _quantize(self, tensor, axis):
            return (tensor * 8).round() / 8

        def _dequantize(self, tensor):
            return tensor

    def logits(module):
        cache = Cache(layers=[Rounded()])
        with torch.no_grad():
            return [
                module(input_ids=prompt(tokens=count)["input_ids"], past_key_values=cache, use_cache=True).logits
                for count in (12, 1, 1)
            ]

    module = compiled(model)
    for ours, eagers in zip(logits(module), logits(model), strict=True):
        torch.testing.assert_close(ours, eagers, atol=1e-4, rtol=1e-4)
    explanation = ckv_compile.explain(module, show=False)
    assert explanation.sparse_steps == 0
    assert explanation.refused


def test_an_offloaded_cache_in_a_loop_is_dense_and_says_so(interpreted, model):
    """Its keys come from elsewhere and go there. transformers' own needs a GPU; here elsewhere is where they are."""

    class Offloaded(DynamicLayer):
        def update(self, keys, values, *args, **kwargs):
            if self.is_initialized:
                self.keys, self.values = self.keys.to("cpu", copy=True), self.values.to("cpu", copy=True)
            seen = super().update(keys, values, *args, **kwargs)
            self.keys, self.values = self.keys.to("cpu", copy=True), self.values.to("cpu", copy=True)
            return seen

    def logits(module):
        cache = Cache(layers=[Offloaded()])
        with torch.no_grad():
            return [
                module(input_ids=prompt(tokens=count)["input_ids"], past_key_values=cache, use_cache=True).logits
                for count in (12, 1, 1)
            ]

    module = compiled(model)
    for ours, eagers in zip(logits(module), logits(model), strict=True):
        torch.testing.assert_close(ours, eagers, atol=1e-4, rtol=1e-4)
    explanation = ckv_compile.explain(module, show=False)
    assert explanation.sparse_steps == 0
    assert explanation.refused


# ---------------------------------------------------------------------- what holds the model, and what it says


@pytest.mark.parametrize("called", [False, True], ids=["before", "after a call"])
@pytest.mark.parametrize("copied", ["deepcopy", "saved"])
def test_a_compiled_model_can_be_copied(interpreted, model, copied, called):
    module = compiled(model)
    if called:
        greedy(module, prompt(tokens=12))
    if copied == "deepcopy":
        other = copy.deepcopy(module)
    else:
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert torch.equal(greedy(other, prompt(tokens=30)), greedy(model, prompt(tokens=30)))
    assert_every_step_was_sparse(other)


class _Adapter(torch.nn.Module):
    """Holds a model and hands generate over to it, as PEFT's wrappers do."""

    def __init__(self, base_model):
        super().__init__()
        self.base_model = base_model

    def forward(self, *args, **kwargs):
        return self.base_model(*args, **kwargs)

    def generate(self, *args, **kwargs):
        return self.base_model.generate(*args, **kwargs)


def test_generate_of_a_model_inside_is_reached(interpreted, model):
    inputs = prompt(tokens=30)
    module = compiled(_Adapter(_Adapter(model)))
    for _ in range(2):
        assert torch.equal(greedy(module, inputs), greedy(model, inputs))
    assert_every_step_was_sparse(module)
    assert "_compiled_call_impl" not in vars(model)


def test_attentions_asked_for_leave_all_dense_and_the_reason_told(interpreted, model):
    asked = {"output_attentions": True, "return_dict_in_generate": True}
    module = compiled(model)
    found, wanted = (greedy(one, prompt(tokens=30), new_tokens=3, **asked) for one in (module, model))
    assert torch.equal(found.sequences, wanted.sequences)
    assert [len(step) for step in found.attentions] == [len(step) for step in wanted.attentions]
    explanation = ckv_compile.explain(module, show=False)
    assert not explanation.rewritten
    assert any("graph break" in reason for reasons in explanation.refused.values() for reason in reasons)
    assert "load the model with attn_implementation" not in str(explanation)


def test_without_a_cache_the_reason_says_so(interpreted, model):
    module = compiled(model)
    inputs = prompt(tokens=30)
    assert torch.equal(greedy(module, inputs, use_cache=False), greedy(model, inputs, use_cache=False))
    reasons = [reason for found in ckv_compile.explain(module, show=False).refused.values() for reason in found]
    assert reasons
    assert all("use_cache=False" in reason for reason in reasons)


def test_autocast_leaves_attention_dense_and_says_why(interpreted, model):
    module = compiled(model)
    inputs = prompt(tokens=30)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(greedy(module, inputs), greedy(model, inputs))
    explanation = ckv_compile.explain(module, show=False)
    assert explanation.sparse_steps or explanation.refused


def test_threads_may_meet_a_model_that_was_never_called(interpreted, model):
    module, inputs, found = compiled(model), prompt(tokens=30), {}

    def run(number):
        found[number] = greedy(module, inputs)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    wanted = greedy(model, inputs)
    assert all(torch.equal(tokens, wanted) for tokens in found.values())
    assert_every_step_was_sparse(module)
