"""Every template in its default configuration compiles for each architecture, spills nothing and fits shared memory.

The compiler runs in a process of its own (this file as a script), since this one may interpret kernels. With
``AHEAD_OF_TIME=all`` (``make ahead-of-time``) every kernel is compiled for each architecture; otherwise three variants of
every template for 9.0, and with slow tests one for the others, another for each.
"""

import collections
import json
import os
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import pytest
import torch

SHARED = {80: 163, 90: 227, 100: 227}  # KiB that a program may use
ARCHITECTURES = tuple(SHARED) if os.environ.get("SLOW_TESTS") == "1" else (90,)


@pytest.fixture(scope="module")
def processes():
    """One per architecture, side by side."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": ""}
    running = {}
    for architecture in ARCHITECTURES:
        output = tempfile.TemporaryFile("w+")  # noqa: SIM115  (read when the process is over)
        share = os.environ.get("AHEAD_OF_TIME", "some")
        command = [sys.executable, __file__, str(architecture), share]
        process = subprocess.Popen(command, cwd=root, env=environment, stdout=output, stderr=subprocess.STDOUT)
        running[architecture] = (process, output)
    yield running
    for process, output in running.values():
        process.kill()
        process.wait()
        output.close()


@pytest.mark.timeout(900)  # three compilers side by side
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_default_configurations_spill_nothing_and_fit(processes, architecture):
    process, output = processes[architecture]
    status = process.wait()
    output.seek(0)
    text = output.read()
    assert status == 0, text[-3000:]
    print(text)
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert {kernel["kernel"] for kernel in found} >= {
        "route", "route_coarse", "coarse_centroids", "retrieve", "sparse_attention", "merge_splits", "edges",
        "pick_edges", "select_summaries", "attend_summaries",
    }  # fmt: skip
    assert {kernel["kernel"] for kernel in found} >= {"topk_prefill", "topk_neighbors", "topk_repair", "key_neighbors"}
    assert [kernel for kernel in found if kernel["spilled"]] == []
    assert [kernel for kernel in found if kernel["serialized"]] == []
    assert [kernel for kernel in found if kernel["shared"] > SHARED[architecture] * 1024] == []


# ---------------------------------------------------------------------- what the process does

POINTERS = {
    "LEFT_OUT": "fp32", "CENTROID": "i8", "CENTROID_SCALE": "fp32", "CHANNEL_SCALE": "fp32", "SCORES": "fp32",
    "TOP": "fp32", "MASS": "fp32", "TOTAL": "fp32", "TALLY": "i64", "CANDIDATE_REST": "i64", "REST": "i64",
    "CANDIDATE_SCORE": "fp32", "SCORE": "fp32", "NORM": "fp32", "WEIGHT": "fp32", "SUMMARY_TOTAL": "fp32",
    "SUMMARY_TOP": "fp32", "SUMMARY_MASS": "fp32", "COMMUNITY_WEIGHT": "fp32", "GAMMA": "fp32", "EDGE_WEIGHT": "fp32",
    "INCREMENT": "fp32", "SUMS": "fp32", "INVERSE": "fp32", "OFFSET": "i64", "COARSE": "i8", "COARSE_SCALE": "fp32",
    "COARSE_SCORES": "fp32", "KEY_MEAN": "fp32",
}  # fmt: skip
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
OF_THE_CACHE = {
    "QUERY", "KEY", "VALUE", "KEY_NEW", "VALUE_NEW", "NEW_KEY", "LOG_MEAN", "SINK_LOGITS", "NEW_VALUE", "MEAN_VALUE",
}  # fmt: skip
OF_THE_MODEL = {"INPUT", *(f"{kind}_{i}" for kind in ("WEIGHT", "BIAS") for i in range(4))}  # the others are int32


def compiled(architecture, name, helpers, constants, output, dtype="bf16"):
    """Registers, spilled bytes and bytes of shared memory of one kernel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
    from triton.compiler import ASTSource

    from ckv_compile.rendered import RenderedKernel

    kernel = RenderedKernel(name, helpers, {"PDL": architecture >= 90, **constants})
    tensors, names = {*kernel.arguments, "OUT"}, kernel.names()
    types = {n: "*" + (dtype if n in OF_THE_CACHE | OF_THE_MODEL else POINTERS.get(n, "i32")) for n in kernel.arguments}
    types["OUT"] = "*" + output
    last = "_1" if "INPUT" in tensors else "_3"
    unit = [n for n in names if n.startswith("stride_") and n.endswith(last)]  # head_dim is innermost
    signature = {n: "constexpr" if n in unit else types.get(n, "i32") for n in names}
    aligned = {n for n in names if n in tensors or (n.startswith("stride_") and n not in unit)}
    source = ASTSource(
        fn=kernel.kernel,
        signature=signature,
        constexprs={(names.index(n),): 1 for n in unit},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
    result = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=kernel.options)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(result.asm["ptx"])
        file.flush()
        command = [get_ptxas(architecture).path, "-v", f"--gpu-name={sm_arch_from_capability(architecture)}", file.name]
        text = subprocess.run([*command, "-o", os.devnull], capture_output=True, text=True, check=True).stderr
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", text)))
    registers = max(map(int, re.findall(r"Used (\d+) registers", text)))
    serialized = "wgmma.mma_async instructions are serialized" in text  # the multiplications wait for one another
    return {"registers": registers, "spilled": spilled, "shared": result.metadata.shared, "serialized": serialized}


def kernels(architecture):
    """(label, name, helpers, constants, output type, type of K and V): what models of common shapes use."""
    from ckv_compile.kernels import key_neighbors
    from ckv_compile.lowering import (
        append_kv,
        assign_tokens,
        attend_summaries,
        edges,
        grouped_linear,
        pick_edges,
        retrieve,
        route,
        route_coarse,
        select_summaries,
        sparse_attention,
        topk_prefill,
    )
    from ckv_compile.runtime import block_writes

    def routed(dim, score, heads=32, kv_heads=8, graphs=8, dtype="bf16", queries=1):
        constants = route.constants_of(1, heads, dim, graphs, kv_heads, 0.1, score, 2048, queries)
        rows = constants["BLOCK_H"] if queries > 1 else 0
        constants |= route.configs(score, constants["PARTS"], dim, rows)[0]
        label = f"D={dim} {score} {dtype} heads={heads}/{kv_heads} graphs={graphs} queries={queries}"
        if score == "softmax":
            yield f"statistics {label}", "route", [], {**constants, "STATISTICS": True}, "fp32", dtype
        yield label, "route", [], constants, "fp32", dtype
        if score == "max":
            appends = append_kv.new_constants(kv_heads, queries, dim, dim)
            yield f"appends {label}", "route", [], {**constants, "APPEND": True, **appends}, "fp32", dtype
            listed = route.configs(score, constants["PARTS"], dim, rows, listed=True)[0]
            yield f"listed {label}", "route", [], {**constants, **listed, "LISTED": True}, "fp32", dtype
            groups = route_coarse.constants_of(1, heads, dim, graphs, kv_heads, 0.1, 512, 16384, 2048, queries)
            yield label, "route_coarse", [], groups | route_coarse.configs(groups)[0], "i32", dtype

    def attended(dim, dtype, heads=32, kv_heads=8, queries=1, source=None, kappa=8):
        torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
        label = f"D={dim} {dtype} heads={heads}/{kv_heads} queries={queries} edges={source} kappa={kappa}"
        constants = sparse_attention.attend_constants(
            1, heads, kv_heads, dim, dim, 0.1, kv_heads, 4096, 10, 64, queries
        )
        merges = sparse_attention.merge_constants(1, heads, dim, constants["SPLITS"], queries, has_sinks=True)
        if source is not None:
            constants |= edges.edge_constants(source == "keys", kappa, constants)
        if source == "attention":
            merges["EDGES"] = True
        rows = constants["BLOCK_H"] if queries > 1 else 0
        constants |= sparse_attention.configs(torch_dtype, dim, rows, constants.get("KEPT", 0))[0]
        yield label, "sparse_attention", ["attended", "edge_entries"], constants, "fp32", dtype
        yield label, "merge_splits", [], merges | sparse_attention.merge_configs(merges)[0], dtype, dtype

    def listed(slots, has_log, rows=8):
        constants = retrieve.constants_of(rows // 8, 8, 4096, 10, 64, has_log, slots)
        constants |= retrieve.configs(slots, rows, has_log)[0]
        label = f"slots={slots} log={has_log} rows={rows}"
        yield label, "retrieve", ["attended", "threshold"], constants, "i32", "bf16"

    def summarized(dim, dtype, heads=32, kv_heads=8, graphs=8, reserved=64, values=False):
        torch_dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
        label = f"D={dim} {dtype} heads={heads}/{kv_heads} graphs={graphs} b={reserved} values={values}"
        attends = sparse_attention.attend_constants(1, heads, kv_heads, dim, dim, 0.1, graphs, 4096, 10, 64)
        constants = attend_summaries.constants_of(attends, reserved, torch_dtype, values=values)
        constants |= attend_summaries.configs(torch_dtype, dim)[0]
        yield label, "attend_summaries", [], constants, "fp32", dtype
        merges = sparse_attention.merge_constants(1, heads, dim, attends["SPLITS"], has_sinks=True)
        merges |= sparse_attention.merge_configs(merges)[0]
        yield label, "merge_splits", [], {**merges, "SUMMARIES": reserved}, dtype, dtype

    def selected(reserved):
        constants = select_summaries.constants_of(1, 8, 4096, reserved, 10, 64) | select_summaries.configs()[0]
        yield f"b={reserved}", "select_summaries", ["attended", "threshold"], constants, "i32", "bf16"
        constants = retrieve.constants_of(1, 8, 4096, 10, 64, False, 2048, reserved=reserved)
        constants |= retrieve.configs(2048, 8)[0]
        yield f"b={reserved}", "retrieve", ["attended", "threshold"], constants, "i32", "bf16"

    def assigned(dim, dtype):
        torch_dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
        constants = edges.constants_of(1, 8, dim, 4096, 10, 64, 8)
        constants |= edges.configs(torch_dtype, dim, constants["KEPT"])[0]
        yield f"D={dim} {dtype}", "edges", ["attended", "edge_entries"], constants, "i32", dtype
        plans = assign_tokens.plan_constants(36, 1, 8, 32, 8, 10, 0.5)
        entries = plans["BLOCK_L"] * plans["BLOCK_K"]
        yield "8 graphs", "plan_tokens", [], plans | assign_tokens.plan_configs(plans)[0], "i32", dtype
        commits = assign_tokens.commit_constants(36, 1, 8, 8, dim, entries) | assign_tokens.commit_configs()[0]
        yield f"D={dim} {dtype}", "assign_tokens", [], commits, "i32", dtype
        yield f"D={dim} {dtype} values", "assign_tokens", [], {**commits, "VALUES": True}, "i32", dtype
        later = {"LATER": True}
        yield (
            "8 graphs, later",
            "plan_tokens",
            [],
            {**plans, **assign_tokens.plan_configs(plans)[0], **later},
            "i32",
            dtype,
        )
        yield f"D={dim} {dtype} later", "assign_tokens", [], {**commits, "VALUES": True, **later}, "i32", dtype

    def picked(source, budget, kappa):
        constants = pick_edges.constants_of(36, 1, 8, 32, budget, 10, kappa, source == "keys")
        yield (
            f"{source} kappa={kappa}",
            "pick_edges",
            ["edge_entries"],
            constants | pick_edges.configs()[0],
            "i32",
            "bf16",
        )

    def projected(rows, sizes, channels, dtype, biased=False):
        torch_dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
        constants = grouped_linear.constants_of(rows, channels, sizes, [biased] * len(sizes))
        constants |= grouped_linear.configs(rows, channels, torch_dtype, architecture // 10)[0]
        yield f"M={rows} N={sizes} K={channels} {dtype}", "grouped_linear", [], constants, dtype, dtype

    def prefilled(dim, kappa, exact, dtype):
        torch_dtype = DTYPES[dtype]
        label = f"D={dim} kappa={kappa} {dtype} exact={exact}"
        tma = architecture >= 90
        constants = topk_prefill.attend_constants(
            32, 8, dim, dim, 0.1, 10, kappa, exact=exact, has_sinks=kappa == 8, tma=tma
        )
        constants |= topk_prefill.attend_config(torch_dtype, dim, kappa, exact, architecture // 10)
        yield label, "topk_prefill", [], constants, dtype, dtype
        if kappa:
            looks = topk_prefill.look_up_constants(constants)
            yield label, "topk_neighbors", [], looks | topk_prefill.look_up_config(looks), "i32", dtype
        if exact:
            repairs = topk_prefill.repair_constants(looks) | topk_prefill.repair_config(
                torch_dtype, dim, kappa, architecture // 10
            )
            yield label, "topk_repair", [], repairs, "i32", dtype

    def neighbored(dim, kappa, dtype):
        constants = key_neighbors.constants_of(8, dim, 10, kappa, tma=architecture >= 90)
        constants |= key_neighbors.configs(DTYPES[dtype], dim)[0]
        yield f"D={dim} kappa={kappa} {dtype}", "key_neighbors", [], constants, "i32", dtype
        yield f"D={dim} {dtype}", "key_lengths", [], key_neighbors.length_constants(dim), "fp32", dtype

    def published(dim, dtype, graphs=8):
        width = dim if graphs > 1 else 8 * dim
        shape = types.SimpleNamespace(graphs=graphs, kv_heads=8, head_dim=dim, centroid_dim=width)
        for use, output in (("squares", "fp32"), ("codes", "i8"), ("means", dtype)):
            constants = block_writes.means_constants(shape, use, aligned=True)
            yield f"{use} D={dim} {dtype} graphs={graphs}", "community_means", [], constants, output, dtype
        constants = block_writes.means_constants(shape, "codes", aligned=True, centred=True)
        yield f"centred D={dim} {dtype} graphs={graphs}", "community_means", [], constants, "i8", dtype
        yield f"D={dim} graphs={graphs}", "coarse_centroids", [], block_writes.group_constants(shape), "i8", dtype

    for labels in (False, True):
        yield f"labels={labels}", "place_communities", [], {**block_writes.place_constants(labels)}, "i32", "bf16"
    for dim, dtype, graphs in ((128, "bf16", 8), (256, "fp16", 8), (128, "bf16", 1), (80, "fp32", 8)):
        yield from published(dim, dtype, graphs)
    appended = append_kv.constants_of(1, 8, 1, 128, 128) | {"num_warps": 1, "num_stages": 1}
    yield "D=128 bf16", "append_kv", [], appended, "i32", "bf16"
    for dim in (64, 128, 256):
        yield from routed(dim, "max")
        yield from attended(dim, "bf16")
    for dim in (64, 128):
        yield from attended(dim, "fp32")
    yield from routed(128, "max", graphs=1)
    # Several queries: up to 64 rows of a group.
    for dim, dtype in ((128, "bf16"), (256, "bf16"), (128, "fp32")):
        yield from attended(dim, dtype, 64, queries=8)
    yield from routed(256, "max", 64, queries=8)
    yield from routed(128, "softmax", 64, queries=8)
    yield from routed(128, "max", 64, graphs=1, queries=8)
    for score in ("relative", "softmax", "random"):
        yield from routed(128, score)
    for slots, has_log, rows in ((2048, False, 8), (2048, True, 8), (4096, True, 8), (2048, True, 32)):
        yield from listed(slots, has_log, rows)
    yield from listed(4096, False, 16)
    for reserved in (4, 256):
        yield from selected(reserved)
    for dim, dtype in ((64, "bf16"), (128, "bf16"), (256, "bf16"), (128, "fp32")):
        yield from summarized(dim, dtype)
    yield from summarized(128, "bf16", graphs=1, values=True)
    yield from summarized(128, "bf16", 64, 4, graphs=64, reserved=4, values=True)
    yield from summarized(128, "bf16", 64, 1, graphs=1)
    yield from assigned(128, "bf16")
    for source, kappa in (("keys", 8), ("attention", 8), ("attention", 32)):
        yield from picked(source, 4096, kappa)
    for source in ("keys", "attention"):
        for dim, dtype in ((128, "bf16"), (256, "bf16"), (128, "fp32")):
            yield from attended(dim, dtype, source=source)
    yield from attended(128, "bf16", source="attention", kappa=32)
    yield from attended(128, "bf16", 64, 4, source="attention")
    for dim, kappa, exact, dtype in (
        (128, 8, False, "bf16"), (128, 8, True, "bf16"), (256, 8, True, "bf16"), (96, 4, True, "fp16"),
        (128, 32, True, "bf16"), (128, 0, False, "bf16"), (64, 8, False, "fp32"),
    ):  # fmt: skip
        yield from prefilled(dim, kappa, exact, dtype)
    for dim, kappa, dtype in ((128, 8, "bf16"), (128, 16, "fp16"), (256, 8, "bf16"), (64, 8, "fp32")):
        yield from neighbored(dim, kappa, dtype)
    for rows in (1, 4):
        yield from projected(rows, (4096, 1024, 1024), 4096, "bf16")
        yield from projected(rows, (3584, 512, 512), 3584, "bf16", biased=True)
        yield from projected(rows, (4096,), 12288, "bf16")
        yield from projected(rows, (4096, 1024, 1024), 4096, "fp32")


def some(all_kernels, architecture):
    """A few variants of every template, beginning elsewhere for each architecture."""
    count = 3 if architecture == 90 else 1
    variants = collections.defaultdict(list)
    for kernel in all_kernels:
        variants[kernel[1]].append(kernel)
    for kinds in variants.values():
        begin = architecture // 10 * count % len(kinds)
        yield from (kinds + kinds)[begin : begin + min(count, len(kinds))]


if __name__ == "__main__":
    architecture = int(sys.argv[1])
    chosen = kernels(architecture) if sys.argv[2] == "all" else some(kernels(architecture), architecture)
    for label, name, *rest in chosen:
        print(json.dumps({"kernel": name, "case": label, **compiled(architecture, name, *rest)}), flush=True)
