"""How well retrieval keeps a model's predictions: SmolLM2-135M with every layer sparse against its own dense logits.

Three tests after a prompt of 7,936 tokens, teacher-forced: 256 tokens of Python, 256 of English prose, and copying: four
times a cue of 16 tokens repeats the start of an earlier passage of the prose and the next 40 tokens of it are predicted.
Per token: does the most probable token agree with dense, and KL(dense || ours). Every step goes through the compiled
model, one token at a time. The controls run through the same operators: "streaming" attends sinks and the most recent
tokens (StreamingLLM), "random" draws pages of 16 tokens anew at every step and layer.

The budget counts every attended token. Generated tokens are indexed in blocks of the recent window here, so that tokens
not yet indexed take no room from the small budgets. Intervals are 95 %: Wilson's for agreement, bootstrap over tokens
for KL; neither knows that neighbouring tokens depend on each other.

    python -m bench.quality                                     # all of it
    python -m bench.quality --policies keys --budgets 512 1024 --tests python copy
    python -m bench.quality --quick
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from scipy.stats import bootstrap as resampled
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

import ckv_compile.backend
from bench import texts
from bench.results_file import read_runs, rows_and_texts, write_results
from ckv_compile.config import CommunityConfig
from ckv_compile.passes.rewrite_plan import AttentionGeometry
from ckv_compile.runtime.index import CommunityIndex
from ckv_compile.runtime.registry import REGISTRY
from ckv_compile.runtime.sequence import Sequence
from ckv_compile.smollm2 import load_smollm2

PROMPT, CONTINUATION = 7936, 256
CUE, PASSAGE, PASSAGES = 16, 40, 4
BUDGETS = (256, 512, 1024, 2048)
POLICIES = ("keys", "streaming", "random", "attention", "mixed")
TESTS = ("python", "prose", "copy")


def config_of(policy: str, budget: int) -> CommunityConfig:
    """Every layer sparse from the first decode step on; the same index in every run."""
    window = CommunityConfig.recent_window
    options = {"budget": budget, "min_context": 0, "deterministic": True, "append_block": window}
    if policy == "streaming":
        # All of the budget is window, but one token that the configuration wants left for retrieval.
        return CommunityConfig(
            policy="streaming", recent_window=budget - CommunityConfig.num_sink_tokens - 1, **options
        )
    if policy == "random":
        return CommunityConfig(policy="random", **options)
    return CommunityConfig(graph=policy, **options)


# ---------------------------------------------------------------------- caches


def dynamic_cache(tensors: list[Tensor]) -> DynamicCache:
    """A cache over K and V of layer 0, K and V of layer 1, ..., without a copy."""
    cache = DynamicCache()
    for key, value in zip(tensors[::2], tensors[1::2], strict=True):
        layer = DynamicLayer()
        layer.lazy_initialization(key, value)
        layer.keys, layer.values = key, value
        cache.layers.append(layer)
    return cache


def tensors_of(cache: DynamicCache) -> list[Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def copied(tensors: list[Tensor], rows: list[int], config: CommunityConfig, geometry) -> tuple[DynamicCache, Sequence]:
    """A cache of its own with some rows of K and V, as the backend keeps caches. Its index is empty."""
    length = tensors[0].shape[2]
    slab = REGISTRY.pool.take(geometry, len(rows), length + CONTINUATION)
    views = slab.views(length)
    for view, tensor in zip(views, tensors, strict=True):
        torch.index_select(tensor, 0, torch.tensor(rows, device=tensor.device), out=view)
        torch._dynamo.maybe_mark_dynamic(view, 2)
    sequence = REGISTRY.attach(slab, config, geometry, len(rows))
    sequence.restart([0] * len(rows))
    sequence.prefilled(length)
    slab.reserved = False
    return dynamic_cache(views), sequence


def indexed_prompts(model, tensors: list[Tensor], prompts: Tensor, config: CommunityConfig, geometry) -> CommunityIndex:
    """The index of one policy over all prompts. The budget plays no part in it."""
    if config.policy != "communities" or config.graph == "keys":
        _, sequence = copied(tensors, list(range(len(prompts))), config, geometry)
        sequence.offer_all()
    else:  # attention is seen only in a prefill
        cache = compiled(model, config)(prompts, use_cache=True, logits_to_keep=1).past_key_values
        sequence = REGISTRY.sequence_of(REGISTRY.slab_at(cache.layers[0].keys.data_ptr()))
    sequence.publish()
    assert sequence.indexed_layers() == geometry.num_layers
    return sequence.index.grown(sequence.shape)  # a copy: the next cache may take over the buffers


def branch(
    tensors: list[Tensor], index: CommunityIndex, rows: list[int], config: CommunityConfig, geometry
) -> tuple[DynamicCache, Sequence]:
    """A cache with some rows of the prompts and of their index."""
    cache, sequence = copied(tensors, rows, config, geometry)
    for name, buffer in index.buffers.items():
        if name not in ("scores", "tally"):
            source, target = buffer[:, rows], sequence.index.buffers[name]
            # Slabs differ in capacity; what lies beyond either's is not in use.
            common = tuple(slice(min(sizes)) for sizes in zip(source.shape, target.shape, strict=True))
            target[common].copy_(source[common])
    sequence.index.used, sequence.index.marks = list(index.used), [list(marks) for marks in index.marks]
    sequence.submitted = [sequence.length] * geometry.num_layers
    return cache, sequence


# ---------------------------------------------------------------------- running


@dataclasses.dataclass
class Case:
    """One teacher-forced run: ``tokens`` follow prompt ``row``; predictions count from token ``skip`` on."""

    name: str  # python, prose or copy
    texts: str  # frozen or fresh
    row: int
    tokens: Tensor  # [T]
    skip: int = 0
    log_probs: Tensor | None = None  # of the dense model, [T, V]


def compiled(model, config: CommunityConfig):
    options = {name: getattr(config, name) for name in config.option_names()}
    return torch.compile(model, backend="communitykv", options=options)


def cases_of(texts_of: dict[tuple[str, str], list[int]], prompt: int, continuation: int, tests) -> tuple[Tensor, list]:
    """Prompts [rows, prompt] and what follows them. A copied passage is one that the prompt holds already."""
    prompts, cases = [], []
    for (texts_name, kind), ids in texts_of.items():
        row = len(prompts)
        prompts.append(torch.tensor(ids[:prompt]))
        if kind in tests:
            cases.append(Case(kind, texts_name, row, torch.tensor(ids[prompt : prompt + continuation])))
        if kind == "prose" and "copy" in tests:
            for passage in range(PASSAGES):
                start = prompt * (2 * passage + 1) // (2 * PASSAGES)
                tokens = torch.tensor(ids[start : start + CUE + PASSAGE - 1])
                cases.append(Case("copy", texts_name, row, tokens, skip=CUE - 1))
    return torch.stack(prompts), cases


def run_dense(model, prompts: Tensor, cases: list[Case], advance) -> list[Tensor]:
    """Give every case the dense log-probabilities; returns K and V of the prompts."""
    tensors: list[Tensor] = []
    for row in range(len(prompts)):
        cache = model(prompts[row : row + 1], use_cache=True, logits_to_keep=1).past_key_values
        own = tensors_of(cache)
        if not tensors:
            tensors = [tensor.new_empty(len(prompts), *tensor.shape[1:]) for tensor in own]
        for target, tensor in zip(tensors, own, strict=True):
            target[row] = tensor[0]
        for case in cases:
            if case.row == row:
                logits = model(case.tokens[None], past_key_values=dynamic_cache(own), use_cache=True).logits[0]
                case.log_probs = logits.float().log_softmax(-1)
        advance()
    return tensors


def batches(cases: list[Case], size: int) -> Iterator[list[Case]]:
    """Cases of equal length in groups of ``size``, so that one compiled graph serves all; the last repeats a case."""
    for length in sorted({len(case.tokens) for case in cases}, reverse=True):
        equal = [case for case in cases if len(case.tokens) == length]
        for begin in range(0, len(equal), size):
            yield equal[begin : begin + size]


def teacher_forced(step, cache: DynamicCache, cases: list[Case], rows: int, advance) -> tuple[Tensor, Tensor]:
    """Agreement with dense (bool) and KL to it, both [cases, T]."""
    padded = cases + [cases[-1]] * (rows - len(cases))
    tokens = torch.stack([case.tokens for case in padded])
    agree, divergence = [], []
    for t in range(tokens.shape[1]):
        token = tokens[:, t : t + 1].contiguous()  # one stride in all runs, hence one graph
        logits = step(token, past_key_values=cache, use_cache=True).logits[: len(cases), -1]
        ours = logits.float().log_softmax(-1)
        dense = torch.stack([case.log_probs[t] for case in cases])
        agree.append(ours.argmax(-1) == dense.argmax(-1))
        divergence.append((dense.exp() * (dense - ours)).sum(-1))
        advance()
    return torch.stack(agree, 1).cpu(), torch.stack(divergence, 1).cpu()


def run_policy(model, policy: str, budgets, prompts, tensors, cases: list[Case], geometry, advance) -> list[dict]:
    """One row per case and budget."""
    rows = []
    began = time.perf_counter()
    index = indexed_prompts(model, tensors, prompts, config_of(policy, budgets[0]), geometry)
    index_seconds = time.perf_counter() - began
    size = len(prompts)
    for budget in budgets:
        torch._dynamo.reset()  # graphs of other budgets would only be tried in vain
        config = config_of(policy, budget)
        step = compiled(model, config)
        for batch in batches(cases, size):
            began = time.perf_counter()
            padded = [case.row for case in batch] + [batch[-1].row] * (size - len(batch))
            cache, sequence = branch(tensors, index, padded, config, geometry)
            agree, divergence = teacher_forced(step, cache, batch, size, advance)
            steps = agree.shape[1] * size * sequence.shape.graphs * geometry.num_layers
            attended, context = (sequence.index.tally.sum(0) / steps).tolist()
            assert sequence.length == tensors[0].shape[2] + agree.shape[1], "the runs went to another cache"
            assert attended <= min(budget, context), f"{attended} tokens attended at a budget of {budget}"
            for case, bits, values in zip(batch, agree, divergence, strict=True):
                rows.append(
                    {
                        "policy": policy, "budget": budget, "test": case.name, "texts": case.texts,
                        "tokens_attended": round(attended, 1), "context": round(context, 1),
                        "batch_seconds": round(time.perf_counter() - began, 1),
                        "index_seconds": round(index_seconds, 1),
                        "agree": "".join(str(int(bit)) for bit in bits[case.skip :]),
                        "kl": [float(f"{value:.4g}") for value in values[case.skip :].tolist()],
                    }
                )  # fmt: skip
            del cache, sequence
    return rows


# ---------------------------------------------------------------------- statistics


def wilson(successes: float, total: int, z: float = 1.959964) -> tuple[float, float]:
    """95 % interval of a share; successes may be the sum of scores between 0 and 1, unlike scipy's."""
    share, scale = successes / total, 1 + z * z / total
    centre = (share + z * z / (2 * total)) / scale
    half = z * (share * (1 - share) / total + z * z / (4 * total * total)) ** 0.5 / scale
    return centre - half, centre + half


def bootstrap(values: np.ndarray, samples: int = 10_000, seed: int = 0) -> tuple[float, float]:
    """95 % percentile interval of the mean."""
    if values.min() == values.max():  # as many arms that change nothing; resampling would say the same
        return float(values[0]), float(values[0])
    found = resampled((values,), np.mean, n_resamples=samples, method="percentile", batch=1000, rng=seed)
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def summary(rows: list[dict], baseline: str = "keys") -> list[dict]:
    """One cell per texts, test, policy and budget; differences from the baseline policy are paired by token."""
    values: dict[tuple, list] = {}
    for row in rows:
        key = row["texts"], row["test"], row["policy"], row["budget"]
        values.setdefault(key, []).append((np.array(list(row["agree"]), float), np.array(row["kl"])))
    cells = {key: [np.concatenate(parts) for parts in zip(*pairs, strict=True)] for key, pairs in values.items()}
    result = []
    for (texts_name, test, policy, budget), (agree, kl) in cells.items():
        entry = {
            "texts": texts_name, "test": test, "policy": policy, "budget": budget, "tokens": len(agree),
            "top1": agree.mean(), "top1_interval": wilson(int(agree.sum()), len(agree)),
            "kl": kl.mean(), "kl_interval": bootstrap(kl),
        }  # fmt: skip
        ours = cells.get((texts_name, test, baseline, budget))
        if ours is not None and policy != baseline:
            entry[f"{baseline}_top1_gain_interval"] = bootstrap(ours[0] - agree)
            entry[f"{baseline}_kl_gain_interval"] = bootstrap(kl - ours[1])
        result.append(entry)
    return result


def claims_of(cells: list[dict]) -> dict[str, float]:
    """Figures by name; those of fresh texts end in ``_fresh``."""
    claims = {}
    for cell in cells:
        suffix = f"{cell['policy']}_{cell['test']}_b{cell['budget']}" + ("_fresh" if cell["texts"] == "fresh" else "")
        claims[f"smollm2_top1_{suffix}"] = round(float(cell["top1"]), 4)
        claims[f"smollm2_kl_{suffix}"] = round(float(cell["kl"]), 5)
    return claims


def show(cells: list[dict], budgets: list[int], console: Console) -> None:
    for texts_name, test in dict.fromkeys((cell["texts"], cell["test"]) for cell in cells):
        chosen = [cell for cell in cells if (cell["texts"], cell["test"]) == (texts_name, test)]
        table = Table("policy", *(f"budget {budget}" for budget in budgets))
        table.title = f"{texts_name} {test}, {chosen[0]['tokens']} tokens: agreement (95 % interval), KL to dense"
        for policy in dict.fromkeys(cell["policy"] for cell in chosen):
            by_budget = {cell["budget"]: cell for cell in chosen if cell["policy"] == policy}
            texts_of = [
                "{:.3f} ({:.3f}-{:.3f})  {:.4f}".format(cell["top1"], *cell["top1_interval"], cell["kl"])
                for cell in (by_budget[budget] for budget in budgets)
            ]
            table.add_row(policy, *texts_of)
        console.print(table)


# ----------------------------------------------------------------------


def prepare(args: argparse.Namespace) -> None:
    """What ``--interpret`` and ``--threads`` change in this process."""
    if args.interpret:
        ckv_compile.backend._compile = lambda gm, fakes, patches: gm.forward
    if args.threads:
        torch.set_num_threads(args.threads)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES)
    parser.add_argument("--budgets", nargs="+", type=int, default=list(BUDGETS))
    parser.add_argument("--tests", nargs="+", default=list(TESTS), choices=TESTS)
    parser.add_argument("--texts", nargs="+", default=["frozen", "fresh"], choices=("frozen", "fresh"))
    parser.add_argument("--seed", type=int, default=1, help="draws the fresh texts")
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens")
    parser.add_argument("--tokens", type=int, default=CONTINUATION, help="tokens of a continuation")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="torch's threads on the CPU")
    parser.add_argument("--quick", action="store_true", help="1,024 tokens, 16 predictions, one budget, frozen texts")
    parser.add_argument("--interpret", action="store_true", help="run rewritten graphs node by node, without Inductor")
    parser.add_argument("--merge", nargs="+", type=Path, help="join the rows of earlier runs on the same texts instead")
    parser.add_argument("--no-file", action="store_true", help="write no JSON file")
    args = parser.parse_args(argv)
    if args.quick:
        args.prompt, args.tokens, args.budgets, args.texts = 1024, 16, args.budgets[:1], ["frozen"]
    if args.prompt + args.tokens > texts.LENGTH:
        parser.error(f"--prompt and --tokens must be at most {texts.LENGTH} together, got {args.prompt + args.tokens}")
    return args


def main(argv: list[str] | None = None) -> dict[str, float]:
    args = arguments(argv)
    console = Console()
    if args.merge:
        return merge(args.merge, args, console)
    prepare(args)
    console.print("loading SmolLM2-135M")
    tokenizer, model = load_smollm2(args.device)
    kinds = [kind for kind in ("python", "prose") if kind in args.tests or (kind == "prose" and "copy" in args.tests)]
    texts_of = {}
    for name in args.texts:
        for kind in kinds:
            ids = (
                texts.frozen_text(kind, tokenizer) if name == "frozen" else texts.fresh_text(kind, tokenizer, args.seed)
            )
            texts_of[name, kind] = ids
            console.print(f"{name} {kind}: {len(ids)} tokens, sha256 {texts.digest(ids)}")
    prompts, cases = cases_of(texts_of, args.prompt, args.tokens, args.tests)
    prompts = prompts.to(args.device)
    for case in cases:
        case.tokens = case.tokens.to(args.device)
    config = model.config
    geometry = AttentionGeometry(
        config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads,
        config.hidden_size // config.num_attention_heads, model.dtype, model.device,
    )  # fmt: skip

    steps = sum(len(batch[0].tokens) for batch in batches(cases, len(prompts)))
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    rows, path = [], None
    with torch.no_grad(), Progress(*columns, console=console) as progress:
        task = progress.add_task("dense", total=len(prompts))
        tensors = run_dense(model, prompts, cases, lambda: progress.advance(task))
        for policy in args.policies:
            task = progress.add_task(policy, total=steps * len(args.budgets))
            rows += run_policy(
                model, policy, args.budgets, prompts, tensors, cases, geometry, lambda task=task: progress.advance(task)
            )
            cells = summary(rows)
            claims = claims_of(cells)
            if not args.no_file:  # after every policy, so that a run that is stopped leaves what it has
                hashes = {f"{name} {kind}": texts.digest(ids) for (name, kind), ids in texts_of.items()}
                previous, path = path, write_results(
                    "quality", rows, claims, device=args.device, label="smollm2", cells=cells,
                    prompt_tokens=args.prompt, texts_sha256=hashes, fresh_seed=args.seed,
                )  # fmt: skip
                if previous:
                    previous.unlink()
    show(cells, args.budgets, console)
    if path:
        console.print(f"wrote {path}")
    return claims


def merge(paths: list[Path], args: argparse.Namespace, console: Console) -> dict[str, float]:
    """One file from runs that measured different policies or budgets on the same texts."""
    files, runs = read_runs(paths)
    rows, hashes = rows_and_texts(files)
    cells = summary(rows)
    claims = claims_of(cells)
    show(cells, sorted({row["budget"] for row in rows}), console)
    path = write_results(
        "quality", rows, claims, device=args.device, label="smollm2", cells=cells,
        prompt_tokens=files[0]["prompt_tokens"], texts_sha256=hashes, runs=runs,
    )  # fmt: skip
    console.print(f"wrote {path}")
    return claims


if __name__ == "__main__":
    main()
