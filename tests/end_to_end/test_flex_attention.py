"""Models with attn_implementation="flex_attention": sparse steps over both caches, and block lists that are read."""

import inspect

import pytest
import torch
import transformers
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers.integrations import flex_attention as integration
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import ckv_compile
from ckv_compile.runtime.runner import OTHER_BLOCKS
from ckv_compile.testing import prompt, tiny_model

EXACT = {"min_context": 0, "workers": 0}


def greedy(model, inputs, **kwargs):
    return model.generate(**inputs, max_new_tokens=4, do_sample=False, **kwargs)


@pytest.fixture
def logsumexp_on_cpu(monkeypatch):
    """transformers' own function, which asks for no logsumexp and refuses learned sinks on a CPU, as if on a GPU."""
    source, on_gpu = inspect.getsource(integration.flex_attention_forward), 'query.device.type != "cpu"'
    assert source.count(on_gpu) == 1
    namespace = dict(vars(integration))
    exec(source.replace(on_gpu, "True"), namespace)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flex_attention", namespace["flex_attention_forward"])


def test_greedy_tokens_equal_eager(interpreted):
    model, inputs = tiny_model("llama", num_hidden_layers=1), prompt(tokens=30, padded=True)
    expected = greedy(model, inputs)
    model.set_attn_implementation("flex_attention")
    module = torch.compile(model, backend="communitykv", options=EXACT)
    assert torch.equal(greedy(module, inputs), expected)
    explanation = ckv_compile.explain(module, show=False)
    assert explanation.decode_steps == explanation.sparse_steps == 3, str(explanation)
    assert not explanation.refused


def test_a_static_cache(interpreted):
    model = tiny_model("llama", num_hidden_layers=2)
    inputs, static = prompt(tokens=30, padded=True), {"cache_implementation": "static"}
    expected = greedy(model, inputs)
    model.set_attn_implementation("flex_attention")
    module = torch.compile(model, backend="communitykv", options=EXACT)
    assert torch.equal(greedy(module, inputs, **static), expected)
    explanation = ckv_compile.explain(module, show=False)
    assert explanation.prefills == 1
    assert explanation.decode_steps == explanation.sparse_steps == 3, str(explanation)
    assert not explanation.refused


@pytest.mark.slow
def test_another_turn_over_a_static_cache_stays_as_transformers_computes_it(interpreted):
    """Its queries see later tokens of the same turn, which is no attention of ours, and steps go on after it."""
    model, inputs = tiny_model("llama", "flex_attention", num_hidden_layers=1), prompt(tokens=33, padded=True)

    def logits(callee):
        cache, end, found = transformers.StaticCache(config=model.config, max_cache_len=40), 0, []
        with torch.no_grad():
            for length in (20, 1, 10, 1, 1):
                begin, end = end, end + length
                ids, mask = inputs["input_ids"][:, begin:end].clone(), inputs["attention_mask"][:, :end].clone()
                found.append(callee(ids, attention_mask=mask, past_key_values=cache, use_cache=True).logits[:, -1])
        return torch.stack(found)

    expected = logits(torch.compile(model, backend="eager"))
    torch._dynamo.reset()
    module = torch.compile(model, backend="communitykv", options=EXACT)
    torch.testing.assert_close(logits(module), expected, atol=1e-4, rtol=1e-4)
    explanation = ckv_compile.explain(module, show=False)
    (reasons,) = explanation.refused.values()
    assert ["see later tokens of the same call" in reason for reason in reasons] == [True]
    assert explanation.prefills == 1
    assert explanation.decode_steps == explanation.sparse_steps == 3, str(explanation)


def test_a_static_cache_whose_mask_shows_an_unwritten_position_is_dense(interpreted):
    """transformers makes no padding mask where nothing is padded; it then sees one key too many, and so do we."""
    model = tiny_model("llama", num_hidden_layers=1)
    inputs, static = prompt(tokens=30), {"cache_implementation": "static"}
    model.set_attn_implementation("flex_attention")
    module = torch.compile(model, backend="communitykv", options=EXACT)
    greedy(module, inputs, **static)
    explanation = ckv_compile.explain(module, show=False)
    assert explanation.prefills == 1
    assert not explanation.sparse_steps
    (reasons,) = explanation.refused.values()
    assert ["where nothing was written" in reason for reason in reasons] == [True]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_learned_sinks_beside_a_sliding_layer(interpreted, logsumexp_on_cpu, cache):
    model, inputs = tiny_model("gpt_oss", "eager"), prompt(tokens=30, padded=True)
    expected = greedy(model, inputs)
    model.set_attn_implementation("flex_attention")
    module = torch.compile(model, backend="communitykv", options=EXACT)
    static = {"cache_implementation": "static"} if cache == "static" else {}
    assert torch.equal(greedy(module, inputs, **static), expected)
    explanation = ckv_compile.explain(module, show=False)
    assert explanation.decode_steps == explanation.sparse_steps == 3, str(explanation)
    assert explanation.prefills == 1
    (reasons,) = explanation.refused.values()
    assert all("sliding window" in reason for reason in reasons), str(explanation)


class Step(torch.nn.Module):
    """One layer of flex_attention without projections."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, query, key, value, past_key, past_value, block_mask):
        keys, values = torch.cat([past_key, key], -2), torch.cat([past_value, value], -2)
        return flex_attention(query * self.scale, keys, values, block_mask=block_mask), keys, values


def test_a_block_mask_that_leaves_keys_out_is_dense(interpreted):
    def causal(batch, head, query, key):
        return key <= query + 40

    whole = create_block_mask(causal, None, None, 1, 41, device="cpu", BLOCK_SIZE=16)
    part = BlockMask.from_kv_blocks(
        whole.kv_num_blocks - 1, whole.kv_indices, whole.full_kv_num_blocks, whole.full_kv_indices, 16, causal,
        seq_lengths=(1, 41),
    )  # fmt: skip
    torch.manual_seed(0)
    new = [torch.randn(1, 2, 1, 16) for _ in range(3)]
    past = [torch.randn(1, 2, 40, 16) for _ in range(2)]
    module = Step()
    compiled = torch.compile(module, backend="communitykv", options=EXACT)
    with torch.no_grad():
        for mask, dense in ((whole, 0), (part, 1)):
            got = compiled(*new, *past, mask)[0]
            assert ckv_compile.explain(module, show=False).dense_steps.get(OTHER_BLOCKS, 0) == dense
            if not dense:
                torch.testing.assert_close(got, module(*new, *past, mask)[0], atol=1e-5, rtol=1e-5)


class StaticStep(torch.nn.Module):
    """One step over a static cache, which advances its counter before flex_attention reads its mask."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, query, key, value, keys, values, counter, block_mask):
        position = torch.arange(1) + counter
        counter.add_(1)
        keys.index_copy_(2, position, key)
        values.index_copy_(2, position, value)
        return flex_attention(query * self.scale, keys, values, block_mask=block_mask)


@pytest.mark.parametrize("change", [None, "an unwritten key is seen", "a block less", "a full block", "short padding"])
def test_block_masks_over_a_static_cache(interpreted, change):
    length, capacity = 40, 64
    torch.manual_seed(0)
    counter, padding = torch.tensor(length), (torch.arange(capacity) <= length).repeat(2, 1)
    padding[0, :3] = False
    if change == "an unwritten key is seen":
        padding[1, length + 1] = True
    if change == "short padding":
        padding = padding[:, : capacity - 2]

    def causal(batch, head, query, key):
        return (key <= query + counter) & padding[batch, key if change != "short padding" else key.clamp(max=61)]

    mask = create_block_mask(causal, 2, None, 1, capacity, device="cpu", BLOCK_SIZE=16)
    lists = [mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices]
    if change == "a block less":
        lists[0] = lists[0] - 1
    if change == "a full block":
        lists = [lists[0] - 1, lists[1], lists[2] + 1, lists[1].flip(-1)]
    mask = BlockMask.from_kv_blocks(*lists, 16, causal, seq_lengths=(1, capacity))
    new = [torch.randn(2, 2, 1, 16) for _ in range(3)]
    caches = [torch.randn(2, 2, capacity, 16) for _ in range(2)]
    module = StaticStep()
    compiled = torch.compile(module, backend="communitykv", options=EXACT)
    with torch.no_grad():
        expected = module(*new, *(cache.clone() for cache in caches), counter, mask)
        counter.fill_(length)
        got = compiled(*new, *caches, counter, mask)
    assert counter == length + 1
    explanation = ckv_compile.explain(module, show=False)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    if change == "short padding":
        assert not explanation.decode_steps
        assert explanation.refused
    else:
        assert explanation.dense_steps.get(OTHER_BLOCKS, 0) == (change is not None), str(explanation)
        assert explanation.sparse_steps == (change is None)
