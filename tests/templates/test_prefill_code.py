"""The CUDA code that Inductor writes for prefill with lists, of a prompt whose length is a symbol.

Rewrite the expected texts with ``EXPECTTEST_ACCEPT=1 pytest``.
"""

import functools
import re

import pytest
import torch
from expecttest import assert_expected_inline
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import ckv_compile.lowering  # noqa: F401
from ckv_compile.fake_cuda import generated_code

ckv = torch.ops.ckv
KV_HEADS, HEADS = 2, 6
TEMPLATES = {"VALUE": "topk_prefill", "CELL": "topk_neighbors", "NEIGHBOR": "topk_repair"}  # by an argument


def inputs(dtype, dim, state):
    """Of two layers: new tokens, nominal views of a slab, and state on the host or the device."""
    (mode,) = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, FakeTensorMode)]
    symbol = mode.shape_env.create_symbol(1000, ConstantSource("queries"), dynamic_dim=DimDynamic.DYNAMIC)
    queries = mode.shape_env.create_symintnode(symbol, hint=1000)
    query = torch.empty(2, queries, HEADS, dim, dtype=dtype, device="cuda").transpose(1, 2)
    slab = [torch.empty(128, 2, KV_HEADS, dim, dtype=dtype, device="cuda").permute(1, 2, 0, 3) for _ in range(4)]
    length, first = (torch.empty(size, dtype=torch.int32, device=state) for size in (1, 2))
    return [query, *slab, length, first, torch.empty(2, dtype=torch.int64)]


@functools.cache
def code_of(topk="fast", kappa=8, dtype=torch.bfloat16, dim=128, state="cpu"):
    def layers(query, key_0, value_0, key_1, value_1, length, first, ticket):
        for layer, (key, value) in enumerate(((key_0, value_0), (key_1, value_1))):
            out, neighbor, weight = ckv.topk_prefill(
                query, key, value, length, first, ticket, 0.1, 10, kappa, None, topk
            )
            ckv.submit_partition(ticket, key, length, query.shape[2], neighbor, weight, layer)
            query = torch.sin(out)
        return query

    code = generated_code(layers, lambda: inputs(dtype, dim, state))
    return code[: code.index("def call(")], code[code.index("def call(") :]


def launches(definitions, call):
    """Kernels and operators in order: ours with their grid."""
    arguments = {}
    for text in definitions.split("async_compile.triton('")[1:]:
        arguments[text.split("'")[0]] = text[: text.index("'device'")]
    lines = []
    for line in call.splitlines():
        if found := re.search(r"(\w+)\.run\((.*), stream=", line):
            kind = [name for mark, name in TEMPLATES.items() if f"'arg_{mark}'" in arguments[found[1]]]
            grid = re.sub(r"\bs\d+\b", "queries", ", ".join(found[2].split(", ")[-3:]))
            lines.append(f"{kind[0]} {grid}" if kind else "fused")
        elif found := re.search(r"torch\.ops\.ckv\.(\w+)\.default\(", line):
            lines.append(found[1])
        elif ".copy_(" in line:
            lines.append("copy " + re.search(r"copy_\((\w+?)_\d+, True\)", line)[1])
    return "\n".join(lines)


def test_fast():
    assert_expected_inline(
        launches(*code_of()),
        """\
copy length
copy first
topk_prefill (127 + queries) // 128, 6, 2
topk_neighbors (3 + queries) // 4, 6, 2
submit_partition
topk_prefill (127 + queries) // 128, 6, 2
topk_neighbors (3 + queries) // 4, 6, 2
submit_partition""",
    )


def test_exact():
    assert_expected_inline(
        launches(*code_of("exact")),
        """\
copy length
copy first
topk_prefill (127 + queries) // 128, 6, 2
topk_neighbors (3 + queries) // 4, 6, 2
topk_repair 64, 2, 2
submit_partition
topk_prefill (127 + queries) // 128, 6, 2
topk_neighbors (3 + queries) // 4, 6, 2
topk_repair 64, 2, 2
submit_partition""",
    )


def test_state_on_the_device_is_not_copied():
    assert "copy" not in launches(*code_of(state="cuda"))


def test_caches_are_not_copied_and_lists_are_all_the_memory():
    _, call = code_of("exact")
    assert not re.search(r"\bclone\b", call)
    made = re.findall(r"empty_strided_cuda\((\(.*?\)), \(.*?\), torch\.(\w+)\)", re.sub(r"\bs\d+\b", "q", call))
    kinds = {
        ("(2, 6, q, 8)", "int32"),
        ("(2, 6, q, 8)", "float32"),
        ("(2, q, 6, 128)", "bfloat16"),
        ("(2, 2, 3*q)", "int32"),
    }
    state = {("(1, )", "int32"), ("(2, )", "int32"), ("(2, 2)", "int32")}
    assert set(made) <= kinds | state | {("(2, 6, q, 128)", "bfloat16")}, set(made)


def test_layers_share_their_kernels():
    _, call = code_of("exact")
    templates = re.findall(r"(triton_tem_\w+)\.run\(", call)
    assert len(templates) == 6
    assert len(set(templates)) <= 4  # what a model does with an output may be fused


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float16, 64), (torch.float32, 80), (torch.bfloat16, 256)])
def test_every_dtype_and_head_dim_has_a_kernel(dtype, dim):
    assert launches(*code_of(dtype=dtype, dim=dim)).count("topk_prefill ") == 2


@pytest.mark.parametrize("change", [{"kappa": 1}, {"kappa": 33}, {"dim": 320}, {"dtype": torch.float64}])
def test_what_the_template_does_not_do_is_left_to_the_operator(change):
    operators = [line for line in launches(*code_of(**change)).split("\n") if line != "fused"]
    assert operators == ["topk_prefill", "submit_partition"] * 2
