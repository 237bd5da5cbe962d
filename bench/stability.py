"""How close to dense a model stays over thousands of generated tokens (paper, appendix B.2, tables 8 and 9).

SmolLM2-135M over Python source and English prose, every layer sparse, one compiled step after another as any decode loop
takes them. What is compared are the last ``--window`` predictions before each horizon.

    fixed     the text itself goes on (table 8): negative log-likelihood, KL(dense || ours), agreement on the likeliest token
    sampled   each arm generates at temperature 0.7 and top-p 0.95; its own history is read densely (table 9): KL, agreement

Arms: "keys" (the default: tokens are attended until a block of them is indexed), "keys, assign" (each joins a community
at once), "attention, refresh" (the paper's graph, partitioned again every 512 tokens and repaired every 128 in between),
"attention, incremental" (assignment alone), and "streaming" (leading positions and the newest tokens). The budget, of
every attended token, is 1/16 of the context at the last horizon; the recent window takes at most 1/16 of it. Intervals are
95 %: Wilson's for agreement, bootstrap for KL.

    python -m bench.stability                                            # on a GPU; hours on a CPU
    python -m bench.stability --texts python --prompts 2 --horizons 1024 2048
    python -m bench.stability --context 24576 --yarn 4 --horizons 2048 4096 8192 --device cuda
    python -m bench.stability --small                                    # a tiny random model
    python -m bench.stability --merge FILE FILE                          # one file from runs of other arms or texts
    python -m bench.stability --plot FILE
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor
from transformers import DynamicCache, TemperatureLogitsWarper, TopPLogitsWarper

import ckv_compile
from bench import texts
from bench.quality import bootstrap, compiled, prepare, wilson
from bench.results_file import draw, read_runs, rounded, rows_and_texts, write_results
from ckv_compile.config import CommunityConfig
from ckv_compile.smollm2 import load_smollm2
from ckv_compile.testing import TINY_VOCAB, tiny_model

KINDS = ("python", "prose")
TEMPERATURE, TOP_P = 0.7, 0.95
NEVER = 1 << 30
ARMS: dict[str, dict] = {
    "keys": {},
    "keys, assign": {"append": "assign"},
    "attention, refresh": {"graph": "attention"},
    "attention, incremental": {"graph": "attention", "refresh_interval": NEVER, "repair_interval": 0},
    "streaming": {"policy": "streaming"},
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Tokens of a prompt, behind it to where windows end, of a window, and what a step attends to."""

    context: int
    horizons: tuple[int, ...]
    window: int
    budget: int

    @property
    def generated(self) -> int:
        return max(self.horizons)

    def windows(self) -> dict[int, range]:
        """Horizon -> its predictions, by the number of tokens behind the prompt that each has seen."""
        return {horizon: range(horizon - self.window, horizon) for horizon in self.horizons}


def config_of(arm: str, budget: int) -> CommunityConfig:
    recent = min(CommunityConfig.recent_window, max(16, budget // 16))
    options = {"budget": budget, "min_context": 0, "deterministic": True, "recent_window": recent, **ARMS[arm]}
    if options.get("policy") == "streaming":  # all of the budget is window, but one token that is left for retrieval
        options["recent_window"] = budget - CommunityConfig.num_sink_tokens - 1
    return CommunityConfig(**options)


# ---------------------------------------------------------------------- running


Choose = Callable[[int, Tensor], Tensor]  # (number behind the prompt, logits [B, V]) -> token ids [B, 1]


def given(tokens: Tensor) -> Choose:
    """Token ``t`` behind the prompt is column ``t`` of tokens [B, T]."""
    return lambda t, logits: tokens[:, t : t + 1].contiguous()


def drawn(seed: int, device: str) -> Choose:
    """Sampled as transformers does."""
    warpers = TemperatureLogitsWarper(TEMPERATURE), TopPLogitsWarper(TOP_P)
    generator = torch.Generator(device)
    generator.manual_seed(seed)

    def choose(t: int, logits: Tensor) -> Tensor:
        for warper in warpers:
            logits = warper(None, logits)
        return torch.multinomial(logits.softmax(-1), 1, generator=generator)

    return choose


def decode(
    model, prompts: Tensor, count: int, choose: Choose, wanted: range | set[int], advance: Callable[[], object]
) -> tuple[Tensor, dict[int, Tensor]]:
    """Prefill, then one token at a time: the tokens [B, count] and the logits [B, V] of ``wanted`` predictions.

    Prediction t has seen t tokens behind the prompt.
    """
    cache = DynamicCache(config=model.config)
    logits = model(prompts, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].float()
    tokens, kept = [], {}
    for t in range(count):
        if t in wanted:
            kept[t] = logits.clone()
        tokens.append(choose(t, logits))
        if t + 1 < count:  # the last token's own prediction is behind every window
            logits = model(tokens[-1], past_key_values=cache, use_cache=True).logits[:, -1].float()
        advance()
    return torch.cat(tokens, 1), kept


def dense_windows(
    model, prompts: Tensor, tokens: Tensor, sizes: Sizes, advance: Callable[[], object]
) -> Iterator[dict[int, Tensor]]:
    """Row by row: horizon -> log-probabilities [window, V] of the dense model behind ``prompts`` and ``tokens``."""
    for prompt, own in zip(prompts, tokens, strict=True):
        hidden = model.model(torch.cat([prompt, own[:-1]])[None], use_cache=False).last_hidden_state[0]
        seen = len(prompt) - 1  # its hidden state predicts the first token behind the prompt
        yield {
            horizon: model.lm_head(hidden[seen + window.start : seen + window.stop]).float().log_softmax(-1)
            for horizon, window in sizes.windows().items()
        }
        advance()


def rows_of(
    where: list[dict], dense: Iterator[dict[int, Tensor]], ours: dict[int, Tensor], tokens: Tensor, sizes: Sizes
) -> list[dict]:
    """A row for each prompt and horizon: of each prediction agreement, KL, and the likelihood of what follows."""
    rows = []
    for number, (own, log_probs) in enumerate(zip(where, dense, strict=True)):
        for horizon, window in sizes.windows().items():
            reference = log_probs[horizon]
            found = torch.stack([ours[t][number] for t in window]).log_softmax(-1)
            actual = tokens[number, window.start : window.stop, None]
            rows.append(
                own
                | {
                    "horizon": horizon,
                    "agree": "".join(str(int(bit)) for bit in found.argmax(-1) == reference.argmax(-1)),
                    "kl": rounded((reference.exp() * (reference - found)).sum(-1)),
                    "nll": rounded(-found.gather(1, actual)[:, 0]),
                    "dense_nll": rounded(-reference.gather(1, actual)[:, 0]),
                }
            )
    return rows


@torch.no_grad()
def measure(
    model, prompts: Tensor, following: Tensor, where: list[dict], sizes: Sizes, arms: list[str], modes: list[str],
    progress: Progress, keep: Callable[[list[dict]], object], seed: int = 0,
) -> list[dict]:  # fmt: skip
    """Rows of all arms. prompts: [B, context]; following: what goes on in the texts, [B, generated]; keep: gets the rows."""
    rows: list[dict] = []
    wanted = {t for window in sizes.windows().values() for t in window}
    for mode in modes:
        for arm in arms:
            task = progress.add_task(f"{mode}, {arm}", total=sizes.generated + len(prompts))
            torch._dynamo.reset()  # graphs of other arms would only be tried in vain
            step = compiled(model, config_of(arm, sizes.budget))
            choose = given(following) if mode == "fixed" else drawn(seed, str(prompts.device))
            began = time.perf_counter()
            tokens, ours = decode(
                step, prompts, sizes.generated, choose, wanted, lambda task=task: progress.advance(task)
            )
            seconds = round(time.perf_counter() - began, 1)
            about = ckv_compile.explain(step, show=False)
            if about.sparse_steps < sizes.generated - 1 or about.fallbacks:
                raise RuntimeError(f"{arm}: of {sizes.generated - 1} steps {about.sparse_steps} were sparse; {about}")
            common = {
                "mode": mode, "arm": arm, "context": sizes.context, "budget": sizes.budget, "seconds": seconds,
                "attended": round(about.tokens_attended / about.tokens_in_context, 5),
            }  # fmt: skip
            dense = dense_windows(model, prompts, tokens, sizes, lambda task=task: progress.advance(task))
            rows += rows_of([common | one for one in where], dense, ours, tokens, sizes)
            keep(rows)
    return rows


# ---------------------------------------------------------------------- texts


def text_of(kind: str, number: int, tokenizer, length: int, seed: int) -> list[int]:
    """Prompt ``number`` of a kind: the frozen text first where it is long enough, then fresh ones."""
    if number == 0 and length <= texts.LENGTH:
        return texts.frozen_text(kind, tokenizer)[:length]
    return texts.fresh_text(kind, tokenizer, seed + number, length)


def stretch(model, factor: float) -> None:
    """Extend a Llama-like model's context by YaRN, as transformers computes it."""
    config, rotary = model.config, model.model.rotary_emb
    known = config.max_position_embeddings
    config.rope_parameters = dict(config.rope_parameters) | {
        "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": known,
    }  # fmt: skip
    config.max_position_embeddings = int(known * factor)
    model.model.rotary_emb = type(rotary)(config).to(rotary.inv_freq.device)


# ---------------------------------------------------------------------- statistics


def cells_of(rows: list[dict]) -> list[dict]:
    """One per text, mode, arm and horizon."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault((row["test"], row["mode"], row["arm"], row["horizon"]), []).append(row)
    cells = []
    for (test, mode, arm, horizon), own in groups.items():
        agree = np.concatenate([np.array(list(row["agree"]), float) for row in own])
        kl, nll, dense = (np.concatenate([row[name] for row in own]) for name in ("kl", "nll", "dense_nll"))
        cells.append(
            {
                "test": test, "mode": mode, "arm": arm, "horizon": horizon, "context": own[0]["context"],
                "budget": own[0]["budget"], "prompts": len(own), "tokens": len(agree),
                "top1": float(agree.mean()), "top1_interval": wilson(int(agree.sum()), len(agree)),
                "kl": float(kl.mean()), "kl_interval": bootstrap(kl), "nll": float(nll.mean()),
                "dense_nll": float(dense.mean()), "attended": float(np.mean([row["attended"] for row in own])),
            }
        )  # fmt: skip
    return cells


def claims_of(cells: list[dict]) -> dict[str, float]:
    claims = {}
    for cell in cells:
        name = f"{cell['mode']}_{cell['arm'].replace(', ', '_')}_{cell['test']}_{cell['horizon']}"
        claims[f"stability_top1_{name}"] = round(cell["top1"], 4)
        claims[f"stability_kl_{name}"] = round(cell["kl"], 5)
        if cell["mode"] == "fixed":
            claims[f"stability_nll_over_dense_{name}"] = round(cell["nll"] - cell["dense_nll"], 5)
    return claims


def show(cells: list[dict], console: Console) -> None:
    table = Table("text", "mode", "arm", "horizon", "agreement (95 %)", "KL", "NLL over dense", "attended")
    for cell in cells:
        table.add_row(
            cell["test"], cell["mode"], cell["arm"], str(cell["horizon"]),
            "{:.3f} ({:.3f}-{:.3f})".format(cell["top1"], *cell["top1_interval"]), f"{cell['kl']:.4f}",
            f"{cell['nll'] - cell['dense_nll']:+.4f}" if cell["mode"] == "fixed" else "", f"{cell['attended']:.3f}",
        )  # fmt: skip
    console.print(table)


def plot(path: Path) -> Path:
    """KL and agreement by horizon, a panel for each text and mode; beside the result file."""
    from matplotlib.figure import Figure

    cells = json.loads(path.read_text())["cells"]
    panels = list(dict.fromkeys((cell["test"], cell["mode"]) for cell in cells))
    figure = Figure(figsize=(4 * len(panels), 6), layout="constrained")
    for column, axes in zip(panels, figure.subplots(2, len(panels), squeeze=False, sharex=True).T, strict=True):
        own = [cell for cell in cells if (cell["test"], cell["mode"]) == column]
        for arm in dict.fromkeys(cell["arm"] for cell in own):
            mine = sorted((cell for cell in own if cell["arm"] == arm), key=lambda cell: cell["horizon"])
            for axis, name in zip(axes, ("kl", "top1"), strict=True):
                axis.plot([cell["horizon"] for cell in mine], [cell[name] for cell in mine], marker="o", label=arm)
        axes[0].set(title=", ".join(column), ylabel="KL to dense, nats", yscale="log")
        axes[1].set(xlabel="tokens generated", ylabel="agreement with dense")
    axes[1].legend(fontsize="small")
    target = path.with_suffix(".png")
    figure.savefig(target, dpi=110)
    return target


# ----------------------------------------------------------------------


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--modes", nargs="+", default=["fixed", "sampled"], choices=("fixed", "sampled"))
    parser.add_argument("--texts", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--prompts", type=int, default=5, help="of each text")
    parser.add_argument("--context", type=int, default=4096, help="tokens of a prompt")
    parser.add_argument("--horizons", nargs="+", type=int, default=[1024, 2048, 4096], help="tokens behind it")
    parser.add_argument("--window", type=int, default=512, help="predictions before each horizon that are compared")
    parser.add_argument("--budget", type=int, help="tokens; 1/16 of the context at the last horizon by default")
    parser.add_argument("--yarn", type=float, default=1.0, help="factor by which the model's context is extended")
    parser.add_argument("--seed", type=int, default=40, help="draws the fresh texts, and what is sampled")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, help="torch's threads on the CPU")
    parser.add_argument("--interpret", action="store_true", help="run rewritten graphs node by node, without Inductor")
    parser.add_argument("--small", action="store_true", help="a tiny random model over random tokens, interpreted")
    parser.add_argument("--merge", nargs="+", type=Path, help="join the rows of earlier runs instead")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw this result file instead of measuring")
    parser.add_argument("--out", type=Path, help="folder of the result file")
    args = parser.parse_args(argv)
    if args.small:
        args.interpret, args.prompts, args.context, args.window = True, 1, 160, 8
        args.horizons, args.budget, args.device = [16, 32], args.budget or 128, "cpu"
    if min(args.horizons) < args.window:
        parser.error(f"--horizons must be at least the window of {args.window}, got {min(args.horizons)}")
    return args


def finish(rows: list[dict], out: Path | None, console: Console, device: str, **more) -> dict[str, float]:
    cells = cells_of(rows)
    show(cells, console)
    claims = claims_of(cells)
    path = write_results("stability", rows, claims, device=device, label="smollm2", folder=out, cells=cells, **more)
    console.print(f"wrote {path}")
    draw(console, plot, path)
    return claims


def merge(paths: list[Path], args: argparse.Namespace, console: Console) -> dict[str, float]:
    files, runs = read_runs(paths)
    rows, hashes = rows_and_texts(files)
    return finish(rows, args.out, console, "cpu", runs=runs, texts_sha256=hashes)


def main(argv: list[str] | None = None) -> dict[str, float]:
    args = arguments(argv)
    console = Console()
    if args.plot:
        draw(console, plot, args.plot)
        return {}
    if args.merge:
        return merge(args.merge, args, console)
    prepare(args)
    length = args.context + max(args.horizons)
    sizes = Sizes(args.context, tuple(sorted(args.horizons)), args.window, args.budget or length // 16)
    where = [{"test": kind, "prompt": number} for kind in args.texts for number in range(args.prompts)]
    if args.small:
        model = tiny_model("llama")
        rng = np.random.default_rng(args.seed)
        rows = [rng.integers(1, TINY_VOCAB, length).tolist() for _ in where]
    else:
        console.print("loading SmolLM2-135M")
        tokenizer, model = load_smollm2(args.device)
        if args.yarn > 1:
            stretch(model, args.yarn)
        if length > model.config.max_position_embeddings:
            raise SystemExit(
                f"--context and the last of --horizons must be at most {model.config.max_position_embeddings} tokens "
                f"together at --yarn {args.yarn:g}, got {length}"
            )
        rows = [text_of(one["test"], one["prompt"], tokenizer, length, args.seed) for one in where]
    hashes = {f"{one['test']} {one['prompt']}": texts.digest(ids) for one, ids in zip(where, rows, strict=True)}
    ids = torch.tensor(rows, device=args.device)
    prompts, following = ids[:, : args.context].contiguous(), ids[:, args.context :]
    folder = args.out

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    partial: list[Path] = []

    def keep(rows: list[dict]) -> None:
        """A run that is stopped leaves what it has."""
        path = write_results(
            "stability", rows, claims_of(cells_of(rows)), device=args.device, label="smollm2-partial", folder=folder,
            cells=cells_of(rows), texts_sha256=hashes, yarn=args.yarn,
        )  # fmt: skip
        while partial:
            partial.pop().unlink()
        partial.append(path)

    with Progress(*columns, console=console) as progress:
        found = measure(
            model, prompts, following, where, sizes, args.arms, args.modes, progress, keep, seed=args.seed
        )  # fmt: skip
    claims = finish(found, folder, console, args.device, texts_sha256=hashes, yarn=args.yarn)
    while partial:
        partial.pop().unlink()
    return claims


if __name__ == "__main__":
    main()
