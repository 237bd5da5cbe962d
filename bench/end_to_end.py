"""Whole generations through the backend against eager: tokens, logits, and that every decode step was sparse.

    python -m bench.end_to_end [--device cuda] [--dtypes float32 bfloat16] [--quick]

Random models of a few families, the whole context inside the budget, so that the sparse operators must lose nothing.
float32: greedy tokens equal eager's. Other dtypes: teacher-forced on the float64 model's tokens, the logits' distance
to the float64 model's beside eager's own, and tokens equal wherever float64's margin exceeds that rounding.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import time

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import ckv_compile
from bench.results_file import write_results
from ckv_compile.testing import prompt, tiny_model

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
GRAPHS = ("keys", "attention", "mixed")


def compiled(model: torch.nn.Module, graph: str) -> torch.nn.Module:
    torch._dynamo.reset()
    options = {"min_context": 0, "deterministic": True, "graph": graph, "refresh_interval": 16, "append_block": 16}
    return torch.compile(model, backend="communitykv", options=options)


def compare_generate(family: str, cache: str, padded: bool, graph: str, device: str) -> dict:
    """Greedy float32 tokens of an unmodified generate, and logits, against eager."""
    model = tiny_model(family).to(device)
    inputs = {name: tensor.to(device) for name, tensor in prompt(tokens=150, padded=padded).items()}
    arguments = {
        "max_new_tokens": 40, "do_sample": False, "output_logits": True, "return_dict_in_generate": True,
        **({"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}),
    }  # fmt: skip
    expected = model.generate(**inputs, **arguments)
    began = time.perf_counter()
    module = compiled(model, graph)
    out = module.generate(**inputs, **arguments)
    explanation = ckv_compile.explain(module, show=False)
    distance = max((a - b).abs().max().item() for a, b in zip(out.logits, expected.logits, strict=True))
    equal = torch.equal(out.sequences, expected.sequences)
    sparse = explanation.sparse_steps == explanation.decode_steps == 39
    return {
        "family": family, "cache": cache, "padded": padded, "graph": graph, "dtype": "float32", "tokens_equal": equal,
        "logit_distance": distance, "every_step_sparse": sparse, "seconds": time.perf_counter() - began,
        "ok": equal and sparse and distance <= 1e-4,
    }  # fmt: skip


def compare_teacher_forced(family: str, graph: str, dtype: torch.dtype, device: str) -> dict:
    """Logits of a hand-written loop in ``dtype`` against the same weights in float64, beside eager's."""
    model = tiny_model(family).to(device, dtype)
    exact_model = copy.deepcopy(model).double()
    ids = prompt(tokens=150)["input_ids"].to(device)
    began = time.perf_counter()
    module = compiled(model, graph)
    ours_worst = eager_worst = 0.0
    clear = wrong = 0
    with torch.no_grad():
        out, eager = module(input_ids=ids, use_cache=True), model(input_ids=ids, use_cache=True)
        name = "cache" if "cache" in out else "past_key_values"
        for _ in range(24):
            exact = exact_model(input_ids=ids).logits[:, -1]
            ours, eagers = out.logits[:, -1].double(), eager.logits[:, -1].double()
            rounding = (eagers - exact).abs().max()
            ours_worst = max(ours_worst, (ours - exact).abs().max().item())
            eager_worst = max(eager_worst, rounding.item())
            best = exact.topk(2).values
            decided = best[:, 0] - best[:, 1] > 4 * rounding
            clear += int(decided.sum())
            wrong += int((ours.argmax(-1) != exact.argmax(-1))[decided].sum())
            token = exact.argmax(-1)[:, None]
            ids = torch.cat([ids, token], 1)
            out = module(input_ids=token, use_cache=True, **{name: out[name]})
            eager = model(input_ids=token, use_cache=True, **{name: eager[name]})
    explanation = ckv_compile.explain(module, show=False)
    sparse = explanation.sparse_steps == explanation.decode_steps == 24
    return {
        "family": family, "cache": "dynamic", "padded": False, "graph": graph, "dtype": str(dtype).split(".")[1],
        "tokens_equal": wrong == 0, "tokens_decided": clear, "logit_distance": ours_worst,
        "eager_logit_distance": eager_worst, "every_step_sparse": sparse, "seconds": time.perf_counter() - began,
        "ok": wrong == 0 and sparse and ours_worst <= 2 * eager_worst,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16", "float16"]
    )
    parser.add_argument("--families", nargs="+", default=FAMILIES, choices=FAMILIES)
    parser.add_argument("--quick", action="store_true", help="one family, one graph source")
    arguments = parser.parse_args()
    families = FAMILIES[:1] if arguments.quick else arguments.families
    graphs = GRAPHS[:1] if arguments.quick else GRAPHS

    cases = []
    if "float32" in arguments.dtypes:
        forms = list(itertools.product(("dynamic", "static"), (False, True)))
        cases += [
            (compare_generate, (family, cache, padded, graph, arguments.device))
            for family, (cache, padded), graph in itertools.product(families, forms, graphs)
            if family == FAMILIES[0] or graph == "keys"
        ]
    cases += [
        (compare_teacher_forced, (family, graph, getattr(torch, dtype), arguments.device))
        for dtype, family, graph in itertools.product(arguments.dtypes, families, graphs)
        if dtype != "float32" and (family == FAMILIES[0] or graph == "keys")
    ]
    rows = [function(*case) for function, case in track(cases, "generating")]

    table = Table("family", "cache", "padded", "graph", "dtype", "tokens", "logits off by", "all sparse", "")
    for row in rows:
        table.add_row(
            row["family"], row["cache"], str(row["padded"]), row["graph"], row["dtype"],
            "equal" if row["tokens_equal"] else "differ", f"{row['logit_distance']:.1e}", str(row["every_step_sparse"]),
            "ok" if row["ok"] else "FAILED",
        )  # fmt: skip
    Console().print(table)
    claims = {"end_to_end_ok": sum(row["ok"] for row in rows) / len(rows)}
    print(write_results("end_to_end", rows, claims, device=arguments.device, label=arguments.device.split(":")[0]))
    if claims["end_to_end_ok"] < 1:
        raise SystemExit("some generations differ from eager")


if __name__ == "__main__":
    main()
