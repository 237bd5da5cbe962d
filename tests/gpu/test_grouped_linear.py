"""Grouped linear layers on a GPU: the same tokens, recorded, and reported."""

import pytest
import torch

import ckv_compile
from ckv_compile.testing import prompt, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("grouping", "found"), [("off", (0, 0)), ("inputs", (10, 4)), ("all", (15, 9))])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_tokens_are_those_of_the_model(family, grouping, found, batch):
    torch._dynamo.reset()
    model = tiny_model(family).cuda()
    inputs = {name: tensor.cuda() for name, tensor in prompt(batch, tokens=40).items()}
    expected = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    options = {"min_context": 0, "workers": 0, "group_projections": grouping}
    module = torch.compile(model, backend="communitykv", options=options)
    assert torch.equal(module.generate(**inputs, max_new_tokens=16, do_sample=False), expected)
    explanation = ckv_compile.explain(module, show=False)
    assert {graph.grouped for graph in explanation.graphs if graph.phase == "decode"} == {found}
    assert {explanation.captured[graph] for graph in explanation.graphs if graph.phase == "decode"} == {"captured"}
    torch._dynamo.reset()
