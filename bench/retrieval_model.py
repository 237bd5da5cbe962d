"""A small model that does nothing but look things up, trained in minutes: dense attention finds, so what is lost shows.

    python -m bench.retrieval_model --seconds 240 --out build/retrieval              # train on a GPU
    python -m bench.retrieval_model --go-on build/retrieval/llama --seconds 200      # train longer, from 2,048 tokens on
    python -m bench.retrieval_model --small --seconds 240 --out build/retrieval      # smaller and shorter, for a CPU
    python -m bench.retrieval_model --evaluate build/retrieval/llama --lengths 8192 32768 --device cuda

Training (``bench/task_grammars/training.py``) is rows of facts among words and many questions about them, at lengths
that grow; the loss is that of the answers. Three things make lookup emerge within some hundred steps: heads of the first
layer begin as heads that read the 1, 2, 3, ... previous tokens (their biases, rotated), embeddings begin large, and
matrices are trained with Muon. It stops after ``--seconds``, whatever came of it, and leaves a folder that
``from_pretrained`` reads, and a JSON file with the loss curve and the accuracy of the saved weights by length.

Families: "llama", and "gpt_oss", whose attention has learned sinks: PyTorch's own attention computes these while
training, as one more key.

Evaluation: prompts that end in a question whose answer is a planted passage of ``--tokens`` tokens, or a chain of
assignments. The greedy tokens of an unmodified ``generate`` are compared with those of the same model under
``torch.compile(model, backend="communitykv")``: how many are equal, and how many are the planted ones.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

import ckv_compile
from bench.results_file import write_results
from bench.task_grammars import training, vocabulary
from bench.task_grammars.training import FORMS, Batch, Drawing, batch_of

FAMILIES = ("llama", "gpt_oss")
EVALUATION_SEED = 1_000_003  # training draws with small seeds
OFFSET_GAP = 6.0  # logits by which the previous token's score exceeds its neighbours' in a new offset head
FAST = 0.03  # radians per token: rotary frequencies above it tell neighbouring tokens apart


@dataclasses.dataclass(frozen=True)
class Size:
    hidden: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    theta: float  # of rotary embeddings: large, so that a third of the frequencies stand still over 32k tokens


@dataclasses.dataclass(frozen=True)
class Stage:
    """Training at one length until ``target`` is reached or its share of the time is over."""

    length: int  # tokens of a row
    tokens: int  # of a step
    share: float  # of all seconds
    forms: tuple[str, ...]
    target: float  # accuracy of answer tokens, the mean of the worst form's last steps


SIZES = {"full": Size(256, 4, 8, 2, 64, 1e8), "small": Size(96, 2, 4, 2, 32, 1e6)}
STAGES = {
    "full": (
        Stage(64, 32768, 0.08, ("lookup",), 0.90),
        Stage(128, 65536, 0.08, FORMS, 0.97),
        Stage(512, 65536, 0.14, FORMS, 0.98),
        Stage(2048, 131072, 0.18, FORMS, 0.985),
        Stage(8192, 131072, 0.22, FORMS, 0.99),
        Stage(32768, 131072, 0.30, FORMS, 2.0),  # to the end
    ),
    "small": (
        Stage(64, 2048, 0.3, ("lookup",), 0.90),
        Stage(128, 2048, 0.4, FORMS, 0.95),
        Stage(512, 4096, 0.3, FORMS, 2.0),
    ),
}

GO_ON_LENGTH = 2048  # of the first stage of a model that was trained before


def later_stages(stages: tuple[Stage, ...], least: int = GO_ON_LENGTH) -> tuple[Stage, ...]:
    """The stages from a length on, the last one in any case, in the same proportions of all the time."""
    kept = [stage for stage in stages if stage.length >= least] or [stages[-1]]
    total = sum(stage.share for stage in kept)
    return tuple(dataclasses.replace(stage, share=stage.share / total) for stage in kept)


# ---------------------------------------------------------------------- the model


def attention_with_sinks(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float, **_
) -> tuple[Tensor, None]:
    """gpt-oss's attention by PyTorch's own kernels, causal, for training.

    A learned sink is one more key, in front: its score is the sink's logit for every query, by one more dimension that
    is 1 in queries and 0 in other keys, and its value is zero. query [B, H, N, D], key and value [B, G, N, D].
    """
    if attention_mask is not None:
        raise ValueError("attention_with_sinks needs rows without padding, got an attention mask")
    pad = -query.shape[-1] % 8 or 8  # kernels want a multiple of 8
    heads = query.shape[1] // key.shape[1]
    query, key, value = (F.pad(tensor, (0, pad, 1, 0)) for tensor in (query, key, value))
    key, value = key.repeat_interleave(heads, 1), value.repeat_interleave(heads, 1)
    ones = torch.zeros_like(query[..., :1]) + 1.0
    logits = (module.sinks / scaling).to(key.dtype)[None, :, None, None].expand(key.shape[0], -1, 1, 1)
    column = torch.cat([logits, torch.zeros_like(key[:, :, 1:, :1])], 2)
    query = torch.cat([query[..., :-pad], ones, query[..., 1 - pad :] if pad > 1 else query[..., :0]], -1)
    key = torch.cat([key[..., :-pad], column, key[..., 1 - pad :] if pad > 1 else key[..., :0]], -1)
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return out[:, :, 1:, :-pad].transpose(1, 2), None


def configuration(family: str, size: Size):
    """The family's configuration; a row of training may be as long as ``max_position_embeddings``."""
    from transformers import GptOssConfig, LlamaConfig

    common = {
        "vocab_size": vocabulary.SIZE, "hidden_size": size.hidden, "intermediate_size": 2 * size.hidden,
        "num_hidden_layers": size.layers, "num_attention_heads": size.query_heads,
        "num_key_value_heads": size.kv_heads, "head_dim": size.head_dim, "attention_bias": True,
        "max_position_embeddings": 131072, "pad_token_id": vocabulary.PAD, "bos_token_id": vocabulary.BOS,
        "eos_token_id": None, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": size.theta},
    }  # fmt: skip
    if family == "llama":
        return LlamaConfig(**common)
    if family == "gpt_oss":
        layers = ["full_attention"] * size.layers
        return GptOssConfig(**common, num_local_experts=1, num_experts_per_tok=1, layer_types=layers)
    raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {family!r}")


def training_implementations(family: str) -> dict[str, str]:
    """What ``from_config`` and ``from_pretrained`` get for training: a grouped product of float32 has no kernel."""
    if family == "llama":
        return {"attn_implementation": "sdpa"}
    return {"attn_implementation": "attention_with_sinks", "experts_implementation": "eager"}


def new_model(family: str, size: Size, seed: int) -> nn.Module:
    """A model in float32 whose first layer reads previous tokens from the start."""
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register("attention_with_sinks", attention_with_sinks)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(configuration(family, size), **training_implementations(family))
    nn.init.normal_(model.model.embed_tokens.weight, std=0.1)
    for name, parameter in model.named_parameters():
        if name.endswith(("sinks", "router.weight", "router.bias", "experts.gate_up_proj_bias", "down_proj_bias")):
            nn.init.zeros_(parameter)
        elif name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            nn.init.normal_(parameter, std=0.02)
    read_previous_tokens(model.model.layers[0].self_attn, model.model.rotary_emb.inv_freq, size)
    return model


@torch.no_grad()
def read_previous_tokens(attention: nn.Module, frequencies: Tensor, size: Size) -> None:
    """Give query heads biases with which they attend 1, 2, ... tokens back, whatever the tokens are.

    The score of a bias rotated by ``offset`` positions and one that is not is the sum of cos((distance - offset) * f)
    over the fast frequencies f: it is largest at ``distance == offset``.
    """
    frequencies = frequencies.float()
    fast = (frequencies > FAST).float()
    gap = ((1 - frequencies.cos()) * fast).sum() * size.head_dim**-0.5
    scale = math.sqrt(OFFSET_GAP / gap)
    attention.k_proj.bias.copy_(torch.cat([fast, torch.zeros_like(fast)]).mul(scale).repeat(size.kv_heads))
    biases = []
    for head in range(size.query_heads):
        offset = head % (size.query_heads // size.kv_heads) + 1  # every group reads all offsets
        angle = -offset * frequencies
        biases.append(torch.cat([angle.cos() * fast, angle.sin() * fast]) * scale)
    attention.q_proj.bias.copy_(torch.cat(biases))


def load(folder: Path, device: str, dtype: torch.dtype, *, training: bool = False) -> nn.Module:
    """The trained model in eval mode; its attention is transformers' own for the family: gpt-oss has only "eager".

    training: with the attention that it was trained with instead, which needs no room for all scores.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    family = AutoConfig.from_pretrained(folder).model_type
    chosen = {"attn_implementation": "sdpa" if family == "llama" else "eager"}
    if training:
        chosen = training_implementations(family)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **chosen)
    return model.eval().requires_grad_(False).to(device)


# ---------------------------------------------------------------------- training


def answers_of(model: nn.Module, batch: Batch, inner=None) -> tuple[Tensor, Tensor]:
    """(logits [N, V], tokens [N]) of a batch's answers, in the order of the rows.

    inner: ``model.model``, compiled, if it is to be called in its place.
    """
    hidden = (model.model if inner is None else inner)(batch.tokens, use_cache=False).last_hidden_state
    asked = batch.answers[:, 1:]
    return model.lm_head(hidden[:, :-1][asked]), batch.tokens[:, 1:][asked]


def optimizers_of(model: nn.Module, rate: float, matrix_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embeddings, biases and norms."""
    matrices = [
        parameter for name, parameter in model.named_parameters() if parameter.ndim == 2 and "embed_tokens" not in name
    ]
    others = [parameter for parameter in model.parameters() if all(parameter is not matrix for matrix in matrices)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98), weight_decay=0.0),
        torch.optim.Muon(matrices, lr=matrix_rate, weight_decay=0.0, adjust_lr_fn="original"),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return optimizers


def rate_factor(step: int, elapsed: float, warm_up: int = 50) -> float:
    """Of the peak learning rate: linear warm-up in steps, then a cosine over the time, ``elapsed`` from 0 to 1."""
    return min(1.0, (step + 1) / warm_up) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, elapsed))))


class Course:
    """Which stage it is, by what was reached and by the time."""

    def __init__(self, stages: tuple[Stage, ...], window: int = 10) -> None:
        self.stages, self.window = stages, window
        self.number = 0
        self.recent: dict[str, deque[float]] = {}

    @property
    def stage(self) -> Stage:
        return self.stages[self.number]

    def learned(self, form: str, length: int, accuracy: float) -> None:
        if length == self.stage.length:
            self.recent.setdefault(form, deque(maxlen=self.window)).append(accuracy)

    def accuracies(self) -> dict[str, float]:
        return {form: sum(values) / len(values) for form, values in self.recent.items()}

    def advance(self, elapsed: float) -> bool:
        """Go on to the next length if this one is learned or has had its time; ``elapsed`` of all time, 0 to 1."""
        if self.number + 1 == len(self.stages):
            return False
        full = len(self.recent) == len(self.stage.forms) and all(
            len(values) == self.window for values in self.recent.values()
        )
        reached = full and min(self.accuracies().values()) >= self.stage.target
        ends = sum(stage.share for stage in self.stages[: self.number + 1])
        if not reached and elapsed < ends:
            return False
        self.number += 1
        self.recent = {}
        return True


def schedule(course: Course, draw: Drawing) -> Iterator[tuple[str, int, int]]:
    """(form, length, rows): the forms of the stage in turn; one step in three is at a shorter, earlier length."""
    step = 0
    while True:
        stage = course.stage
        length = stage.length
        if course.number and draw.fraction() < 1 / 3:
            length = course.stages[draw.one(0, course.number - 1)].length
        yield stage.forms[step % len(stage.forms)], length, max(1, stage.tokens // length)
        step += 1


class Trainer:
    """A model on its way through a course. ``curve`` has a row per step, ``tokens`` counts those of all rows."""

    def __init__(self, args: argparse.Namespace, size: Size, stages: tuple[Stage, ...], console: Console) -> None:
        self.args, self.console = args, console
        self.model = new_model(args.family, size, args.seed).to(args.device).train()
        if args.go_on:
            self.model.load_state_dict(load(args.go_on, args.device, torch.float32, training=True).state_dict())
        self.inner = torch.compile(self.model.model, dynamic=True) if args.compile else self.model.model
        self.optimizers = optimizers_of(self.model, args.rate, args.matrix_rate)
        self.draw = Drawing(args.seed + (args.go_on is not None), args.device)
        self.course = Course(stages)
        self.curve: list[dict] = []
        self.tokens = 0
        self.stopped: str | None = None  # by which error
        self.kept: dict[str, Tensor] = {}  # weights at the end of the last stage

    def step(self, form: str, length: int, rows: int, factor: float) -> tuple[Tensor, Tensor]:
        """(loss, share of right tokens), both 0-d on the device. ``factor`` of the peak learning rates."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * factor
        batch = batch_of(form, self.draw, rows, length)
        kind = batch.tokens.device.type
        with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
            logits, target = answers_of(self.model, batch, self.inner)
        loss = F.cross_entropy(logits.float(), target)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.tokens += batch.tokens.numel()
        told = target >= vocabulary.WORDS.start  # not the marks
        return loss.detach(), ((logits.argmax(-1) == target) & told).sum() / told.sum()

    def run(self) -> None:
        """Until the time is over, or an error that a later step could not do without: then the last weights are kept."""
        columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
        with Progress(*columns, console=self.console) as progress:
            task = progress.add_task("training", total=1.0)
            try:
                self._steps(lambda text, elapsed: progress.update(task, completed=elapsed, description=text))
            except (RuntimeError, FloatingPointError) as error:
                if not self.curve:
                    raise
                self.stopped = f"{type(error).__name__}: {error}"
                self.console.print(f"stopped early: {self.stopped}")
        if not all(bool(parameter.isfinite().all()) for parameter in self.model.parameters()):
            self.model.load_state_dict(self.kept)
        self.model.eval()

    def _steps(self, show) -> None:
        pending: list[tuple[dict, Tensor, Tensor]] = []
        began = time.perf_counter()
        for step, (form, length, rows) in enumerate(schedule(self.course, self.draw)):
            elapsed = (time.perf_counter() - began) / self.args.seconds
            if elapsed >= 1:
                return
            loss, right = self.step(form, length, rows, rate_factor(step, elapsed))
            row = {"step": step, "form": form, "length": length, "tokens_seen": self.tokens}
            pending.append((row, loss, right))
            if len(pending) < 10:
                continue
            for row, loss, right in pending:  # one wait for the device
                row |= {"seconds": round(time.perf_counter() - began, 1)}
                row |= {"loss": round(loss.item(), 4), "accuracy": round(right.item(), 4)}
                self.curve.append(row)
                self.course.learned(row["form"], row["length"], row["accuracy"])
            pending = []
            if not math.isfinite(self.curve[-1]["loss"]):
                raise FloatingPointError(f"the loss of step {step} is {self.curve[-1]['loss']}")
            text = " ".join(f"{name} {value:.3f}" for name, value in self.course.accuracies().items())
            text = f"{self.course.stage.length} tokens: {text}"
            show(text, elapsed)
            time_and_step = f"{elapsed * self.args.seconds:6.1f} s, step {step + 1}, {self.tokens:,} tokens seen"
            if step % 100 == 99:
                self.console.print(f"{time_and_step}; {text}")
            if self.course.advance(elapsed):
                self.console.print(f"{time_and_step}; {text}; on to {self.course.stage.length}")
                self.kept = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}


@torch.no_grad()
def dense_accuracy(model: nn.Module, length: int, form: str, batches: int, rows: int) -> dict:
    """Teacher-forced: answers whose every token is the most probable one, of questions never trained on."""
    device = next(model.parameters()).device
    draw = Drawing(EVALUATION_SEED + length, device)
    exact = questions = right = tokens = 0
    for _ in range(batches):
        batch = batch_of(form, draw, rows, length)
        logits, target = answers_of(model, batch)
        told = (logits.argmax(-1) == target) | (target < vocabulary.WORDS.start)
        asked = batch.answers[:, 1:]
        row = torch.arange(rows, device=device)[:, None].expand_as(asked)[asked]
        number = row * (batch.records.max() + 1) + batch.records[:, 1:][asked]
        wrong = torch.zeros(int(number.max()) + 1, device=device).index_add_(0, number, (~told).float())
        exact += int((wrong == 0).sum())
        questions += len(wrong)
        right += int((told & (target >= vocabulary.WORDS.start)).sum())
        tokens += int((target >= vocabulary.WORDS.start).sum())
    return {
        "length": length, "form": form, "questions": questions, "exact": exact, "accuracy": round(exact / questions, 4),
        "tokens": tokens, "token_accuracy": round(right / tokens, 4),
    }  # fmt: skip


def save(model: nn.Module, folder: Path, dtype: torch.dtype) -> None:
    """Weights in ``dtype`` and the configuration, for ``from_pretrained``; the model itself stays as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.to(dtype).contiguous() for name, tensor in model.state_dict().items()}
    model.config.dtype = dtype
    model.save_pretrained(folder, state_dict=state)


def run_training(args: argparse.Namespace, console: Console) -> Path:
    kind = "small" if args.small else "full"
    folder = args.out / args.family
    size, stages = SIZES[kind], later_stages(STAGES[kind]) if args.go_on else STAGES[kind]
    trainer = Trainer(args, size, stages, console)
    trainer.run()
    save(trainer.model, folder, torch.float16)
    console.print(f"{trainer.tokens:,} tokens in {len(trainer.curve)} steps; weights are in {folder}")
    dtype = torch.bfloat16 if args.device.startswith("cuda") else torch.float32
    model = load(folder, args.device, dtype, training=True)  # what was saved is what is measured
    rows, claims = [], {}
    for length in sorted({stage.length for stage in stages}):
        for form in stages[-1].forms:
            with contextlib.suppress(torch.OutOfMemoryError):
                batch = max(1, (16384 if kind == "full" else 4096) // length)
                rows.append(dense_accuracy(model, length, form, 8, batch))
                claims[f"retrieval_{args.family}_accuracy_{form}_{length}"] = rows[-1]["accuracy"]
    model = load(folder, args.device, dtype)  # what it was trained with knows no cache
    for length in sorted({stage.length for stage in stages if stage.length >= 512}):
        for kind_of, planted in PLANTED.items():
            tokens = min(200, length // 16)
            found = [greedy_tokens(model, planted, length, tokens, seed) for seed in range(4)]
            rows.append({"length": length, "form": f"planted {kind_of}", "tokens": tokens, "greedy_correct": found})
            claims[f"retrieval_{args.family}_greedy_{kind_of}_{length}"] = round(sum(found) / (4 * tokens), 4)
    table = Table("length", *stages[-1].forms, *(f"greedy {kind}" for kind in PLANTED))
    table.title = "dense: whole answers, teacher-forced, and greedy tokens of planted ones"
    for length in dict.fromkeys(row["length"] for row in rows):
        cells = [
            f"{row['accuracy']:.3f}" if "accuracy" in row else f"{row['greedy_correct']} of {row['tokens']}"
            for row in rows
            if row["length"] == length
        ]
        table.add_row(str(length), *cells)
    console.print(table)
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    path = write_results(
        "retrieval_model", rows, claims, device=args.device, label=f"train-{args.family}-{kind}", folder=args.out,
        loss_curve=trainer.curve, training_tokens=trainer.tokens, stopped=trainer.stopped, weights_bytes=weights,
        parameters=model.num_parameters(),
        sizes=dataclasses.asdict(size), stages=[dataclasses.asdict(stage) for stage in stages],
    )  # fmt: skip
    console.print(f"wrote {path}")
    return path


# ---------------------------------------------------------------------- through communities


@dataclasses.dataclass
class Prompt:
    """``tokens`` [L] end in a question; ``answer`` [T] is what should follow."""

    kind: str
    tokens: Tensor
    answer: Tensor


def planted_passage(draw: Drawing, length: int, tokens: int, distractors: int = 3) -> Prompt:
    """A passage of ``tokens`` values somewhere among words, other passages elsewhere; the question is its key."""
    pairs = torch.cat(
        [
            draw.tokens(vocabulary.KEYS, 1, distractors + 1, 2),
            draw.tokens(vocabulary.VALUES, 1, distractors + 1, tokens),
        ],
        -1,
    )
    facts = training.with_column(pairs, vocabulary.NEEDLE, vocabulary.END)
    context = training.scattered(draw, facts, length - 4)
    asked = pairs[0, draw.one(0, distractors)]
    row = torch.cat(
        [context.new_tensor([vocabulary.BOS]), context[0], context.new_tensor([vocabulary.QUERY]), asked[:2]]
    )
    return Prompt("passage", row, asked[2:])


def planted_chain(draw: Drawing, length: int, tokens: int) -> Prompt:
    """Assignments in random order among words: each name of the answer leads to the next, wherever that one stands."""
    hops = -(-(tokens + 1) // 3)
    order = draw.orders(2, len(vocabulary.KEYS))[:, : hops + 1]
    names = vocabulary.KEYS.start + order.T[None, None]  # every token once in each place
    names[0, 0, 0] = draw.tokens(vocabulary.VALUES, 2)
    context = training.scattered(draw, training.assignments(draw, names), length - 5)[0]
    begin = [vocabulary.TRACK, *names[0, 0, 0].tolist(), vocabulary.TO]
    row = torch.cat([context.new_tensor([vocabulary.BOS]), context, context.new_tensor(begin)])
    to = torch.full_like(names[0, 0, 1:, :1], vocabulary.TO)
    return Prompt("chain", row, torch.cat([names[0, 0, 1:], to], -1).flatten()[:tokens])


def generated(model, prompt: Tensor, tokens: int, chunk: int | None = None) -> Tensor:
    """Greedy tokens [tokens] of ``transformers``' own generate. ``chunk``: tokens of a prefill's pieces."""
    inputs = prompt[None]
    out = model.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
        pad_token_id=vocabulary.PAD, prefill_chunk_size=chunk,
    )  # fmt: skip
    return out[0, len(prompt) :]


PLANTED = {"passage": planted_passage, "chain": planted_chain}


@torch.no_grad()
def greedy_tokens(model, planted, length: int, tokens: int, seed: int) -> int:
    """How many of the dense model's greedy tokens are the planted ones."""
    prompt = planted(Drawing(EVALUATION_SEED + seed, next(model.parameters()).device), length, tokens)
    return int((generated(model, prompt.tokens, tokens, dense_pieces(model, length)) == prompt.answer).sum())


def dense_pieces(model, length: int) -> int | None:
    """Tokens at a time of a dense prefill: eager attention writes all scores of a piece out."""
    return 4096 if model.config.model_type == "gpt_oss" and length > 8192 else None


def compare(module, prompts: list[Prompt], options: dict, dense: list[Tensor], advance) -> list[dict]:
    """One row per prompt: how many of the tokens are those of ``dense``."""
    rows = []
    for prompt, expected in zip(prompts, dense, strict=True):
        before = ckv_compile.explain(module, show=False)
        began = time.perf_counter()
        ours = generated(module, prompt.tokens, len(prompt.answer))
        seconds = time.perf_counter() - began
        after = ckv_compile.explain(module, show=False)

        def spent(name: str, before=before, after=after) -> int:
            return getattr(after, name) - getattr(before, name)

        equal = ours == expected
        rows.append(
            {
                "kind": prompt.kind, "length": len(prompt.tokens), "options": options, "tokens": len(equal),
                "equal": int(equal.sum()), "equal_before_first_difference": int(equal.long().cumprod(0).sum()),
                "correct": int((ours == prompt.answer).sum()), "dense_correct": int((expected == prompt.answer).sum()),
                "decode_steps": spent("decode_steps"), "sparse_steps": spent("sparse_steps"),
                "attended_share": round(spent("tokens_attended") / max(1, spent("tokens_in_context")), 4),
                "seconds": round(seconds, 2),
            }
        )  # fmt: skip
        advance()
    return rows


@torch.no_grad()
def run_evaluation(args: argparse.Namespace, console: Console) -> list[dict]:
    """Dense greedy tokens against those through communities, by length and graph source."""
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[args.dtype]
    model = load(args.evaluate, args.device, dtype)
    family = model.config.model_type
    rows, claims = [], {}
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    prompts: dict[int, list[Prompt]] = {}
    dense: dict[int, list[Tensor]] = {}
    errors: list[str] = []
    total = len(args.lengths) * len(args.prompts) * args.samples
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("dense", total=total)
        for length in args.lengths:
            draw = Drawing(EVALUATION_SEED + length, args.device)
            prompts[length] = [
                PLANTED[kind](draw, length, args.tokens) for kind in args.prompts for _ in range(args.samples)
            ]
            dense[length] = []
            for prompt in prompts[length]:
                dense[length].append(generated(model, prompt.tokens, args.tokens, dense_pieces(model, length)))
                progress.advance(task)
        for graph in args.graphs:
            torch._dynamo.reset()
            modules: dict[int, nn.Module] = {}  # by budget: lengths share their graphs
            task = progress.add_task(graph, total=total)
            for length in args.lengths:
                budget = args.budget if args.budget < length else length // 8
                options = {"budget": budget, "graph": graph, "deterministic": True, "min_context": 0}
                options |= {"mean_size": args.mean_size} if args.mean_size else {}
                if budget not in modules:
                    modules[budget] = torch.compile(model, backend="communitykv", options=options)
                try:
                    found = compare(
                        modules[budget],
                        prompts[length],
                        options,
                        dense[length],
                        lambda task=task: progress.advance(task),
                    )
                except Exception as error:  # the other cells are measured and written before this is raised
                    errors.append(f"{graph}, {length} tokens: {type(error).__name__}: {error}")
                    continue
                rows += [{"family": family, "graph": graph, "budget": budget, **row} for row in found]
                for kind in args.prompts:
                    mine = [row for row in found if row["kind"] == kind]
                    stem = f"retrieval_{family}_{graph}_{kind}_{length}_b{budget}"
                    stem += f"_m{args.mean_size}" if args.mean_size else ""
                    claims[f"{stem}_tokens_equal_least"] = min(row["equal"] for row in mine)
                    right = sum(row["correct"] for row in mine) / max(1, sum(row["dense_correct"] for row in mine))
                    claims[f"{stem}_correct_over_dense"] = round(right, 4)
    table = Table(
        "prompt", "length", "graph", "budget", "equal to dense", "planted: ours", "planted: dense", "attended"
    )
    for row in rows:
        table.add_row(
            row["kind"], str(row["length"]), row["graph"], str(row["budget"]), f"{row['equal']} of {row['tokens']}",
            f"{row['correct']} of {row['tokens']}", f"{row['dense_correct']} of {row['tokens']}",
            f"{row['attended_share']:.1%} of {row['sparse_steps']} sparse steps",
        )  # fmt: skip
    console.print(table)
    path = write_results(
        "retrieval_model",
        rows,
        claims,
        device=args.device,
        label=f"evaluate-{family}",
        folder=args.out,
        dtype=args.dtype,
        errors=errors,
    )
    console.print(f"wrote {path}")
    if errors:
        raise SystemExit("\n".join(errors))
    return rows


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device)
    parser.add_argument("--family", default="llama", choices=FAMILIES)
    parser.add_argument("--out", type=Path, default=Path("build/retrieval"), help="folder of weights and JSON")
    parser.add_argument("--seconds", type=float, default=240.0, help="training stops then")
    parser.add_argument("--go-on", type=Path, metavar="FOLDER", help="begin with the weights of an earlier training")
    parser.add_argument("--small", action="store_true", help="a smaller model, up to 512 tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="torch's threads on the CPU")
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate of AdamW")
    parser.add_argument("--matrix-rate", type=float, default=0.03, help="peak learning rate of Muon")
    parser.add_argument("--compile", action="store_true", help="train a compiled model: half a minute to begin with")
    parser.add_argument("--evaluate", type=Path, help="folder of a trained model: compare generations, train nothing")
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192, 32768], help="tokens of the prompts")
    parser.add_argument("--tokens", type=int, default=200, help="greedy tokens that are compared")
    parser.add_argument("--samples", type=int, default=4, help="prompts of a kind")
    parser.add_argument("--prompts", nargs="+", default=["passage", "chain"], choices=("passage", "chain"))
    parser.add_argument("--graphs", nargs="+", default=["keys", "attention"], choices=("keys", "attention", "mixed"))
    parser.add_argument("--budget", type=int, default=4096, help="1/8 of prompts that are not longer than it")
    parser.add_argument("--mean-size", type=int, help="of communities, where it is not the default")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    args = parser.parse_args(argv)
    args.dtype = args.dtype or ("bfloat16" if args.device.startswith("cuda") else "float32")
    if args.seconds <= 0:
        parser.error(f"--seconds must be positive, got {args.seconds}")
    return args


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.evaluate:
        run_evaluation(args, Console())
    else:
        run_training(args, Console())


if __name__ == "__main__":
    main()
