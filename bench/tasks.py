"""Tasks through communities: RULER's synthetic tasks, BABILong's first five and passkey, generated here, by their metrics.

    python -m bench.tasks                                     # SmolLM2-135M, prompts of 4,096 tokens
    python -m bench.tasks --model build/retrieval/llama --length 8192 --device cuda
    python -m bench.tasks --policies keys streaming --tasks passkey vt --samples 4 --length 2048
    python -m bench.tasks --small                             # does it run? An untrained model, a minute on a CPU

Every prompt is read densely but for its last token; that token and the answer are decoded with a budget of 1/16 and 1/8
of the prompt, every layer sparse. Policies are graph sources ("keys", "attention", "mixed") or names of the option
``policy``. Scores are those of the benchmarks (``bench/task_grammars/sample.py``): the share of RULER's answers that the
generated text contains, BABILong's only label. The retrieval model's answers count where every token is right.

A task that the dense model scores below ``--least`` is listed and not compared: nothing can be lost in it. The first
``--probe`` samples decide. Besides, as small models can do it, "needles" and "copy" are teacher-forced: the share of
answer tokens that are the most probable ones, and their log-likelihood, by all samples.

Intervals are 95 %, Wilson's, of the mean score as if every sample were right or wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

from bench import quality, retrieval_model
from bench.results_file import draw, read_runs, rows_and_texts, write_results
from bench.task_grammars import catalogue, stories, vocabulary
from bench.task_grammars.sample import Sample, novel, score
from bench.task_grammars.training import Drawing
from ckv_compile.config import CommunityConfig, GraphSource
from ckv_compile.passes.rewrite_plan import AttentionGeometry

POLICIES = ("keys", "attention", "streaming", "random")
SHARES = (16, 8)  # budgets are 1/16 and 1/8 of the prompt
FORCED = ("needles", "copy")  # teacher-forced, SmolLM2 only
RULER = tuple(task for task in catalogue.TEXT_TASKS if task not in ("passkey", *stories.TASKS))
CUE, PASSAGE = 16, 40  # tokens of a copied passage: what is given and what is predicted


@dataclasses.dataclass
class Group:
    """Samples of one task whose prompts have one length, decoded together.

    prompts: [B, L], without what ``turns`` gives. turns: (given [B, G], new tokens), one after the other. ``score`` takes
    the new tokens of every turn, [B, T], and gives a score per sample. ``gold`` [B, T]: the answer's tokens if these are
    to be teacher-forced after the first turn's given tokens.
    """

    task: str
    prompts: Tensor
    turns: list[tuple[Tensor, int]]
    score: Callable[[list[Tensor]], list[float]] | None = None
    gold: Tensor | None = None


# ---------------------------------------------------------------------- samples


def filled(ids: list[int], length: int, filler: int) -> list[int]:
    """``ids`` with fillers behind the first token, to be ``length`` tokens."""
    return [ids[0], *[filler] * (length - len(ids)), *ids[1:]]


def text_group(task: str, seeds: range, length: int, tokenizer, device: str) -> Group:
    """Samples of a text task as tokens; the few that fitting left over are line ends in front."""

    @functools.cache
    def encoded(text: str) -> list[int]:
        return tokenizer(text)["input_ids"]

    samples = [catalogue.text_sample(task, seed, length, lambda text: len(encoded(text))) for seed in seeds]
    filler = encoded("\n")[0]
    ids = torch.tensor([filled(encoded(sample.prompt), length, filler) for sample in samples], device=device)
    new_tokens = catalogue.NEW_TOKENS.get(task, catalogue.DEFAULT_NEW_TOKENS)

    def scores(turns: list[Tensor], samples: list[Sample] = samples) -> list[float]:
        texts = tokenizer.batch_decode(turns[0], skip_special_tokens=True)
        return [score(sample, text) for sample, text in zip(samples, texts, strict=True)]

    return Group(task, ids[:, :-1], [(ids[:, -1:], new_tokens)], scores)


def forced_group(kind: str, seeds: range, length: int, tokenizer, device: str) -> Group:
    """Needles of one form with the tokens of their values, or prose with a cue that repeats an earlier place of it."""
    if kind == "copy":
        every = tokenizer(novel())["input_ids"]
        rows, golds = [], []
        for seed in seeds:
            draw_ = Drawing(seed, "cpu")
            context = length - CUE
            begin = draw_.one(0, len(every) - context - 1)
            text = every[begin : begin + context]
            start = draw_.one(context // 16, context - context // 4)
            rows.append(text + text[start : start + CUE])
            golds.append(text[start + CUE : start + CUE + PASSAGE])
        ids, gold = torch.tensor(rows, device=device), torch.tensor(golds, device=device)
        return Group(kind, ids[:, :-1], [(ids[:, -1:], 0)], gold=gold)
    samples = [
        catalogue.text_sample("niah_single_2", seed, length, lambda text: len(tokenizer(text)["input_ids"]))
        for seed in seeds
    ]
    filler = tokenizer("\n")["input_ids"][0]
    ids = torch.tensor(
        [filled(tokenizer(sample.prompt)["input_ids"], length, filler) for sample in samples], device=device
    )
    golds = [tokenizer(f" {sample.answers[0]}")["input_ids"] for sample in samples]
    shortest = min(len(gold) for gold in golds)
    gold = torch.tensor([gold[:shortest] for gold in golds], device=device)
    return Group(kind, ids[:, :-1], [(ids[:, -1:], 0)], gold=gold)


def token_group(task: str, seeds: range, length: int, device: str) -> Group:
    """Samples of the retrieval model's tokens: a sample is right, turn by turn, where every token is."""
    parts = [catalogue.token_samples(task, Drawing(seed, device), 1, length) for seed in seeds]
    prompts = torch.cat([part.prompts for part in parts])
    turns = [
        tuple(torch.cat(tensors) for tensors in zip(*(part.turns[i] for part in parts), strict=True))
        for i in range(len(parts[0].turns))
    ]

    def scores(told: list[Tensor]) -> list[float]:
        right = [(new == answer).all(-1).float() for new, (_, answer) in zip(told, turns, strict=True)]
        return torch.stack(right).mean(0).tolist()

    return Group(task, prompts, [(given, answer.shape[1]) for given, answer in turns], scores)


# ---------------------------------------------------------------------- decoding


def greedy(step, cache, turns: list[tuple[Tensor, int]]) -> list[Tensor]:
    """New tokens [B, T] of every turn: what is given is fed token by token, and then the most probable ones."""
    told = []
    carried: list[Tensor] = []  # the last token of a turn is not fed before the next
    for given, number in turns:
        new: list[Tensor] = []
        for token in [*carried, *given.split(1, 1)]:
            logits = step(token.contiguous(), past_key_values=cache, use_cache=True).logits
        while len(new) < number:
            new.append(logits[:, -1].argmax(-1, keepdim=True))
            if len(new) < number:
                logits = step(new[-1], past_key_values=cache, use_cache=True).logits
        told.append(torch.cat(new, 1))
        carried = [new[-1]]
    return told


def forced(step, cache, given: Tensor, gold: Tensor) -> tuple[Tensor, Tensor]:
    """(is it the most probable token, log-likelihood) of every gold token, both [B, T]."""
    right, likelihood = [], []
    tokens = torch.cat([given, gold], 1)
    first = given.shape[1] - 1
    for t in range(tokens.shape[1] - 1):
        logits = step(tokens[:, t : t + 1].contiguous(), past_key_values=cache, use_cache=True).logits[:, -1].float()
        if t >= first:
            target = tokens[:, t + 1 : t + 2]
            right.append(logits.argmax(-1, keepdim=True) == target)
            likelihood.append(logits.log_softmax(-1).gather(1, target))
    return torch.cat(right, 1), torch.cat(likelihood, 1)


def config_of(policy: str, budget: int) -> CommunityConfig:
    """Every layer sparse from the first decode step on. An unknown policy raises ValueError, which names them."""
    if policy in (*get_args(GraphSource), "streaming", "random"):
        return quality.config_of(policy, budget)
    window = CommunityConfig.recent_window
    return CommunityConfig(policy=policy, budget=budget, min_context=0, deterministic=True, append_block=window)


class Arms:
    """The dense model and it through the backend, over one group of samples at a time."""

    def __init__(self, model: nn.Module, policies: list[str], budgets: list[int]) -> None:
        self.model = model
        config = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.geometry = AttentionGeometry(
            config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, head_dim, model.dtype,
            model.device,
        )  # fmt: skip
        self.configs = {policy: {budget: config_of(policy, budget) for budget in budgets} for policy in policies}
        self.steps = {
            (policy, budget): quality.compiled(model, config)
            for policy, configs in self.configs.items()
            for budget, config in configs.items()
        }

    def prefilled(self, group: Group) -> list[Tensor]:
        """K and V of the prompts, layer by layer, of a dense prefill row by row."""
        tensors: list[Tensor] = []
        for row in range(len(group.prompts)):
            output = self.model(group.prompts[row : row + 1], use_cache=True, logits_to_keep=1)
            own = quality.tensors_of(output.past_key_values)
            if not tensors:
                tensors = [tensor.new_empty(len(group.prompts), *tensor.shape[1:]) for tensor in own]
            for target, tensor in zip(tensors, own, strict=True):
                target[row] = tensor[0]
        return tensors

    def decoded(self, step, cache, group: Group) -> dict:
        if group.gold is None:
            assert group.score is not None
            return {"scores": [round(value, 4) for value in group.score(greedy(step, cache, group.turns))]}
        right, likelihood = forced(step, cache, group.turns[0][0], group.gold)
        return {
            "scores": [round(value, 4) for value in right.float().mean(1).tolist()],
            "log_likelihood": [round(value, 4) for value in likelihood.mean(1).tolist()],
            "tokens": right.shape[1],
        }

    def dense(self, group: Group, tensors: list[Tensor]) -> dict:
        cache = quality.dynamic_cache([tensor.clone() for tensor in tensors])
        return self.decoded(self.model, cache, group)

    def sparse(self, policy: str, group: Group, tensors: list[Tensor], advance) -> list[dict]:
        """One row per budget; all budgets share the index of the prompts."""
        rows = []
        index = None
        order = list(range(len(group.prompts)))
        for budget, config in self.configs[policy].items():
            if index is None:
                index = quality.indexed_prompts(self.model, tensors, group.prompts, config, self.geometry)
            cache, sequence = quality.branch(tensors, index, order, config, self.geometry)
            row = self.decoded(self.steps[policy, budget], cache, group)
            attended, context = sequence.index.tally.sum(0).tolist()
            assert sequence.length > tensors[0].shape[2], "the decode steps went to another cache"
            rows.append({"policy": policy, "budget": budget, **row, "attended_share": round(attended / context, 4)})
            del cache, sequence
            advance()
        return rows


# ---------------------------------------------------------------------- results


def interval(scores: list[float]) -> tuple[float, float, float]:
    """(mean, low, high): Wilson's 95 % interval."""
    low, high = quality.wilson(sum(scores), len(scores))
    return sum(scores) / len(scores), max(0.0, low), min(1.0, high)


def cells_of(rows: list[dict]) -> list[dict]:
    """One cell per task, policy and budget, with the dense score of the same samples."""
    joined: dict[tuple, dict[str, list[float]]] = {}
    for row in rows:
        values = joined.setdefault((row["task"], row["policy"], row["budget"]), {})
        for name in ("scores", "log_likelihood"):
            values.setdefault(name, []).extend(row.get(name, []))
    tokens = {row["task"]: row["tokens"] for row in rows if "tokens" in row}
    cells = []
    for (task, policy, budget), values in joined.items():
        weighted = values["scores"] if task not in tokens else values["scores"] * tokens[task]  # of tokens, not samples
        mean, low, high = interval(weighted)
        cell = {
            "task": task, "policy": policy, "budget": budget, "samples": len(values["scores"]), "score": round(mean, 4),
            "interval": [round(low, 4), round(high, 4)], "forced_tokens": tokens.get(task),
        }  # fmt: skip
        if values["log_likelihood"]:
            cell["log_likelihood"] = round(sum(values["log_likelihood"]) / len(values["log_likelihood"]), 4)
        cells.append(cell)
    return cells


def claims_of(cells: list[dict], model: str, length: int) -> dict[str, float]:
    """Scores by name, and over dense, of the tasks that were compared; ``ruler_over_dense`` is that of the defaults."""
    dense = {cell["task"]: cell for cell in cells if cell["policy"] == "dense"}
    compared = {cell["task"] for cell in cells if cell["policy"] != "dense"}
    claims = {f"tasks_{model}_{task}_dense": dense[task]["score"] for task in dense}
    sums: dict[tuple[str, int], dict[str, tuple[float, float]]] = {}
    for cell in cells:
        if cell["policy"] == "dense":
            continue
        share = round(length / cell["budget"])
        claims[f"tasks_{model}_{cell['task']}_{cell['policy']}_1_{share}"] = cell["score"]
        if cell["forced_tokens"] is None:
            pair = cell["score"], dense[cell["task"]]["score"]
            sums.setdefault((cell["policy"], share), {})[cell["task"]] = pair
    for (policy, share), pairs in sums.items():
        claims[f"tasks_over_dense_{model}_{policy}_1_{share}"] = _ratio(list(pairs.values()))
    defaults = [pair for task, pair in sums.get(("keys", max(SHARES)), {}).items() if task in RULER]
    if defaults:
        claims["ruler_over_dense"] = _ratio(defaults)
    claims[f"tasks_{model}_compared"] = len(compared)
    return claims


def _ratio(pairs: list[tuple[float, float]]) -> float:
    """Of two sums of scores, ours over dense."""
    ours, dense = (sum(values) for values in zip(*pairs, strict=True))
    return round(ours / dense, 4) if dense else 0.0


def merge(paths: list[Path], args: argparse.Namespace, console: Console) -> dict[str, float]:
    """One file from runs of one model that measured different tasks or samples of one length."""
    same = "model", "prompt_tokens", "least", "dtype"
    files, runs = read_runs(paths, *same)
    first = files[0]
    rows, _ = rows_and_texts(files)
    samples = [(row["task"], row["policy"], row["budget"], row["first_seed"]) for row in rows]
    if len(set(samples)) < len(samples):
        twice = next(sample for sample in samples if samples.count(sample) > 1)
        raise ValueError(f"the runs must be of different samples; two hold task, policy, budget, seed {twice}")
    cells = cells_of(rows)
    compared = {cell["task"] for cell in cells if cell["policy"] != "dense"}
    skipped = [task for file in files for task in file["skipped"] if task not in compared]
    claims = claims_of(cells, first["model"], first["prompt_tokens"])
    path = write_results(
        "tasks", rows, claims, device=args.device, label=first["model"], folder=args.out, cells=cells, runs=runs,
        skipped=skipped, **{name: first[name] for name in same},
    )  # fmt: skip
    show(cells, skipped, first["least"], console)
    console.print(f"wrote {path}")
    draw(console, plot, path)
    return claims


def show(cells: list[dict], skipped: list[str], least: float, console: Console) -> None:
    table = Table("task", "samples", "policy", "budget", "score (95 % interval)", "log-likelihood")
    table.caption = "teacher-forced tasks: share of tokens, and their log-likelihood"
    for task in dict.fromkeys(cell["task"] for cell in cells):
        for cell in cells:
            if cell["task"] == task:
                likelihood = f"{cell['log_likelihood']:.3f}" if "log_likelihood" in cell else ""
                budget = "" if cell["policy"] == "dense" else str(cell["budget"])
                table.add_row(task, str(cell["samples"]), cell["policy"], budget, score_text(cell), likelihood)
        table.add_section()
    console.print(table)
    if skipped:
        console.print(f"dense scores below {least:.0%}, listed and not compared: {', '.join(skipped)}")


def score_text(cell: dict) -> str:
    return "{:.2f} ({:.2f}-{:.2f})".format(cell["score"], *cell["interval"])


def plot(path: Path) -> Path:
    """Scores by task, a bar per policy at the smallest budget beside dense."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cells = json.loads(path.read_text())["cells"]
    tasks = list(dict.fromkeys(cell["task"] for cell in cells if cell["policy"] != "dense"))
    if not tasks:
        raise ValueError(f"{path} must hold a task that was compared with dense, got none")
    budget = min(cell["budget"] for cell in cells if cell["policy"] != "dense")
    chosen = {(c["task"], c["policy"]): c for c in cells if c["budget"] in (0, budget)}
    policies = list(dict.fromkeys(policy for _, policy in chosen))
    figure, axes = pyplot.subplots(figsize=(2 + 1.2 * len(tasks), 4))
    for number, policy in enumerate(policies):
        mine = [(i, chosen[task, policy]) for i, task in enumerate(tasks) if (task, policy) in chosen]
        places = [i + (number - (len(policies) - 1) / 2) * 0.8 / len(policies) for i, _ in mine]
        heights = [cell["score"] for _, cell in mine]
        below = [max(0.0, cell["score"] - cell["interval"][0]) for _, cell in mine]
        above = [max(0.0, cell["interval"][1] - cell["score"]) for _, cell in mine]
        axes.bar(places, heights, 0.8 / len(policies), yerr=[below, above], label=policy, error_kw={"linewidth": 0.7})
    axes.set_xticks(range(len(tasks)), tasks, rotation=30, ha="right")
    axes.set_ylabel(f"score at a budget of {budget} tokens")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"), dpi=120)
    pyplot.close(figure)
    return path.with_suffix(".png")


# ----------------------------------------------------------------------


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help='"smollm2", or the folder of a trained retrieval model')
    parser.add_argument("--tasks", nargs="+", help="all that the model has, by default")
    parser.add_argument(
        "--policies", nargs="+", default=list(POLICIES), help="graph sources, or names of the option policy"
    )
    parser.add_argument("--length", type=int, default=4096, help="tokens of a prompt")
    parser.add_argument("--samples", type=int, default=16, help="of a task that is compared")
    parser.add_argument("--probe", type=int, default=4, help="samples that decide whether a task is compared")
    parser.add_argument("--batch", type=int, default=4, help="samples that are decoded together")
    parser.add_argument("--least", type=float, default=0.5, help="dense score below which a task is not compared")
    parser.add_argument("--seed", type=int, default=0, help="of the first sample; the others follow")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="bfloat16 on CUDA, else float32")
    parser.add_argument("--threads", type=int, help="torch's threads on the CPU")
    parser.add_argument("--interpret", action="store_true", help="run rewritten graphs node by node, without Inductor")
    parser.add_argument("--small", action="store_true", help="an untrained retrieval model, short prompts, two tasks")
    parser.add_argument("--out", type=Path, help="folder of the JSON file: bench/results")
    parser.add_argument("--merge", nargs="+", type=Path, help="join earlier runs of other tasks or samples instead")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw an earlier result instead")
    args = parser.parse_args(argv)
    args.dtype = args.dtype or ("bfloat16" if args.device.startswith("cuda") else "float32")
    if args.small:
        args.model, args.length, args.samples, args.probe, args.batch, args.least = "untrained", 1280, 2, 2, 2, 0.0
        args.tasks, args.interpret = args.tasks or ["niah_multiquery", "qa1"], True
    for name in ("samples", "probe", "batch"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    allowed = (*catalogue.TEXT_TASKS, *FORCED) if args.model == "smollm2" else catalogue.TOKEN_TASKS
    args.tasks = args.tasks or list(allowed)
    for task in args.tasks:
        if task not in allowed:
            parser.error(f"--tasks must be of {', '.join(allowed)} with --model {args.model}, got {task}")
    smallest = args.length // max(SHARES)
    needed = CommunityConfig.num_sink_tokens + CommunityConfig.recent_window + 1
    if smallest < needed:
        least = needed * max(SHARES)
        parser.error(
            f"--length must be at least {least}, so that 1/{max(SHARES)} holds {needed} tokens, got {args.length}"
        )
    return args


def loaded(args: argparse.Namespace):
    """(name, tokenizer or None, model)"""
    dtype = getattr(torch, args.dtype)
    if args.model == "smollm2":
        from ckv_compile.smollm2 import load_smollm2

        return "smollm2", *load_smollm2(args.device, dtype)
    if args.model == "untrained":
        model = retrieval_model.new_model("llama", retrieval_model.SIZES["small"], seed=0)
        return "untrained", None, model.eval().requires_grad_(False).to(args.device, dtype)
    model = retrieval_model.load(Path(args.model), args.device, dtype)
    if model.config.vocab_size != vocabulary.SIZE:
        raise ValueError(
            f"--model must be a retrieval model of {vocabulary.SIZE} tokens, got {model.config.vocab_size}"
        )
    return f"retrieval_{model.config.model_type}", None, model


def group_of(task: str, seeds: range, args: argparse.Namespace, tokenizer) -> Group:
    if tokenizer is None:
        return token_group(task, seeds, args.length, args.device)
    make = forced_group if task in FORCED else text_group
    return make(task, seeds, args.length, tokenizer, args.device)


@torch.no_grad()
def main(argv: list[str] | None = None) -> dict[str, float]:
    args = arguments(argv)
    console = Console()
    if args.plot:
        draw(console, plot, args.plot)
        return {}
    if args.merge:
        return merge(args.merge, args, console)
    quality.prepare(args)
    name, tokenizer, model = loaded(args)
    arms = Arms(model, args.policies, [args.length // share for share in SHARES])
    rows: list[dict] = []
    skipped: list[str] = []
    path = None
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        for task in args.tasks:
            number = args.samples if task in FORCED else max(args.samples, args.probe)
            cells = 1 + len(args.policies) * len(SHARES)
            bar = progress.add_task(task, total=-(-number // args.batch) * cells)
            scores: list[float] = []
            begin = 0
            while begin < number:
                # The probe is a batch of its own where it is smaller than one: a task may end with it.
                end = min(number, begin + args.batch, args.probe if begin < args.probe else number)
                group = group_of(task, range(args.seed + begin, args.seed + end), args, tokenizer)
                tensors = arms.prefilled(group)
                found = arms.dense(group, tensors)
                scores += found["scores"]
                sampled = {"task": task, "first_seed": args.seed + begin}
                rows.append({**sampled, "policy": "dense", "budget": 0, **found})
                progress.advance(bar)
                begin = end
                if (
                    task not in FORCED
                    and begin >= args.probe
                    and sum(scores) < args.least * len(scores)
                    and begin <= args.probe
                ):
                    skipped.append(task)
                    rows = [row for row in rows if row["task"] != task or row["policy"] == "dense"]
                    console.print(
                        f"{task}: dense {sum(scores) / len(scores):.0%} of {len(scores)} samples, not compared"
                    )
                    progress.remove_task(bar)
                    break
                for policy in args.policies:
                    mine = arms.sparse(policy, group, tensors, lambda bar=bar: progress.advance(bar))
                    rows += [{**sampled, **row} for row in mine]
            previous = path  # after every task, so that a run that is stopped leaves what it has
            cells_found = cells_of(rows)
            claims = claims_of(cells_found, name, args.length)
            path = write_results(
                "tasks", rows, claims, device=args.device, label=name, folder=args.out, cells=cells_found,
                prompt_tokens=args.length, skipped=skipped, least=args.least, dtype=args.dtype, model=name,
            )  # fmt: skip
            if previous:
                previous.unlink()
    show(cells_found, skipped, args.least, console)
    console.print(f"wrote {path}")
    if path and any(cell["policy"] != "dense" for cell in cells_found):
        draw(console, plot, path)
    return claims


if __name__ == "__main__":
    main()
