"""The kernels that build token graphs compile for sm_90 and spill nothing; in a process that interprets none."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

SHORT = {"int32": "i32", "int64": "i64", "float32": "fp32", "float64": "fp64"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kernels_compile_and_spill_nothing():
    root = Path(__file__).parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, __file__], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 12
    assert [kernel for kernel in found if kernel["spilled"]] == []


def compiled(kernel, constants):
    """Registers and spilled bytes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
    from triton.compiler import ASTSource

    from ckv_compile.kernels.token_graph import DTYPES, EXACT

    values = {name: value for name, value in constants.items() if name != "num_warps" and name not in EXACT}
    names = kernel.arg_names
    types = {name: "*" + SHORT[str(dtype).removeprefix("torch.")] for name, dtype in DTYPES.items()}
    signature = {name: "constexpr" if name in values else types.get(name, "i32") for name in names}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in values.items()},
        attrs={(place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if name in types},
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
    from ckv_compile.kernels.token_graph import variants

    for kernel, constants in variants(4, 8):
        print(json.dumps({"kernel": kernel.__name__, **constants, **compiled(kernel, constants)}), flush=True)
