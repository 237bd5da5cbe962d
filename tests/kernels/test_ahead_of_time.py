"""The kernels that build token graphs compile for sm_90 and spill nothing; in a process that interprets none."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

TYPES = {
    "NEIGHBOR": "i32", "WEIGHT": "fp32", "FIRST": "i64", "IDS": "i32", "ALPHA": "fp32", "LISTED": "i32",
    "DROPPED": "i64", "CURSOR": "i32", "PLACED": "i32", "ROW": "i64", "START": "i64", "NUMBERS": "fp64", "OTHER": "i32",
    "LENGTH": "i32", "STRONGEST": "fp32", "DENSE": "i64", "INDPTR": "i64", "INDICES": "i32", "WEIGHTS": "fp32",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kernels_compile_and_spill_nothing():
    root = Path(__file__).parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, __file__], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 11
    assert [kernel for kernel in found if kernel["spilled"]] == []


def cases():
    from ckv_compile.kernels import token_graph as kernels

    shape = {"LISTS": 4, "KAPPA": 8, "M": 8}
    yield kernels.clean_lists, {**shape, "BLOCK": 64, "num_warps": 4}
    yield kernels.place_entries, {"BLOCK": 1024, "num_warps": 4}
    for terms in kernels.ROW_TERMS:
        yield kernels.sum_rows, kernels.row_constants(131_072, 4, 8, terms)
    yield kernels.add_hubs, kernels.hub_constants(4, 8)
    yield kernels.gather_hubs, {"LISTS": 4, "M": 8, "BLOCK": 2048, "num_warps": 8}
    for constants in (kernels.PRUNED_ROWS, kernels.PRUNED_HUBS):
        yield kernels.prune_rows, {"LISTS": 4, "M": 8, "WRITES": True, **constants}
    yield kernels.prune_rows, {"LISTS": 4, "M": 8, "WRITES": False, **kernels.PRUNED_ROWS}


def compiled(kernel, constants):
    """Registers and spilled bytes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
    from triton.compiler import ASTSource

    from ckv_compile.kernels.token_graph import EXACT

    values = {name: value for name, value in constants.items() if name != "num_warps"}
    names = kernel.arg_names
    signature = {n: "constexpr" if n in values else "*" + TYPES[n] if n in TYPES else "i32" for n in names}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in values.items()},
        attrs={(place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if name in TYPES},
    )
    options = {"num_warps": constants["num_warps"], **EXACT}
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(result.asm["ptx"])
        file.flush()
        command = [get_ptxas(90).path, "-v", f"--gpu-name={sm_arch_from_capability(90)}", file.name, "-o", os.devnull]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", text)))
    return {"registers": max(map(int, re.findall(r"Used (\d+) registers", text))), "spilled": spilled}


if __name__ == "__main__":
    for kernel, constants in cases():
        print(json.dumps({"kernel": kernel.__name__, **constants, **compiled(kernel, constants)}), flush=True)
