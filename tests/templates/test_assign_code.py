"""The CUDA code of a graph that assigns the new token: kernels only, some of them for all layers, and no state is copied."""

import re

import pytest
import torch

import ckv_compile.lowering  # noqa: F401
from ckv_compile.fake_cuda import generated_code
from ckv_compile.index_layout import ASSIGN_STATE, ASSIGNED_AT_ONCE, CANDIDATES, INDEX_STATE

ckv = torch.ops.ckv
BATCH, HEADS, KV_HEADS, DIM, LAYERS, SINKS, WINDOW, KAPPA, SLOTS = 2, 8, 2, 64, 2, 4, 16, 8, 1024
ASSIGNED = (
    "centroid", "centroid_scale", "channel_scale", "log_mean", "mean_at", "start", "stored", "size", "num_communities",
    "n_indexed", "log_community", "log_first", "label", "community_weight", "total_weight", "edge_neighbor",
    "edge_weight", "gamma",
)  # fmt: skip
MARKS = {  # an argument of each template that none after it has
    "MEMBER": "retrieve", "SHORTLIST": "route", "NEIGHBOR": "plan", "PLAN": "commit", "REST": "pick_edges",
    "KEY_NEW": "append_kv", "TOTAL": "merge_splits", "VALUE": "attend", "TOKENS": "edges",
}  # fmt: skip


def kernel_of(arguments: list[str]) -> str:
    return next(name for mark, name in MARKS.items() if mark in arguments)


def code_of(source: str, graphs: int) -> tuple[list[str], str]:
    """The names of the templates' kernels that run, and the text of the wrapper's body."""
    kinds = {name: kind or torch.bfloat16 for name, kind in (INDEX_STATE | ASSIGN_STATE).items()}

    def arguments():
        def empty(*shape, dtype=torch.bfloat16):
            return torch.empty(*shape, device="cuda", dtype=dtype)

        caches = [empty(128, BATCH, KV_HEADS, DIM).permute(1, 2, 0, 3) for _ in range(2 * LAYERS)]
        small = [empty(1, dtype=torch.int32), empty(BATCH, dtype=torch.int32)]
        small += [empty(4, dtype=torch.int32) for _ in range(LAYERS)]
        state = [empty(1, dtype=kind) for kind in kinds.values()]
        return [empty(BATCH, HEADS, 1, DIM), empty(BATCH, KV_HEADS, 1, DIM), *small, *caches, *state]

    def step(query, new, length, first, *rest):
        capacities, caches = rest[:LAYERS], rest[LAYERS : 3 * LAYERS]
        s = dict(zip(kinds, rest[3 * LAYERS :], strict=True))
        for layer in range(LAYERS):
            capacity, key, value = capacities[layer], caches[2 * layer], caches[2 * layer + 1]
            ckv.append_kv(key, value, new, new, length)
            shortlist, left_out = ckv.route(
                query, s["centroid"], s["centroid_scale"], s["channel_scale"], s["size"], s["start"],
                s["stored"], s["num_communities"], capacity, s["scores"], layer, graphs, KV_HEADS, 0.1, "max", length, SLOTS,
            )  # fmt: skip
            tokens, count = ckv.retrieve(
                shortlist, left_out, s["scores"], s["start"], s["stored"], s["size"], s["member"], s["log_community"],
                s["log_first"], s["num_communities"], s["n_indexed"], capacity, length, first, s["tally"], layer,
                BATCH, graphs, 256, SINKS, WINDOW, True,
            )  # fmt: skip
            attended = (tokens, count, s["n_indexed"], capacity, length, first)
            out = ckv.sparse_attention_edges(
                query, key, value, *attended, None, *(s[name] for name in (*CANDIDATES, "new_key")), layer, 0.1, SINKS,
                WINDOW, KAPPA, source,
            )  # fmt: skip
            query, new = out + 1, new * 2
        lists = graphs if source == "keys" else HEADS
        places = graphs if source == "keys" else max(graphs, KV_HEADS)
        kept = (s[name] for name in CANDIDATES)
        edges = ckv.pick_edges(*kept, first, LAYERS, places, lists, 256, SINKS, KAPPA, source)
        ckv.assign_tokens(
            *edges, *(s[name] for name in ("new_key", *ASSIGNED)), capacities[0], length, first, LAYERS, KV_HEADS, DIM,
            lists, KAPPA, graphs, SINKS, 0.5,
        )  # fmt: skip
        length.add_(1)
        return query

    code = generated_code(step, arguments)
    kernels, call = code[: code.index("def call(")], code[code.index("def call(") :]
    names = {}
    for text in kernels.split("async_compile.triton('")[1:]:
        given = re.findall(r"'arg_(\w+)'", text)
        if given:
            names[text.split("'")[0]] = given
    launched = re.findall(r"(\w+)\.run\(", call)
    return [kernel_of(names[name]) for name in launched if name in names], call


@pytest.mark.parametrize(("source", "graphs"), [("attention", 2), ("attention", 8), ("keys", 2), ("keys", 1)])
def test_layers_run_kernels_only_and_nothing_is_copied(source, graphs):
    launches, call = code_of(source, graphs)
    assert "ops.ckv" not in call
    own = ["edges"] if (source, graphs) == ("keys", 1) else []
    layer = ["route", "retrieve", *own, "attend", "merge_splits"]
    assert launches == layer * LAYERS + ["pick_edges", *["plan", "commit"] * ASSIGNED_AT_ONCE]
    # Copies of one-element state would be the only ones of that size.
    assert not re.search(r"empty_strided_cuda\(\(1, ?\)", call)
    assert not re.search(r"\.copy_\(|\.clone\(", call)
