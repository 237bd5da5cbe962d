"""SmolLM2-135M answers a question about a long document, twice: densely, and through communities of tokens.

    python -m ckv_compile.demo [--device cuda] [--context 4352] [--tokens 64] [--budget 544]

The document is the description that the package transformers ships. "Dense" is the plain model, run eagerly; the other
run is the same model under ``torch.compile(model, backend="communitykv")``, which retrieves 1/8 of the context for
every token.
On a CPU the operators are their plain PyTorch references: what is read shrinks, the time of a step does not.
"""

from __future__ import annotations

import argparse
import contextlib
import time
import warnings
from collections.abc import Iterator
from importlib.metadata import metadata

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import TextStreamer

import ckv_compile
from ckv_compile.ops import submit_partition
from ckv_compile.runtime.registry import REGISTRY
from ckv_compile.smollm2 import load_smollm2

QUESTION = "What is the Pipeline, and what does it support?"


class TimedStreamer(TextStreamer):
    """Prints the text as it is generated and notes when each token came; ``ready`` runs before the first is printed."""

    def __init__(self, tokenizer, ready) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.times: list[float] = []
        self.ready = ready

    def put(self, value: torch.Tensor) -> None:
        if self.next_tokens_are_prompt:
            self.began = time.perf_counter()
        else:
            self.times.append(time.perf_counter())
            if len(self.times) == 1:
                self.ready()
                self.decoding = time.perf_counter()
        super().put(value)

    def prefill_seconds(self) -> float:
        return self.times[0] - self.began

    def tokens_per_second(self) -> float:
        return (len(self.times) - 1) / (self.times[-1] - self.decoding)


def question_about(document: str, tokenizer, context: int, question: str) -> torch.Tensor:
    """Token ids [1, about ``context``] of the start of the document and a question, in the model's chat format."""

    def chat(text: str) -> list[int]:
        messages = [{"role": "user", "content": f"{text}\n\n{question}"}]
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    room = context - len(chat(""))
    return torch.tensor([chat(tokenizer.decode(tokenizer(document)["input_ids"][:room]))])


@contextlib.contextmanager
def layers_counted(model, progress: Progress, task: TaskID) -> Iterator[None]:
    """Advance ``task`` with every decoder layer of an eager prefill."""
    hooks = [layer.register_forward_hook(lambda *_: progress.advance(task)) for layer in model.model.layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def submissions_counted(progress: Progress, task: TaskID) -> Iterator[None]:
    """Advance ``task`` with every layer whose keys a compiled prefill hands to the partition."""

    previous = submit_partition.set_handler(None)

    def handler(*arguments) -> None:
        if previous is not None:
            previous(*arguments)
        progress.advance(task)

    submit_partition.set_handler(handler)
    try:
        yield
    finally:
        submit_partition.set_handler(previous)


def wait_for_index(length: int, layers: int, progress: Progress, task: TaskID) -> None:
    """Until every layer's communities are published, so that all decode steps are sparse."""
    (sequence,) = [sequence for sequence in REGISTRY.sequences() if sequence.length == length]
    while (indexed := sequence.indexed_layers()) < layers:
        progress.update(task, completed=indexed)
        time.sleep(0.02)
        sequence.publish()
    progress.update(task, completed=layers)


def generate(model, inputs: torch.Tensor, tokens: int, streamer: TextStreamer | None = None):
    """Greedy ``transformers`` generation: nothing here knows of the backend."""
    return model.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=tokens, do_sample=False, streamer=streamer,
        return_dict_in_generate=True,
    )  # fmt: skip


def dense_choices(model, cache, length: int, tokens: torch.Tensor) -> torch.Tensor:
    """What the dense model would say after each of ``tokens`` [1, n], given its cache of the prompt."""
    cache.crop(length - cache.get_seq_length())
    return model(tokens, past_key_values=cache).logits[0].argmax(-1)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--context", type=int, default=4352, help="tokens of document and question")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of the answer")
    parser.add_argument("--budget", type=int, help="tokens that a step may attend to: 1/8 of the context")
    parser.add_argument("--question", default=QUESTION)
    return parser.parse_args(argv)


@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    warnings.filterwarnings("ignore", category=FutureWarning)
    console = Console()
    with console.status("loading SmolLM2-135M"):
        dtype = torch.bfloat16 if args.device.startswith("cuda") else torch.float32
        tokenizer, model = load_smollm2(args.device, dtype)
    document = metadata("transformers")["Description"]
    inputs = question_about(document.strip(), tokenizer, args.context, args.question).to(args.device)
    length, layers = inputs.shape[1], model.config.num_hidden_layers
    budget = args.budget or length // 8
    columns = TextColumn("{task.description:<9}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    console.print(f"[bold]{length:,} tokens: the description of the package transformers, and a question[/bold]")
    console.print(args.question)

    console.rule("dense: the plain model, eager")
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("prefill", total=layers)
        dense_stream = TimedStreamer(tokenizer, progress.stop)
        with layers_counted(model, progress, task):
            dense = generate(model, inputs, args.tokens, dense_stream)

    compiled = torch.compile(model, backend="communitykv", options={"budget": budget})
    began = time.perf_counter()
    with console.status("compiling the prefill and the decode step, once per model"):
        generate(compiled, inputs, 3)
    compile_seconds = time.perf_counter() - began
    before = ckv_compile.explain(compiled, show=False)

    console.rule(f"through communities: at most {budget} of {length:,} tokens a step")
    with Progress(*columns, console=console) as progress:
        prefill = progress.add_task("prefill", total=layers)
        partition = progress.add_task("partition", total=layers)

        def ready() -> None:
            wait_for_index(length, layers, progress, partition)
            progress.stop()

        our_stream = TimedStreamer(tokenizer, ready)
        with submissions_counted(progress, prefill):
            ours = generate(compiled, inputs, args.tokens, our_stream)

    answer = ours.sequences[:, length:]
    equal = (answer[0, : dense.sequences.shape[1] - length] == dense.sequences[0, length:][: answer.shape[1]]).long()
    choices = dense_choices(model, dense.past_key_values, length, answer[:, :-1])
    after = ckv_compile.explain(compiled, show=False)
    steps = after.decode_steps - before.decode_steps
    lists = steps * layers * model.config.num_key_value_heads  # token lists that were read
    read = (after.tokens_attended - before.tokens_attended) / lists
    context = (after.tokens_in_context - before.tokens_in_context) / lists
    seconds = after.partition_seconds - before.partition_seconds

    table = Table("", "dense", "communities", title=f"{args.device}, {torch.get_num_threads()} threads")
    table.add_row("prefill", f"{dense_stream.prefill_seconds():.1f} s", f"{our_stream.prefill_seconds():.1f} s")
    table.add_row("compilation", "", f"{compile_seconds - our_stream.prefill_seconds():.1f} s, once")
    table.add_row("decode", *(f"{stream.tokens_per_second():.1f} tokens/s" for stream in (dense_stream, our_stream)))
    table.add_row("tokens read per step", f"{context:,.0f}", f"{read:,.0f}")
    table.add_row("equal to dense before the first difference", "", f"{int(equal.cumprod(0).sum())} of {len(equal)}")
    table.add_row("dense would have said the same", "", f"{int((choices == answer[0, 1:]).sum())} of {len(choices)}")
    table.add_row("sparse steps", "", f"{after.sparse_steps - before.sparse_steps} of {steps}")
    found = after.communities - before.communities
    sizes = f"mean size {after.mean_community_size:.1f}, largest {after.largest_community}"
    table.add_row("communities", "", f"{found:,} in {lists // max(1, steps)} graphs, {sizes}")
    table.add_row("partition", "", f"{seconds:.1f} CPU seconds, beside the model")
    console.print(table)


if __name__ == "__main__":
    main()
