"""Models with attn_implementation="flex_attention": sparse steps over a dynamic cache, and block lists that are read."""

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import ckv_compile
from ckv_compile.runtime.runner import OTHER_BLOCKS
from ckv_compile.testing import prompt, tiny_model

EXACT = {"min_context": 0, "workers": 0}


def test_greedy_tokens_equal_eager(interpreted):
    model, inputs = tiny_model("llama", num_hidden_layers=1), prompt(tokens=30, padded=True)

    def greedy(callee):
        return callee.generate(**inputs, max_new_tokens=4, do_sample=False)

    expected = greedy(model)
    model.set_attn_implementation("flex_attention")
    module = torch.compile(model, backend="communitykv", options=EXACT)
    assert torch.equal(greedy(module), expected)
    explanation = ckv_compile.explain(module, show=False)
    assert explanation.decode_steps == explanation.sparse_steps == 3, str(explanation)
    assert not explanation.refused


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
