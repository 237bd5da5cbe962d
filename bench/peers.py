"""Other ways to decode long contexts beside ours, each where its package is installed: kvpress, flash-attn, flashinfer.

    python -m bench.peers                                 # one layer and whole generations on a GPU, quality of SmolLM2
    python -m bench.peers --what layer
    python -m bench.peers --what quality --device cpu     # a few minutes
    python -m bench.peers --small --device cpu            # does it run?

``layer``: decode attention of one layer of Qwen3-8B's shape, batch 1, over ``--context`` tokens. Ours appends the new
token, routes, retrieves and attends to a budget of 4,096; flash-attn (``flash_attn_with_kvcache``), flashinfer (batch
decode over pages of 16 tokens) and torch's kernels attend to everything. Arms take turns, several layers a call.

``generate``: whole requests over a random Qwen3-8B: transformers as it is, ours, and kvpress's presses, which drop all but
``--budget`` tokens of the prompt once it is read. Every arm but ours is a greedy loop that passes positions, as kvpress's
own pipeline does; ours is ``generate``.

``quality``: SmolLM2-135M reads ``--prompt`` tokens of a text that every bench knows and is then given the text's own next
tokens, one at a time: how often its best guess is that of the dense model, and the divergence from it. Presses keep
``--budget`` tokens of the prompt and every later one; ours attends to that many, later ones included.

A package that is not installed, or that does not run, is a row that says so. kvpress 0.5 asks for older versions of
transformers; its presses are called through hooks of this bench, which pass what they read by the names they know.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import importlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import ckv_compile
from bench.decode_layer import DecodeAttention, DecodeCache, dense_forms, random_slab
from bench.dense_step import SHAPES, cache_argument, random_model
from bench.results_file import version_of, write_results
from bench.timing import capture, interleaved, synchronize, timing
from ckv_compile.config import CommunityConfig
from ckv_compile.passes.rewrite_plan import AttentionGeometry

PACKAGES = {"kvpress": "kvpress", "flash_attn": "flash-attn", "flashinfer": "flashinfer-python"}  # module -> package
PRESSES = ("SnapKVPress", "ExpectedAttentionPress", "TOVAPress", "KnormPress", "StreamingLLMPress")
PAGE = 16  # tokens
WORKSPACE = 256 << 20  # bytes that flashinfer is given
TEXTS = ("python", "prose")
Row = dict[str, Any]


def installed(module: str) -> Any:
    """The module, or the reason for which it cannot be had."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        return "not installed" if error.name == module else f"needs {error.name}, which is not installed"
    except Exception as error:  # built for another torch, or no GPU
        return f"does not import: {type(error).__name__}: {str(error)[:200]}"


def absent(what: str, arm: str, reason: str, **more: Any) -> Row:
    return {"kind": what, "arm": arm, "error": reason, **more}


def reason_of(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


# ---------------------------------------------------------------------- one layer


def layer_rows(args: argparse.Namespace, console: Console) -> list[Row]:
    """Rows of one layer's decode attention."""
    heads, kv_heads, dim, layers = (4, 2, 16, 2) if args.small else (32, 8, 128, 4)
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device(args.device)
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    geometry = AttentionGeometry(layers, heads, kv_heads, dim, dtype, device)
    config = CommunityConfig(
        **({"budget": 96, "block_size": 256, "append_block": 64, "recent_window": 16} if args.small else {})
    )
    context = args.context
    cache = DecodeCache(config, geometry, 1, random_slab(geometry, 1, context + 2048))
    cache.index(context - 1, max(context - 1 - 256, context // 2), config.mean_size)
    step = DecodeAttention(config, geometry, 1)
    queries = [step.query(layer) for layer in range(layers)]  # [1, Hq, 1, D]
    tensors = cache.contiguous(context)
    pairs = list(zip(tensors[::2], tensors[1::2], strict=True))  # [1, Hkv, n, D]
    arms: dict[str, Callable] = {}
    before: dict[str, Callable] = {}
    rows: list[Row] = []
    expected = [dense_of(args.device)(query, *pair) for query, pair in zip(queries, pairs, strict=True)]

    def add(name: str, make: Callable[[], Callable], reset: Callable | None = None, *, exact: bool = True) -> None:
        """make: gives a call that attends in all layers and returns their outputs, as [.., Hq, D] each."""
        try:
            call = make()
            error = distance(call(), expected) if exact else None
            if error is not None and error > 2e-2:
                raise ValueError(f"its output is {error:.2g} away from torch's")
            try:
                arms[name] = capture(call, args.device)
            except Exception as failed:  # some plan on the host
                synchronize(args.device)
                console.print(f"{name} runs without a CUDA graph: {reason_of(failed)}", markup=False)
                arms[name] = call
            if reset is not None:
                before[name] = reset
        except Exception as failed:
            rows.append(absent("layer", name, reason_of(failed), context=context))

    restore, whole = cache.saver(), step.compile(interpret=args.interpret)
    arguments = step.arguments(whole, cache)
    add("ours", lambda: lambda: whole.function(*arguments), restore, exact=False)
    for name, form in dense_forms(args.device).items():
        add(name, lambda form=form: lambda: [form(query, *pair) for query, pair in zip(queries, pairs, strict=True)])
    for module, make in (("flash_attn", flash_attention), ("flashinfer", flash_infer)):
        found = installed(module)
        if isinstance(found, str):
            rows.append(absent("layer", PACKAGES[module], found, context=context))
            continue
        for name, build in make(found, queries, tensors).items():
            add(name, build)
    restore()
    for name, values in interleaved(arms, args.repetitions, args.device, before=before).items():
        rows.append({"kind": "layer", "arm": name, "context": context, **timing([ms / layers for ms in values])})
    return rows


def dense_of(device: str) -> Callable:
    """One query over everything, by a kernel of torch that any device has."""
    from torch.nn.functional import scaled_dot_product_attention

    return lambda query, key, value: scaled_dot_product_attention(query, key, value, enable_gqa=True)


def distance(outputs: Any, expected: list[Tensor]) -> float:
    """Largest relative L2 distance of a layer's output."""
    return max(
        float((out.reshape(-1).double() - right.reshape(-1).double()).norm() / right.double().norm())
        for out, right in zip(outputs, expected, strict=True)
    )


def token_major(tensors: list[Tensor]) -> list[Tensor]:
    """K and V ``[1, H, n, D]`` as ``[1, n, H, D]``, contiguous."""
    return [tensor.transpose(1, 2).contiguous() for tensor in tensors]


def flash_attention(module: Any, queries: list[Tensor], tensors: list[Tensor]) -> dict[str, Callable]:
    """Calls of flash-attn's decode kernel over contiguous caches."""

    def build() -> Callable:
        caches = token_major(tensors)
        lengths = torch.full((1,), caches[0].shape[1], dtype=torch.int32, device=caches[0].device)
        turned = [query.transpose(1, 2) for query in queries]

        def call() -> list[Tensor]:
            return [
                module.flash_attn_with_kvcache(query, key, value, cache_seqlens=lengths, causal=True)
                for query, key, value in zip(turned, caches[::2], caches[1::2], strict=True)
            ]

        return call

    return {"flash-attn": build}


def flash_infer(module: Any, queries: list[Tensor], tensors: list[Tensor]) -> dict[str, Callable]:
    """Calls of flashinfer's batch decode over a paged cache, with and without tensor cores."""

    def build(tensor_cores: bool) -> Callable:
        (_, heads, _, dim), (_, kv_heads, tokens, _) = queries[0].shape, tensors[0].shape
        device, dtype = queries[0].device, queries[0].dtype
        if tokens % PAGE:
            raise ValueError(f"the context must be a multiple of {PAGE} tokens, got {tokens}")
        caches = token_major(tensors)
        pages = [
            torch.stack([cache.view(tokens // PAGE, PAGE, kv_heads, dim) for cache in pair], 1)
            for pair in zip(caches[::2], caches[1::2], strict=True)
        ]  # [pages, 2, PAGE, Hkv, D]
        indices = torch.arange(tokens // PAGE, dtype=torch.int32, device=device)
        bounds = torch.tensor([0, tokens // PAGE], dtype=torch.int32, device=device)
        last = torch.tensor([PAGE], dtype=torch.int32, device=device)
        wrapper = module.BatchDecodeWithPagedKVCacheWrapper(
            torch.zeros(WORKSPACE, dtype=torch.uint8, device=device), "NHD", use_cuda_graph=True,
            use_tensor_cores=tensor_cores, paged_kv_indptr_buffer=bounds.clone(), paged_kv_indices_buffer=indices.clone(),
            paged_kv_last_page_len_buffer=last.clone(),
        )  # fmt: skip
        wrapper.plan(
            bounds,
            indices,
            last,
            heads,
            kv_heads,
            dim,
            PAGE,
            pos_encoding_mode="NONE",
            data_type=dtype,
            q_data_type=dtype,
        )
        flat = [query[:, :, 0] for query in queries]
        return lambda: [wrapper.run(query, cache) for query, cache in zip(flat, pages, strict=True)]

    return {
        "flashinfer": lambda: build(tensor_cores=False),
        "flashinfer, tensor cores": lambda: build(tensor_cores=True),
    }


# ---------------------------------------------------------------------- presses of kvpress


@contextlib.contextmanager
def pressed(press: Any, model: torch.nn.Module) -> Iterator[None]:
    """Compresses the cache of a prompt that the model reads inside, layer by layer, as kvpress's own hooks do.

    Those look for arguments by the names of older versions of transformers.
    """
    press.post_init_from_model(model)
    hooks, inner = [], model.model

    def hook(module: Any, args: tuple, kwargs: dict, output: Any) -> Any:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        cache = kwargs["cache"] if kwargs.get("cache") is not None else kwargs.get("past_key_values")
        if hidden.shape[1] > 1:
            layer = cache.layers[module.layer_idx]
            given = {**kwargs, "hidden_states": hidden, "past_key_values": cache}
            given["cache_position"] = torch.arange(hidden.shape[1], device=hidden.device)
            layer.keys, layer.values = press.compress(module, hidden, layer.keys, layer.values, output[1], given)
        return output

    try:
        for layer in inner.layers:
            layer.self_attn.rotary_emb = inner.rotary_emb
            hooks.append(layer.self_attn.register_forward_hook(hook, with_kwargs=True))
        yield
    finally:
        for one in hooks:
            one.remove()
        for layer in inner.layers:
            del layer.self_attn.rotary_emb


def presses(budget: int, tokens: int) -> dict[str, Any]:
    """Name -> press that keeps ``budget`` of so many tokens, or why it cannot be had."""
    module = installed("kvpress")
    if isinstance(module, str):
        return {"kvpress": module}
    found = {}
    for name in PRESSES:
        try:
            found[name.removesuffix("Press")] = getattr(module, name)(compression_ratio=max(0.0, 1 - budget / tokens))
        except Exception as error:
            found[name.removesuffix("Press")] = reason_of(error)
    return found


class Loop:
    """A model that reads a prompt and then one token at a time, at the positions that the tokens have in the text."""

    def __init__(self, model: Any) -> None:
        self.model, self.cache, self.read = model, None, 0
        self.name = cache_argument(getattr(model, "_orig_mod", model))

    @torch.no_grad()
    def __call__(self, ids: Tensor, **more: Any) -> Tensor:
        """Logits [V] after the last of the tokens [1, n]."""
        positions = torch.arange(self.read, self.read + ids.shape[1], device=ids.device)[None]
        cache = {self.name: self.cache} if self.cache is not None else {}
        out = self.model(input_ids=ids, position_ids=positions, use_cache=True, logits_to_keep=1, **cache, **more)
        self.cache, self.read = out[self.name], self.read + ids.shape[1]
        return out.logits[0, -1]


# ---------------------------------------------------------------------- whole requests


def generate_rows(args: argparse.Namespace, console: Console) -> list[Row]:
    """Seconds of the prefill and ms of a later token, of every press, of transformers alone, and of ours."""
    shape = SHAPES["tiny" if args.small else "qwen3-8b"]
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    model = random_model(shape, None, dtype, args.device)
    ids = torch.randint(2, shape.vocab, (1, args.context), device=args.device)
    rows: list[Row] = []
    arms = {"transformers": None, **presses(args.budget, args.context)}
    for name, press in arms.items():
        console.print(f"generate: {name}")
        if isinstance(press, str):
            rows.append(absent("generate", name, press, context=args.context))
            continue
        try:
            found = loop_times(model, press, ids, args)
            rows.append({"kind": "generate", "arm": name, "context": args.context, "budget": args.budget, **found})
        except Exception as error:
            rows.append(absent("generate", name, reason_of(error), context=args.context))
        gc.collect()
    if not args.small:  # its tests are those of other benches
        rows.append(our_generation(model, args))
    return rows


def loop_times(model: Any, press: Any, ids: Tensor, args: argparse.Namespace) -> Row:
    if args.device.startswith("cuda"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    loop = Loop(model)
    synchronize(args.device)
    began = time.perf_counter()
    with pressed(press, model) if press is not None else contextlib.nullcontext():
        token = loop(ids).argmax()[None, None]
    synchronize(args.device)
    prefill, times = time.perf_counter() - began, []
    kept = loop.cache.layers[0].keys.shape[2]
    for _ in range(4):
        token = loop(token).argmax()[None, None]
    for _ in range(3):
        synchronize(args.device)
        began = time.perf_counter()
        for _ in range(args.tokens):
            token = loop(token).argmax()[None, None]
        synchronize(args.device)
        times.append((time.perf_counter() - began) * 1e3 / args.tokens)
    peak = torch.cuda.max_memory_allocated() / 2**30 if args.device.startswith("cuda") else None
    return {"prefill_s": prefill, "kept": kept, "peak_gib": peak, **timing(times)}


def our_generation(model: Any, args: argparse.Namespace) -> Row:
    from bench.whole_model import ModelBench

    own = copy.copy(args)
    own.model, own.layers, own.graph, own.segments, own.wait_index, own.wait_seconds = (
        "qwen3-8b",
        None,
        "keys",
        3,
        True,
        60,
    )
    own.new_tokens = 3 * args.tokens + 8
    try:
        bench = ModelBench(own, Console(width=120), model, budget=args.budget)
        for tokens in (args.budget + 512, args.budget + 1024):
            bench.compiled.generate(**bench.prompt(tokens), max_new_tokens=4, do_sample=False)
        found = bench.generation(bench.compiled, args.context)
        return {"kind": "generate", "arm": "ours", "context": args.context, "budget": args.budget, **found}
    except Exception as error:
        return absent("generate", "ours", reason_of(error), context=args.context)


# ---------------------------------------------------------------------- quality


def quality_rows(args: argparse.Namespace, console: Console) -> list[Row]:
    """Teacher-forced agreement with dense of SmolLM2, of every press and of ours, at equal budget."""
    from bench.texts import frozen_text
    from ckv_compile.smollm2 import load_smollm2

    tokenizer, model = load_smollm2(args.device)
    rows: list[Row] = []
    for text in args.texts:
        ids = torch.tensor([frozen_text(text, tokenizer)[: args.prompt + args.forced]], device=args.device)
        dense = forced(model, ids, args.prompt)
        found = presses(args.budget, args.prompt)
        arms: dict[str, Any] = {"communities, keys": "keys", "communities, attention": "attention", **found}
        for name, arm in track(arms.items(), f"quality, {text}", console=console):
            try:
                if name.startswith("communities"):
                    logits = forced(communities(model, arm, args), ids, args.prompt)
                elif isinstance(arm, str):
                    rows.append(absent("quality", name, arm, text=text))
                    continue
                else:
                    logits = forced(model, ids, args.prompt, arm)
            except Exception as error:
                rows.append(absent("quality", name, reason_of(error), text=text))
                continue
            rows.append({
                "kind": "quality", "arm": name, "text": text, "prompt": args.prompt, "tokens": len(dense),
                "budget": args.budget, **agreement(dense, logits),
            })  # fmt: skip
    return rows


def forced(model: Any, ids: Tensor, prompt: int, press: Any = None) -> Tensor:
    """Logits [tokens, V] after the prompt's last token but one, its last, and every later one but the text's last.

    The prompt's last token is given alone, as a decode step: all arms then predict what follows it.
    """
    loop = Loop(model)
    with pressed(press, model) if press is not None else contextlib.nullcontext():
        loop(ids[:, : prompt - 1])
    return torch.stack([loop(ids[:, place : place + 1]).float() for place in range(prompt - 1, ids.shape[1] - 1)])


def communities(model: Any, graph: str, args: argparse.Namespace) -> Any:
    torch._dynamo.reset()
    options = {"graph": graph, "budget": args.budget, "min_context": 0, "deterministic": True}
    return torch.compile(model, backend="communitykv", options=options)


def agreement(dense: Tensor, other: Tensor) -> Row:
    """top1: share of the tokens with the same best guess. kl: mean divergence from dense, nats."""
    right, left = dense.log_softmax(-1), other.log_softmax(-1)
    return {
        "top1": float((dense.argmax(-1) == other.argmax(-1)).float().mean()),
        "kl": float((right.exp() * (right - left)).sum(-1).mean()),
    }


# ---------------------------------------------------------------------- claims and output


def claims_of(rows: list[Row]) -> dict[str, float]:
    claims: dict[str, float] = {}
    for kind in ("layer", "generate"):
        own = {row["arm"]: row for row in rows if row["kind"] == kind and "median_ms" in row}
        for arm, row in own.items():
            if arm != "ours" and "ours" in own:
                claims[f"peer_{kind}_over_ours_{slug(arm)}"] = row["median_ms"] / own["ours"]["median_ms"]
    for row in rows:
        if row["kind"] == "quality" and "top1" in row:
            for measure in ("top1", "kl"):
                claims[f"peer_{measure}_{slug(row['arm'])}_{row['text']}_b{row['budget']}"] = row[measure]
    return claims


def slug(name: str) -> str:
    return name.lower().replace(", ", "_").replace(" ", "_").replace("-", "_")


def show(rows: list[Row], console: Console) -> None:
    table = Table("what", "arm", "where", "ms", "prefill s", "peak GiB", "top-1", "KL", "")
    for row in rows:
        shown = [f"{row[name]:{form}}" if row.get(name) is not None else "" for name, form in (
            ("median_ms", ".4f"), ("prefill_s", ".2f"), ("peak_gib", ".1f"), ("top1", ".3f"), ("kl", ".4f"),
        )]  # fmt: skip
        where = str(row.get("text", row.get("context", "")))
        table.add_row(row["kind"], row["arm"], where, *shown, row.get("error", "")[:60])
    console.print(table)


def arguments_of(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = ("layer", "generate", "quality")
    parser.add_argument("--what", nargs="+", default=list(kinds), choices=kinds)
    parser.add_argument("--context", type=int, default=131072, help="of layer and generate, in tokens")
    parser.add_argument("--budget", type=int, help="tokens; 4096, and 256 for quality")
    parser.add_argument("--tokens", type=int, default=32, help="that generate times, three times")
    parser.add_argument("--texts", nargs="+", default=list(TEXTS), choices=TEXTS)
    parser.add_argument("--prompt", type=int, default=4096, help="tokens that quality reads at once")
    parser.add_argument("--forced", type=int, default=128, help="tokens that quality gives one at a time")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--interpret", action="store_true", help="run the graphs node by node, without Inductor")
    parser.add_argument("--small", action="store_true", help="tiny shapes, to see that every part runs")
    parser.add_argument("--out", type=Path, help="folder of the result file")
    args = parser.parse_args(argv)
    args.asked_budget = args.budget
    if args.small:
        args.context, args.tokens, args.prompt, args.forced, args.texts = 640, 4, 320, 6, args.texts[:1]
        args.repetitions, args.asked_budget = min(3, args.repetitions), args.budget or 96
    return args


def main(argv: list[str] | None = None) -> dict[str, float]:
    args = arguments_of(argv)
    console = Console(width=None if Console().is_terminal else 160)
    transformers.logging.set_verbosity_error()
    if args.interpret:
        ckv_compile.backend._compile = lambda gm, *_, **__: gm.forward
    rows: list[Row] = []
    path = None
    measured = {"layer": layer_rows, "generate": generate_rows, "quality": quality_rows}
    for what in args.what:
        args.budget = args.asked_budget or (256 if what == "quality" else 4096)
        try:
            with torch.no_grad():
                rows += measured[what](args, console)
        except Exception as error:
            rows.append(absent(what, "all of them", reason_of(error)))
        if path is not None:
            path.unlink()
        peers = {package: version_of(package) for package in PACKAGES.values()}
        path = write_results("peers", rows, claims_of(rows), device=args.device, folder=args.out, peers=peers)
    show(rows, console)
    console.print(f"wrote {path}")
    return claims_of(rows)


if __name__ == "__main__":
    main()
