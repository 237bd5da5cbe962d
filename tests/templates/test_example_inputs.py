"""What ``max_autotune`` times configurations on is an index that a kernel can run on."""

import pytest
import torch

from ckv_compile import rendered
from ckv_compile.lowering import append_kv, example_inputs, retrieve, route, sparse_attention
from ckv_compile.lowering.template_call import Template

SLOTS, BUDGET, BATCH, GRAPHS, DIM = 2048, 512, 2, 2, 64


class Node:
    """What makers ask of Inductor's node."""

    def __init__(self, device, size=(), stride=(), dtype=torch.float32):
        self.device, self.size, self.stride, self.dtype = torch.device(device), size, stride, dtype

    def get_device(self):
        return self.device

    def get_size(self):
        return self.size

    def get_stride(self):
        return self.stride

    def get_dtype(self):
        return self.dtype


@pytest.fixture
def made(device, monkeypatch):
    monkeypatch.setattr(example_inputs, "COMMUNITIES", 256)
    monkeypatch.setattr(example_inputs, "TOKENS", 256 * example_inputs.MEMBERS)
    monkeypatch.setattr(example_inputs, "V", type("V", (), {"graph": _Graph}))
    makers = example_inputs.makers(BATCH, GRAPHS, DIM, 64, BUDGET)
    strides = (GRAPHS * DIM, DIM, BATCH * GRAPHS * DIM, 1)
    nodes = {name: Node(device, (BATCH, GRAPHS, 128, DIM), strides) for name in ("KEY", "VALUE")}
    nodes["LEFT_OUT"] = Node(device, (BATCH, GRAPHS, 64))
    return {name: make(nodes.get(name, Node(device))) for name, make in makers.items()}


class _Graph:
    class sizevars:  # noqa: N801
        guard_int = staticmethod(int)


def launch(template: Template, helpers, constants, grid, tensors, output):
    names = template.argument_names(constants)
    kernel = rendered.RenderedKernel(template.name, helpers, constants)
    assert kernel.arguments == names
    kernel(grid, {name: tensors[name] for name in names}, output)


def test_kernels_run_on_the_examples(made, device):
    query = torch.randn(BATCH, GRAPHS, 1, DIM, device=device)
    constants = {**route.constants_of(BATCH, GRAPHS, DIM, GRAPHS, GRAPHS, 0.1, "max", 64), "PROGRAMS": 4, "QUOTA": 16}
    constants |= dict(route.configs("max")[0], BLOCK_C=32, CHUNK=64, APPEND=True)
    constants |= append_kv.new_constants(GRAPHS, 1, DIM, DIM)
    new = torch.randn(BATCH, GRAPHS, 1, DIM, device=device)
    left_out = rendered.poisoned((BATCH, GRAPHS, 64), torch.float32, device)
    scores = made["SCORES"].clone()
    launch(
        route.template,
        [],
        constants,
        (4, BATCH * GRAPHS, 1),
        {**made, "QUERY": query, "KEY_NEW": new, "VALUE_NEW": -new},
        left_out,
    )
    assert torch.equal(made["KEY"][:, :, example_inputs.TOKENS], new[:, :, 0])
    assert made["SCORES"].isfinite().all()
    assert not torch.equal(made["SCORES"], scores)
    assert left_out[:, :, :4].isfinite().all()

    constants = retrieve.constants_of(BATCH, GRAPHS, BUDGET, 10, 64, False, 64)
    constants |= dict(retrieve.configs(64)[0], PROGRAMS=4, PARTS=2, OWN=32)
    made["LEFT_OUT"][:] = left_out
    count = rendered.poisoned((BATCH, GRAPHS), torch.int32, device)
    launch(retrieve.template, ["attended", "threshold"], constants, (2, BATCH * GRAPHS, 1), made, count)
    assert ((count > 0) & (count <= BUDGET)).all()

    constants = sparse_attention.attend_constants(BATCH, GRAPHS, GRAPHS, DIM, DIM, 0.1, GRAPHS, BUDGET, 10, 64)
    constants |= dict(sparse_attention.configs(torch.float32, DIM)[0], SPLITS=4)
    shape = (BATCH, 4, GRAPHS)
    total = rendered.poisoned((*shape, DIM), torch.float32, device)
    tensors = {**made, "QUERY": query, "COUNT": count}
    tensors |= {name: rendered.poisoned(shape, torch.float32, device) for name in ("TOP", "MASS")}
    launch(sparse_attention.attend, ["attended"], constants, (4, BATCH * GRAPHS, 1), tensors, total)
    assert total.isfinite().all()
