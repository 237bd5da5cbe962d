"""Retrieval policies side by side: what each attends to, and what a model predicts with it, at equal budgets.

SmolLM2-135M over Python source and English prose: of each a frozen text and fresh ones, by ``--seeds`` (``bench/texts.py``).
Behind the prompt, a window of further tokens is teacher-forced. All policies use the runtime's index and publications and
the decode operators, one step and layer after another, and all end in ``ckv::sparse_attention``; only the model around them
runs a layer for all tokens of the window at once, which changes nothing, as every token of the window is given.

    recall   share of the softmax over all keys that lies on the attended tokens; mean over heads, layers and steps
    error    |ours - dense| / |dense| of attention's output, per head; mean over heads, layers and steps
    top-1    tokens of the window whose most probable next token is that of the dense model; Wilson's 95 % interval
    KL       of the dense prediction to ours, nats; 95 % bootstrap over tokens
    index    bytes that steps read beside K and V, over those of K and V, and seconds to make it (all layers and prompts)

Recall and error are those of the dense model's queries at the last steps of the window, so that the inputs are the same for
all. Budgets are shares of the context and count every attended token: 10 leading positions, the newest 16 (of which up to
15 more are not indexed yet), and what a policy chooses. "streaming" has all of its budget in the window.

    python -m bench.policies
    python -m bench.policies --policies communities quest --shares 16 8
    python -m bench.policies --context 8064 --seeds 1 2 3 4    # as the README has it
    python -m bench.policies --small          # every policy on short prompts
    python -m bench.policies --plot FILE      # draw a result file again
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from bench import texts
from bench.quality import summary
from bench.recall import compared
from bench.results_file import draw, read_runs, rounded, rows_and_texts, write_results
from ckv_compile.config import CommunityConfig
from ckv_compile.policies import POLICIES, TokenPolicy
from ckv_compile.runtime.sequence import Sequence
from ckv_compile.smollm2 import load_smollm2
from ckv_compile.testing import attend_step, bare_sequence, retrieve_step

CONTEXT, WINDOW = 4096, 64
SHARES = (64, 32, 16, 8, 4)  # context over budget
MEASURED = 8  # steps at the end of the window whose recall and error are measured
RECENT = 16
KINDS = ("python", "prose")
GROUP_BUFFERS = ("centroid", "centroid_scale", "channel_scale", "start", "stored", "size", "member")


def config_of(policy: str, budget: int) -> CommunityConfig:
    """Every layer sparse from the first step on, one index for all budgets."""
    recent = budget - CommunityConfig.num_sink_tokens - 1 if policy == "streaming" else RECENT
    return CommunityConfig(
        policy=policy, budget=budget, recent_window=recent, append_block=RECENT, min_context=0, workers=0,
        deterministic=True,
    )  # fmt: skip


@dataclasses.dataclass
class Window:
    """What follows the prompts: ``tokens`` [B, T] behind ``context`` tokens each, and what the dense model made of them.

    keys, values: [L, B, Hkv, context + T, D], of which the last T positions are those of the latest run.
    Of the dense run are log_probs: [B, T, V], queries: [L, B, Hq, m, D] of the last m steps, new_keys and new_values:
    [L, B, Hkv, T, D]. observed: of each policy that sees the prompt's queries, the importance of its tokens
    [L, B, G, context] and the seconds that finding it took.
    """

    tokens: Tensor
    context: int
    keys: Tensor
    values: Tensor
    scale: float
    group_size: int
    log_probs: Tensor | None = None
    queries: Tensor | None = None
    new_keys: Tensor | None = None
    new_values: Tensor | None = None
    observed: dict[str, tuple[Tensor, float]] = dataclasses.field(default_factory=dict)

    def sequence(self, policy: str, budget: int) -> Sequence:
        config, capacity = config_of(policy, budget), self.keys.shape[3]
        return bare_sequence(config, capacity, keys=self.keys, values=self.values, group_size=self.group_size)


def with_attention(model, attend: Callable[[int, Tensor, Tensor, Tensor, float], Tensor], tokens: Tensor, start: int):
    """Hidden states of a Llama-like model over ``tokens`` [B, T] from position ``start`` on, with another attention.

    attend: (layer, query [B, Hq, T, D], key and value [B, Hkv, T, D] with positions in them, scale) -> [B, Hq, T, D].
    The model stays as it was.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attention(module, query, key, value, mask, scaling=None, dropout=0.0, **kwargs):
        return attend(module.layer_idx, query, key, value, scaling).transpose(1, 2).contiguous(), None

    before = model.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS["bench_policies"] = attention
    model.set_attn_implementation("bench_policies")
    try:
        positions = torch.arange(start, start + tokens.shape[1]).expand(len(tokens), -1)
        return model.model(tokens, position_ids=positions, use_cache=False).last_hidden_state
    finally:
        model.set_attn_implementation(before)


def log_probabilities(model, hidden: Tensor) -> Tensor:
    return model.lm_head(hidden).float().log_softmax(-1)


def read_prompts(model, tokens: Tensor, context: int, policies: list[str], advance: Callable[[], object]) -> Window:
    """The dense model over ``tokens`` [B, context + T], and what these policies keep of the prompts' queries."""
    config, batch, total = model.config, *tokens.shape
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    shape = (config.num_hidden_layers, batch, kv_heads, total, dim)
    window = Window(tokens[:, context:], context, torch.zeros(shape), torch.zeros(shape), 0.0, heads // kv_heads)
    watching = {name: window.sequence(name, context) for name in policies if POLICIES[name].sees_prompt}
    seconds = dict.fromkeys(watching, 0.0)

    def prompt(layer, query, key, value, scale):
        advance()
        window.scale = scale
        window.keys[layer, :, :, :context], window.values[layer, :, :, :context] = key, value
        for name, sequence in watching.items():
            began = time.perf_counter()
            sequence.observe(layer, query, key, 0, scale)
            seconds[name] += time.perf_counter() - began
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True, scale=scale
        )

    with_attention(model, prompt, tokens[:, :context], 0)
    queries = []

    def dense(layer, query, key, value, scale):
        window.keys[layer, :, :, context:], window.values[layer, :, :, context:] = key, value
        queries.append(query[:, :, -MEASURED - 1 :].clone())
        allowed = torch.arange(total) <= torch.arange(context, total)[:, None]
        return torch.nn.functional.scaled_dot_product_attention(
            query, window.keys[layer], window.values[layer], attn_mask=allowed, enable_gqa=True, scale=scale
        )

    window.log_probs = log_probabilities(model, with_attention(model, dense, window.tokens, context))
    window.queries = torch.stack(queries)
    window.new_keys = window.keys[:, :, :, context:].clone()
    window.new_values = window.values[:, :, :, context:].clone()
    for name, sequence in watching.items():
        window.observed[name] = sequence.index.importance[..., :context].clone(), seconds[name]
        sequence.close()
    return window


class Steps:
    """Decode steps of one layer after another, from an index of the prompts that is left as it was."""

    def __init__(self, window: Window, policy: str, budget: int, prepared: Sequence) -> None:
        self.window, self.sequence = window, window.sequence(policy, budget)
        sequence = self.sequence
        sequence.index = prepared.index.grown(sequence.shape)
        sequence.submitted = list(prepared.submitted)
        self.budget, self.layer = budget, -1

    def begin(self, layer: int) -> None:
        self.layer = layer
        self._at(self.window.context)

    def _at(self, length: int) -> None:
        self.sequence.length = length
        self.sequence.length_device.fill_(length)

    def choose(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """The list of the present step. query: [B, Hq, 1, D]."""
        return retrieve_step(self.sequence, self.layer, query, self.budget, self.window.scale)

    def attend(self, query: Tensor, tokens: Tensor, count: Tensor) -> Tensor:
        return attend_step(self.sequence, self.layer, query, tokens, count, self.budget, self.window.scale)

    def go_on(self) -> None:
        """The step's token is in the cache: index what has gathered in this layer, as the runtime does."""
        sequence = self.sequence
        self._at(sequence.length + 1)
        start, block = sequence.submitted[self.layer], sequence.config.block_size
        if sequence.length - start >= min(sequence.config.append_block, block - start % block):
            sequence.offer_blocks(self.layer, sequence.keys(self.layer), sequence.length, final=False)
            sequence.publish()


def prepared(window: Window, policy: str, budget: int) -> tuple[Sequence, float]:
    """A sequence that has indexed the prompts, and the seconds of it."""
    sequence = window.sequence(policy, budget)
    importance, seconds = window.observed.get(policy, (None, 0.0))
    if importance is not None:
        sequence.index.importance[..., : window.context] = importance
    began = time.perf_counter()
    for layer in range(len(window.keys)):
        sequence.offer(layer, window.keys[layer], 0, window.context, None, None)
    sequence.prefilled(window.context)
    sequence.publish()
    seconds += time.perf_counter() - began
    assert not sequence.statistics.failures, sequence.statistics.failures
    return sequence, seconds


def index_bytes(policy: str, sequence: Sequence) -> int:
    """Of what a policy's steps read beside K and V; room for communities that may come included."""
    names = POLICIES[policy].state if isinstance(POLICIES[policy], TokenPolicy) else GROUP_BUFFERS
    return sum(sequence.index.buffers[name].nbytes for name in names)


def of_dense_queries(steps: Steps, advance: Callable[[], object]) -> tuple[Tensor, Tensor]:
    """Recall and output error [L, B, Hq, m] at the last steps of the window, for the dense model's queries."""
    window, total = steps.window, steps.window.tokens.shape[1]
    window.keys[:, :, :, window.context :], window.values[:, :, :, window.context :] = (
        window.new_keys,
        window.new_values,
    )
    recall, error = [], []
    for layer in range(len(window.keys)):
        advance()
        steps.begin(layer)
        found = []
        for t in range(total):
            place = t - total + window.queries.shape[3]
            if place >= 0:  # one more than is measured: some policies look at the step before
                query = window.queries[layer, :, :, place : place + 1]
                tokens, count = steps.choose(query)
                if place > 0 or window.queries.shape[3] == total:
                    found.append(
                        compared(steps.sequence, steps.layer, query, tokens, count, steps.budget, window.scale)
                    )
            steps.go_on()
        recall.append(torch.stack([one for one, _ in found], -1))
        error.append(torch.stack([one for _, one in found], -1))
    return torch.stack(recall), torch.stack(error)


def predictions(model, steps: Steps, advance: Callable[[], object]) -> Tensor:
    """Log-probabilities [B, T, V] of the window with this policy in every layer."""
    window = steps.window

    def attend(layer, query, key, value, scale):
        advance()
        window.keys[layer, :, :, window.context :], window.values[layer, :, :, window.context :] = key, value
        steps.begin(layer)
        parts = []
        for t in range(query.shape[2]):
            own = query[:, :, t : t + 1]
            parts.append(steps.attend(own, *steps.choose(own)))
            steps.go_on()
        return torch.cat(parts, 2)

    return log_probabilities(model, with_attention(model, attend, window.tokens, window.context))


def rows_of(
    model, window: Window, policy: str, budget: int, kinds: list[tuple[str, str]], prompts: Sequence,
    advance: Callable[[], object],
) -> list[dict]:  # fmt: skip
    """One row per prompt."""
    began = time.perf_counter()
    steps = Steps(window, policy, budget, prompts)
    recall, error = of_dense_queries(steps, advance)
    steps = Steps(window, policy, budget, prompts)
    ours = predictions(model, steps, advance)
    read, context = steps.sequence.index.tally.sum(0).tolist()
    graphs = len(window.keys) * len(kinds) * window.tokens.shape[1] * steps.sequence.shape.graphs
    assert read <= graphs * budget, f"{read / graphs:.1f} tokens attended at a budget of {budget}"
    dense = window.log_probs
    agree = ours.argmax(-1) == dense.argmax(-1)
    kl = (dense.exp() * (dense - ours)).sum(-1)
    rows = []
    for row, (kind, origin) in enumerate(kinds):
        rows.append(
            {
                "policy": policy, "budget": budget, "texts": "both", "test": kind, "text": origin,
                "attended": round(read / graphs, 1), "context": round(context / graphs, 1),
                "seconds": round(time.perf_counter() - began, 1),
                "agree": "".join(str(int(bit)) for bit in agree[row]),
                "kl": [float(f"{value:.4g}") for value in kl[row].tolist()],
                "recall_by_layer": rounded(recall[:, row].mean((1, 2))),
                "error_by_head": [rounded(heads) for heads in error[:, row].mean(-1)],
            }
        )  # fmt: skip
    return rows


def cells_of(rows: list[dict]) -> list[dict]:
    """What ``bench.quality`` makes of predictions, with means of recall and error; one per text, policy and budget."""
    cells = summary(rows, baseline="communities")
    for cell in cells:
        own = [row for row in rows if all(row[name] == cell[name] for name in ("test", "policy", "budget"))]
        cell["recall"] = float(np.mean([row["recall_by_layer"] for row in own]))
        cell["error"] = float(np.mean([row["error_by_head"] for row in own]))
        cell["attended"] = own[0]["attended"]
    return cells


def claims_of(cells: list[dict]) -> dict[str, float]:
    claims = {}
    for cell in cells:
        name = f"{cell['policy']}_{cell['test']}_b{cell['budget']}"
        for measure, digits in (("top1", 4), ("kl", 5), ("recall", 4), ("error", 4)):
            claims[f"policy_{measure}_{name}"] = round(float(cell[measure]), digits)
    return claims


def show(cells: list[dict], costs: dict[str, dict], console: Console) -> None:
    budgets = sorted({cell["budget"] for cell in cells})
    for kind in dict.fromkeys(cell["test"] for cell in cells):
        own = [cell for cell in cells if cell["test"] == kind]
        table = Table("policy", *(f"budget {budget}" for budget in budgets), "index / KV", "seconds")
        table.title = f"{kind}, {own[0]['tokens']} tokens: recall, error; top-1 (95 %); KL"
        for policy in dict.fromkeys(cell["policy"] for cell in own):
            by_budget = {cell["budget"]: cell for cell in own if cell["policy"] == policy}
            shown = [
                "{recall:.3f} {error:.3f}\n{top1:.3f} ({0:.3f}-{1:.3f})\n{kl:.4f}".format(
                    *by_budget[budget]["top1_interval"],
                    **{name: by_budget[budget][name] for name in ("recall", "error", "top1", "kl")},
                )
                for budget in budgets
            ]
            cost = costs[policy]
            table.add_row(policy, *shown, f"{cost['bytes'] / cost['kv_bytes']:.1%}", f"{cost['seconds']:.1f}")
        console.print(table)


def plot(path: Path) -> Path:
    """Recall, error and KL over the budget, a column per text, beside the result file."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    cells = json.loads(path.read_text())["cells"]
    kinds = list(dict.fromkeys(cell["test"] for cell in cells))
    figure, axes = plt.subplots(3, len(kinds), figsize=(6 * len(kinds), 11), squeeze=False, sharex=True)
    for column, kind in enumerate(kinds):
        for row, measure in enumerate(("recall", "error", "kl")):
            axis = axes[row][column]
            for number, policy in enumerate(dict.fromkeys(cell["policy"] for cell in cells)):
                own = sorted(
                    (cell["budget"], cell[measure])
                    for cell in cells
                    if (cell["test"], cell["policy"]) == (kind, policy)
                )
                style = "-" if policy == "communities" else ("--", "-.", ":")[number % 3]
                width = 2.5 if policy == "communities" else 1.2
                axis.plot(*zip(*own, strict=True), style, linewidth=width, label=policy, color=f"C{number % 10}")
            axis.set_xscale("log", base=2)
            if measure != "recall":
                axis.set_yscale("log")
            axis.set_ylabel(
                {"recall": "attention-mass recall", "error": "relative output error", "kl": "KL, nats"}[measure]
            )
            axis.grid(alpha=0.3)
        axes[0][column].set_title(kind)
        axes[-1][column].set_xlabel("budget, tokens")
    axes[0][-1].legend(fontsize=7, ncols=2)
    figure.tight_layout()
    target = path.with_suffix(".png")
    figure.savefig(target, dpi=110)
    plt.close(figure)
    return target


@torch.inference_mode()
def measure(
    model, window: Window, kinds: list[tuple[str, str]], policies: list[str], budgets: list[int], progress: Progress
) -> tuple[list[dict], dict[str, dict]]:
    """Rows for the prompts of a window, which are of ``kinds``, and per policy what its index costs."""
    rows, costs = [], {}
    for policy in policies:
        task = progress.add_task(policy, total=2 * len(window.keys) * len(budgets))
        prompts, seconds = prepared(window, policy, budgets[0])
        costs[policy] = {
            "bytes": index_bytes(policy, prompts), "kv_bytes": window.keys.nbytes + window.values.nbytes,
            "seconds": round(seconds, 2),
        }  # fmt: skip
        for budget in budgets:
            rows += rows_of(model, window, policy, budget, kinds, prompts, lambda task=task: progress.advance(task))
        prompts.close()
    return rows, costs


@torch.inference_mode()
def window_of(
    model, tokens: Tensor, context: int, policies: list[str], kept: Path | None, progress: Progress
) -> Window:
    """``read_prompts``, or what the file ``kept`` holds of it; written where there is none."""
    if kept and kept.exists():
        window = torch.load(kept, weights_only=False)
        if window.context != context or not torch.equal(window.tokens, tokens[:, context:]):
            raise ValueError(f"{kept} must hold a run over the same texts and sizes; remove it or name another file")
        if missing := [name for name in policies if POLICIES[name].sees_prompt and name not in window.observed]:
            raise ValueError(
                f"{kept} must hold a run that observed the prompt for {', '.join(missing)}; name another file"
            )
        return window
    task = progress.add_task("dense", total=model.config.num_hidden_layers)
    window = read_prompts(model, tokens, context, policies, lambda: progress.advance(task))
    if kept:
        torch.save(window, kept)
    return window


def merge(paths: list[Path], out: Path | None, console: Console) -> dict[str, float]:
    """One file from runs that measured different policies or budgets of the same prompts."""
    same = ("context", "window", "texts_sha256", "fresh_seed")
    files, runs = read_runs(paths, *same)
    rows, _ = rows_and_texts(files)
    costs = {policy: cost for file in reversed(files) for policy, cost in file["costs"].items()}
    return finish(rows, costs, out, console, runs=runs, **{name: files[0][name] for name in same})


def finish(rows: list[dict], costs: dict[str, dict], out: Path | None, console: Console, **more) -> dict[str, float]:
    cells = cells_of(rows)
    show(cells, costs, console)
    claims = claims_of(cells)
    path = write_results("policies", rows, claims, label="smollm2", folder=out, cells=cells, costs=costs, **more)
    console.print(f"wrote {path}")
    draw(console, plot, path)
    return claims


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--texts", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--origins", nargs="+", default=["frozen", "fresh"], choices=("frozen", "fresh"))
    parser.add_argument("--shares", nargs="+", type=int, default=list(SHARES), help="context over budget")
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens of a prompt")
    parser.add_argument("--window", type=int, default=WINDOW, help="tokens that are predicted behind it")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1], help="each draws a fresh text of every kind")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads: its operators are small here")
    parser.add_argument("--small", action="store_true", help="256 tokens of one text, 10 predictions, two budgets")
    parser.add_argument("--kept", type=Path, help="file for the dense run, read where it exists")
    parser.add_argument(
        "--merge", nargs="+", type=Path, help="join the rows of earlier runs on the same prompts instead"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw this result file instead of measuring")
    parser.add_argument("--out", type=Path, help="folder of the result file")
    args = parser.parse_args(argv)
    if args.small:
        args.context, args.window, args.shares, args.texts, args.origins = 256, 10, [4, 2], ["python"], ["frozen"]
    if args.context + args.window > texts.LENGTH:
        parser.error(
            f"--context and --window must be at most {texts.LENGTH} together, got {args.context + args.window}"
        )
    least = CommunityConfig.num_sink_tokens + 2 * RECENT
    if args.context // max(args.shares) < least:
        parser.error(f"budgets must be at least {least} tokens, got {args.context} / {max(args.shares)}")
    return args


def main(argv: list[str] | None = None) -> dict[str, float]:
    args = arguments(argv)
    console = Console()
    if args.plot:
        draw(console, plot, args.plot)
        return {}
    if args.merge:
        return merge(args.merge, args.out, console)
    torch.set_num_threads(args.threads)
    tokenizer, model = load_smollm2()
    kinds, prompts, hashes = [], [], {}
    origins = [(name, seed) for name in args.origins for seed in (args.seeds if name == "fresh" else [None])]
    for kind, (name, seed) in itertools.product(args.texts, origins):
        own = texts.frozen_text(kind, tokenizer) if seed is None else texts.fresh_text(kind, tokenizer, seed)
        origin = name if seed is None or len(args.seeds) == 1 else f"{name} {seed}"
        kinds.append((kind, origin))
        prompts.append(own[: args.context + args.window])
        hashes[f"{origin} {kind}"] = texts.digest(own)
    budgets = sorted(args.context // share for share in args.shares)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        window = window_of(model, torch.tensor(prompts), args.context, args.policies, args.kept, progress)
        rows, costs = measure(model, window, kinds, args.policies, budgets, progress)
    return finish(
        rows, costs, args.out, console, context=args.context, window=args.window, texts_sha256=hashes,
        fresh_seed=args.seeds,
    )  # fmt: skip


if __name__ == "__main__":
    main()
