"""Ablations of the method: one factor at a time around the defaults, at equal budget (paper, section 4.4 and tables 6, 7).

SmolLM2-135M over Python source and English prose. The texts for choosing are those known by their hash, on which the
defaults were chosen; the held-out ones are files of the standard library and pydoc's topics, drawn by a seed that nothing
was chosen on (``bench/texts.py``). Each gives two prompts of 4,096 tokens. A budget of 1/16 of the context counts every
attended token, and the rest is the backend's defaults. The runtime's own publications and operators run a layer at a time.

    recall   share of the softmax over all keys that lies on the attended tokens; mean over heads and layers, by step
    error    |ours - dense| / |dense| of attention's output, per head; the same means
    top-1    tokens whose most probable next token is that of the dense model, with every layer sparse; Wilson's interval
    KL       of the dense prediction to ours, nats, by token
    Q        modularity (eq. 5) at gamma 1 of the prompt's partition, so that resolutions compare
    seconds  to make the index of a layer of one prompt, without the attention lists that a prefill makes; a busy machine

Recall and error are those of the dense model's queries: in the setting "prompt" at every fourth of 64 steps behind the
prompt, in "stream" at every 32nd of 1,024 (for what matters only as tokens follow: cadences, appending). "layer 0" looks
at that layer alone. Differences from the default are paired by step or token. Intervals are 95 %, by bootstrap; none of
them knows that neighbouring steps depend on each other.

What is no option of the backend is an experiment of ``bench/ablation_arms.py``: leading positions in the graph, self-ties,
lists of the mean query, components and neighborhoods of the attention graph, another graph in layer 0. ``topk`` is left
out: on a CPU "fast" lists are the exact ones (``bench.topk_prefill`` has what they miss on a GPU).

    python -m bench.ablations                                    # hours on one core: run families side by side
    python -m bench.ablations --families keys --predictions off  # recall and error alone; "only": predictions alone
    python -m bench.ablations --factors kappa lam --texts held_out
    python -m bench.ablations --merge FILE FILE                  # one file from runs of other arms, texts or layers
    python -m bench.ablations --small                            # a tiny random model on one short prompt
    python -m bench.ablations --plot FILE
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from bench import texts
from bench.ablation_arms import Arm, arms_of, strongest_neighbors
from bench.capture import capture, causal_top
from bench.policies import log_probabilities, with_attention
from bench.quality import bootstrap, summary
from bench.recall import assign, compared
from bench.results_file import draw, read_runs, rounded, rows_and_texts, write_results
from ckv_compile.community import partition as partitions
from ckv_compile.community.graph import attention_graph, key_graph
from ckv_compile.community.leiden import modularity
from ckv_compile.community.partition import warm_up
from ckv_compile.config import CommunityConfig
from ckv_compile.index_layout import assigns_tokens
from ckv_compile.policies import TokenPolicy, policy_of
from ckv_compile.runtime.sequence import Sequence
from ckv_compile.smollm2 import load_smollm2
from ckv_compile.testing import attend_step, bare_sequence, retrieve_step

FAMILIES = {"attention": {"graph": "attention", "mean_size": 16}, "keys": {"graph": "keys", "mean_size": 8}}
ROLES = ("choosing", "held_out")
KINDS = ("python", "prose")
STREAM_EVERY = 2  # layers whose recall is measured while tokens follow, of those whose recall is measured at all
MEASURES = ("recall", "error")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Tokens of a prompt, predicted behind it, and streamed; steps from one that is measured to the next."""

    context: int = 4096
    window: int = 64
    streamed: int = 1024
    every: int = 4
    stream_every: int = 32
    share: int = 16

    @property
    def total(self) -> int:
        return self.context + self.window

    @property
    def budget(self) -> int:
        return self.context // self.share


SMALL = Sizes(context=512, window=16, streamed=64, every=8, stream_every=32, share=3)


@dataclasses.dataclass
class Prompts:
    """What the dense model made of B texts of equal length n, and where each is from: ``origins`` (role, kind, number).

    keys, values: [L, B, Hkv, n, D], of which the window behind the context is that of the latest run; new_keys and
    new_values hold the dense one. queries: [L, B, Hq, n, D]. log_probs: [B, window, V].
    """

    origins: list[tuple[str, str, int]]
    tokens: Tensor
    sizes: Sizes
    keys: Tensor
    values: Tensor
    queries: Tensor
    scale: float
    log_probs: Tensor
    new_keys: Tensor
    new_values: Tensor
    widest: int = 8  # neighbours of a list that are kept, at least
    kept_lists: dict[tuple[str, int], tuple[Tensor, Tensor]] = dataclasses.field(default_factory=dict)

    @property
    def group_size(self) -> int:
        return self.queries.shape[2] // self.keys.shape[2]

    def restore(self) -> None:
        """The window's keys and values are those of the dense run again."""
        context = self.sizes.context
        self.keys[:, :, :, context:], self.values[:, :, :, context:] = self.new_keys, self.new_values

    def lists(self, layer: int, kind: str, kappa: int) -> tuple[Tensor, Tensor]:
        """Lists of attention of all tokens, strongest first: int32 and float32 [B, H, n, kappa]. kind: as an ``Arm`` has."""
        kept = self.kept_lists.get((kind, layer))
        if kept is None or kept[0].shape[3] < kappa:
            query = self.queries[layer]
            if kind == "pooled":
                query = query.unflatten(1, (-1, self.group_size)).mean(2)
            sinks = 0 if kind == "sinks" else CommunityConfig.num_sink_tokens
            wide = max(kappa, self.widest if kind == "heads" else 0)
            found = [
                causal_top(query[row], self.keys[layer, row], self.scale, wide, sinks) for row in range(len(query))
            ]
            ids, alphas = (torch.stack(parts) for parts in zip(*found, strict=True))
            kept = self.kept_lists[kind, layer] = ids, alphas
        ids, alphas = (one[..., :kappa].contiguous() for one in kept)
        return ids, alphas


@torch.inference_mode()
def read_prompts(
    model, rows: list[list[int]], origins: list[tuple[str, str, int]], sizes: Sizes, advance: Callable[[], object]
) -> Prompts:
    captured = [capture(model, row, lists=False, outputs=True, advance=advance) for row in rows]
    keys, values, queries = (
        torch.cat([getattr(one, name) for one in captured], 1) for name in ("keys", "values", "queries")
    )
    context = sizes.context
    log_probs = torch.cat([log_probabilities(model, one.hidden[:, context:]) for one in captured])
    return Prompts(
        origins, torch.tensor(rows), sizes, keys, values, queries, captured[0].scale, log_probs,
        keys[:, :, :, context:].clone(), values[:, :, :, context:].clone(),
    )  # fmt: skip


def kept_prompts(
    model, rows: list[list[int]], origins: list[tuple[str, str, int]], sizes: Sizes, kept: Path | None,
    advance: Callable[[], object],
) -> Prompts:  # fmt: skip
    """``read_prompts``, or what the file ``kept`` holds of it; written where there is none."""
    if kept and kept.exists():
        prompts = torch.load(kept, weights_only=False, mmap=True)
        same = prompts.origins == origins and dataclasses.astuple(prompts.sizes) == dataclasses.astuple(sizes)
        if not same or prompts.tokens.tolist() != rows:
            raise ValueError(f"{kept} must hold a run over the same texts and sizes; remove it or name another file")
        return prompts
    prompts = read_prompts(model, rows, origins, sizes, advance)
    if kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
        torch.save(prompts, kept)
    return prompts


# ---------------------------------------------------------------------- one layer's index, and steps over it


def config_of(arm: Arm, layer: int, budget: int, more: dict) -> CommunityConfig:
    own = arm.first_layer if arm.first_layer is not None and layer == 0 else {}
    options = {**FAMILIES[arm.family], **more, **arm.options, **own}
    fixed = {"min_context": 0, "workers": 0, "deterministic": True, "partition_timeout": 3600.0}
    return CommunityConfig(budget=budget, **fixed, **options)


@contextlib.contextmanager
def recorded(arm: Arm) -> Iterator[dict[str, list[float]]]:
    """Within, graphs are partitioned as the arm says; yields modularities at gamma 1, and the seconds of finding them."""
    found: dict[str, list[float]] = {"modularity": [], "seconds": []}
    of_attention, of_block = arm.partition or partitions.partition_attention, partitions.partition_keys_block
    of_mixed = partitions.partition_mixed

    def noted(graph, labels) -> None:
        began = time.perf_counter()
        graph = graph() if callable(graph) else graph
        found["modularity"].append(modularity(graph, labels[len(labels) - graph.num_nodes :], 1.0))
        found["seconds"].append(time.perf_counter() - began)

    def whole(function):
        def partition(*arguments, **named):
            made = function(*arguments, **named)
            noted(made.graph, made.labels)
            return made

        return partition

    def block(neighbors, node_first, **named):
        made = of_block(neighbors, node_first, **named)
        for near, one in zip(neighbors, made, strict=True):
            noted(lambda near=near, one=one: key_graph(near, first=int((one.labels < 0).sum())), one.labels)
        return made

    with (
        mock.patch.object(partitions, "partition_attention", whole(of_attention)),
        mock.patch.object(partitions, "partition_mixed", whole(of_mixed)),
        mock.patch.object(partitions, "partition_keys_block", block),
    ):
        yield found


def indexed(
    arm: Arm, prompts: Prompts, layer: int, context: int, budget: int, more: dict
) -> tuple[Sequence, dict[str, float]]:
    """One layer whose first ``context`` tokens are indexed, and what that says of its graphs; means over these.

    seconds are those of one prompt.
    """
    config = config_of(arm, layer, budget, more)
    keys, values = prompts.keys[layer : layer + 1], prompts.values[layer : layer + 1]
    capacity = keys.shape[3]
    sequence = bare_sequence(config, capacity, keys=keys, values=values, group_size=prompts.group_size)
    lists: tuple[Tensor | None, Tensor | None] = (None, None)
    if not sequence.in_blocks:
        ids, alphas = prompts.lists(layer, arm.lists, config.kappa)
        lists = ids[:, :, :context].contiguous(), alphas[:, :, :context].contiguous()
    with recorded(arm) as found:
        began = time.perf_counter()
        sequence.offer(0, keys[0], 0, context, *lists)
        sequence.prefilled(context)
        sequence.publish()
        seconds = time.perf_counter() - began - sum(found["seconds"])
    assert not sequence.statistics.failures, sequence.statistics.failures
    if arm.neighbors_of_attention:
        _put_neighbors(sequence, prompts, layer, context)
    about = {"seconds": seconds / sequence.batch}
    if found["modularity"]:
        about["modularity"] = float(np.mean(found["modularity"]))
    if not isinstance(policy_of(config.policy), TokenPolicy):
        size = sequence.index.size[0].float()  # [B, G, C]
        number = (size > 0).sum(-1).float()
        about["communities"] = float(number.mean())
        about["mean_size"] = float((size.sum(-1) / number).mean())
        about["largest"] = float(size.amax(-1).mean())
    return sequence, about


def _put_neighbors(sequence: Sequence, prompts: Prompts, layer: int, context: int) -> None:
    """The policy "neighborhoods" expands along the strongest edges of the attention graph (eq. 4)."""
    config, state = sequence.config, sequence.index.of_policy(0)["neighbor"]
    ids, alphas = (one[:, :, :context].numpy() for one in prompts.lists(layer, "heads", config.kappa))
    for row, graph in np.ndindex(*state.shape[:2]):
        heads = slice(graph * prompts.group_size, (graph + 1) * prompts.group_size)
        first = config.num_sink_tokens
        made = attention_graph(ids[row, heads], alphas[row, heads], lam=config.lam, prune=config.prune, first=first)
        state[row, graph, :context] = torch.from_numpy(strongest_neighbors(made, state.shape[3], first))


def steps(
    sequence: Sequence, query: Tensor, budget: int, scale: float, wanted: Callable[[int], bool]
) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """Decode steps of a layer as the runtime goes on; of those ``wanted``: number, query, tokens and count.

    query: [B, Hq, T, D] of the T steps behind what is indexed, whose keys the cache holds.
    """
    assigns = assigns_tokens(sequence.config)
    for t in range(query.shape[2]):
        sequence.publish()
        own = query[:, :, t : t + 1]
        if assigns or wanted(t):
            tokens, count = retrieve_step(sequence, 0, own, budget, scale)
        if wanted(t):
            yield t, own, tokens, count
        if assigns:
            assign(sequence, [own], [(tokens, count)], scale)
        sequence.length += 1
        sequence.length_device.fill_(sequence.length)
        sequence.offer_appended()
    sequence.publish()
    assert not sequence.statistics.failures, sequence.statistics.failures


def of_dense_queries(
    sequence: Sequence, prompts: Prompts, layer: int, budget: int, every: int
) -> tuple[Tensor, Tensor, float]:
    """Recall and error [B, steps] at every ``every``-th step of the dense model, and the mean of the tokens attended."""
    context = sequence.length
    query = prompts.queries[layer, :, :, context:]
    recall, error = [], []
    sequence.index.tally.zero_()
    for _, own, tokens, count in steps(
        sequence, query, budget, prompts.scale, lambda t: t % every == every - 1
    ):  # fmt: skip
        one = compared(sequence, 0, own, tokens, count, budget, prompts.scale)
        recall.append(one[0].mean(1))
        error.append(one[1].mean(1))
    number = query.shape[2] if assigns_tokens(sequence.config) else len(recall)
    attended = int(sequence.index.tally[0, 0]) / (number * sequence.batch * sequence.shape.graphs)
    return torch.stack(recall, 1), torch.stack(error, 1), attended


def predictions(model, prompts: Prompts, sequences: list[Sequence], budget: int) -> Tensor:
    """Log-probabilities [B, window, V] behind the prompts with every layer sparse."""
    context = prompts.sizes.context

    def attend(layer, query, key, value, scale):
        prompts.keys[layer, :, :, context:], prompts.values[layer, :, :, context:] = key, value
        sequence = sequences[layer]
        return torch.cat(
            [
                attend_step(sequence, 0, own, tokens, count, budget, scale)
                for _, own, tokens, count in steps(sequence, query, budget, scale, lambda t: True)
            ],
            2,
        )

    try:
        return log_probabilities(model, with_attention(model, attend, prompts.tokens[:, context:], context))
    finally:
        prompts.restore()


# ---------------------------------------------------------------------- rows


def rows_of(arm: Arm, model, prompts: Prompts, layers: list[int], predicts: bool, more: dict) -> list[dict]:
    """One row per prompt: recall and error in ``layers``, predictions or both. more: options that the sizes ask for."""
    sizes, budget = prompts.sizes, prompts.sizes.budget
    context, every = sizes.context, sizes.every
    if arm.stream:
        context, every, layers = sizes.total - sizes.streamed, sizes.stream_every, layers[::STREAM_EVERY]
    if arm.setting == "layer 0":
        layers = [0] if layers else []
    warm_up(config_of(arm, 0, budget, more))
    found, about, sequences = [], [], []
    for layer in range(len(prompts.keys)) if predicts else layers:
        sequence, graphs = indexed(arm, prompts, layer, context, budget, more)
        if layer in layers:
            kept = sequence.index.grown(sequence.shape)
            found.append(of_dense_queries(sequence, prompts, layer, budget, every))
            about.append(graphs)
            if predicts:
                sequence.truncate(context)
                sequence.index = kept
        if predicts:
            sequences.append(sequence)
        else:
            sequence.close()
    common = {
        "family": arm.family, "factor": arm.factor, "value": arm.value, "default": arm.default, "setting": arm.setting,
        "budget": budget, "context": context,
    }  # fmt: skip
    rows = [common | {"role": role, "test": kind, "prompt": number} for role, kind, number in prompts.origins]
    if layers:
        graph = {name: float(f"{np.mean([one[name] for one in about]):.5g}") for name in about[0]}
        attended = round(float(np.mean([one[2] for one in found])), 1)
        for name, parts in (("recall", 0), ("error", 1)):
            values = torch.stack([one[parts] for one in found])  # [layers, B, steps]
            for row, one in enumerate(rows):
                one |= {"layers": layers, "attended": attended, "graph": graph}
                one |= {name: rounded(values[:, row].mean(0)), f"{name}_by_layer": rounded(values[:, row].mean(1))}
    if predicts:
        ours = predictions(model, prompts, sequences, budget)
        for sequence in sequences:
            sequence.close()
        dense = prompts.log_probs
        agree, kl = ours.argmax(-1) == dense.argmax(-1), (dense.exp() * (dense - ours)).sum(-1)
        for row, one in enumerate(rows):
            one |= {"agree": "".join(str(int(bit)) for bit in agree[row]), "kl": rounded(kl[row])}
    return rows


@torch.inference_mode()
def measure(
    model, prompts: Prompts, arms: list[Arm], layers: list[int], predicts: bool, more: dict, progress: Progress,
    keep: Callable[[list[dict]], object] = lambda rows: None,
) -> list[dict]:  # fmt: skip
    """Rows of all arms; defaults that several factors share are measured once for each setting of a family.

    layers: whose recall is measured. predicts: whether the predictions of arms that are marked for it are. keep: gets
    the rows so far, behind each arm.
    """
    rows: list[dict] = []
    defaults: dict[tuple[str, str], list[dict]] = {}
    task = progress.add_task("arms", total=len(arms))
    for arm in sorted(arms, key=lambda arm: not arm.default):
        progress.update(task, description=arm.name)
        # Predictions are those of all layers in any setting.
        place = arm.family, "prompt" if arm.setting == "layer 0" and not layers else arm.setting
        if arm.default and place in defaults:
            own = {"factor": arm.factor, "value": arm.value, "setting": arm.setting}
            rows += [row | own for row in defaults[place]]
        else:
            predicted = predicts and not arm.stream and (arm.predicted or arm.default)
            found = rows_of(arm, model, prompts, layers, predicted, more) if layers or predicted else []
            if arm.default:
                defaults[place] = found
            rows += found
            keep(rows)
        progress.advance(task)
    return rows


# ---------------------------------------------------------------------- statistics


def cells_of(rows: list[dict]) -> list[dict]:
    """One cell per arm and role, of both kinds of text and of each; differences are paired with the default's.

    A cell's samples are steps, and tokens for predictions. Its intervals are 95 %.
    """
    cells = []
    for kinds in (KINDS, *((kind,) for kind in KINDS)):
        own = [row for row in rows if row["test"] in kinds]
        for family, factor, role in dict.fromkeys((row["family"], row["factor"], row["role"]) for row in own):
            arms: dict[str, list[dict]] = {}
            for row in own:
                if (row["family"], row["factor"], row["role"]) == (family, factor, role):
                    arms.setdefault(row["value"], []).append(row)
            default = next((value for value, found in arms.items() if found[0]["default"]), None)
            if default is None:
                raise ValueError(f"the rows of {family}, {factor} must hold its default on {role} texts")
            cells += _cells_of_factor(arms, default, kinds, family, factor, role)
    return cells


def _cells_of_factor(
    arms: dict[str, list[dict]], default: str, kinds: tuple[str, ...], family: str, factor: str, role: str
) -> list[dict]:
    base = {(row["test"], row["prompt"]): row for row in arms[default]}
    predicted = [row | {"texts": role, "test": "texts", "policy": value} for value, found in arms.items()
                 for row in found if "kl" in row]  # fmt: skip
    of_predictions = {cell["policy"]: cell for cell in summary(predicted, baseline=default)}
    cells = []
    for value, found in arms.items():
        cell = {
            "family": family, "factor": factor, "value": value, "default": value == default, "role": role,
            "test": "both" if kinds == KINDS else kinds[0], "setting": found[0]["setting"],
            "prompts": len(found),
        }  # fmt: skip
        if "recall" in found[0]:
            cell["layers"] = found[0]["layers"]
            cell["attended"] = float(np.mean([row["attended"] for row in found]))
            names = found[0]["graph"]
            cell["graph"] = {name: float(np.mean([row["graph"][name] for row in found])) for name in names}
        for measure in MEASURES if "recall" in found[0] else ():
            ours = np.concatenate([row[measure] for row in found])
            theirs = np.concatenate([base[row["test"], row["prompt"]][measure] for row in found])
            cell["steps"] = len(ours)
            cell[measure], cell[f"{measure}_interval"] = float(ours.mean()), bootstrap(ours)
            if value != default:
                cell[f"{measure}_difference"] = float((ours - theirs).mean())
                cell[f"{measure}_difference_interval"] = bootstrap(ours - theirs)
        own = of_predictions.get(value)
        if own is not None:
            cell["tokens"] = own["tokens"]
            for name in ("top1", "kl"):
                cell[name], cell[f"{name}_interval"] = float(own[name]), own[f"{name}_interval"]
            if value != default and default in of_predictions:
                cell["top1_difference"] = float(own["top1"] - of_predictions[default]["top1"])
                cell["kl_difference"] = float(own["kl"] - of_predictions[default]["kl"])
                low, high = own[f"{default}_top1_gain_interval"]
                cell["top1_difference_interval"] = -high, -low
                cell["kl_difference_interval"] = own[f"{default}_kl_gain_interval"]
        cells.append(cell)
    return cells


def claims_of(cells: list[dict]) -> dict[str, float]:
    """Recall, error, agreement and KL of each arm on both kinds of text."""
    claims = {}
    for cell in cells:
        if cell["test"] == "both":
            name = "_".join(
                "".join(c if c.isalnum() else "_" for c in cell[part].replace(".", "p"))
                for part in ("family", "factor", "value", "role")
            )
            for measure, digits in (("recall", 4), ("error", 4), ("top1", 4), ("kl", 5)):
                if measure in cell:
                    claims[f"ablation_{measure}_{name}"] = round(cell[measure], digits)
    return claims


def show(cells: list[dict], console: Console) -> None:
    for family in dict.fromkeys(cell["family"] for cell in cells):
        table = Table("factor", "value", "role", "recall", "error", "top-1", "KL", "Q", "communities", "seconds")
        table.title = f"{family}: means, and differences from the default with 95 % intervals"
        for cell in cells:
            if cell["family"] == family and cell["test"] == "both":
                graph = cell.get("graph", {})
                table.add_row(
                    cell["factor"], cell["value"], cell["role"], *(_shown(cell, name) for name in (*MEASURES, "top1", "kl")),
                    f"{graph['modularity']:.3f}" if "modularity" in graph else "-",
                    f"{graph['communities']:.0f} of {graph['mean_size']:.1f}" if "communities" in graph else "-",
                    f"{graph['seconds']:.2f}" if graph else "-",
                )  # fmt: skip
        console.print(table)


def _shown(cell: dict, measure: str) -> str:
    if measure not in cell:
        return "-"
    text = f"{cell[measure]:.4f}"
    if f"{measure}_difference" in cell:
        text += "\n{:+.4f} ({:+.4f} {:+.4f})".format(
            cell[f"{measure}_difference"], *cell[f"{measure}_difference_interval"]
        )
    return text


def plot(path: Path) -> Path:
    """Differences of recall from the default with their intervals, a column per family, beside the result file."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    cells = json.loads(path.read_text())["cells"]
    cells = [cell for cell in cells if cell["test"] == "both" and "recall_difference" in cell]
    families = list(dict.fromkeys(cell["family"] for cell in cells))
    most = max(len({(c["factor"], c["value"]) for c in cells if c["family"] == family}) for family in families)
    figure, axes = plt.subplots(1, len(families), figsize=(8 * len(families), 1.5 + 0.3 * most), squeeze=False)
    for axis, family in zip(axes[0], families, strict=True):
        own = [cell for cell in cells if cell["family"] == family]
        names = list(dict.fromkeys((cell["factor"], cell["value"]) for cell in own))
        for number, role in enumerate(dict.fromkeys(cell["role"] for cell in own)):
            chosen = [cell for cell in own if cell["role"] == role]
            at = np.array([names.index((cell["factor"], cell["value"])) for cell in chosen]) + 0.2 * number
            middle = np.array([cell["recall_difference"] for cell in chosen])
            ends = np.array([cell["recall_difference_interval"] for cell in chosen])
            spread = np.abs(ends.T - middle)
            axis.errorbar(middle, at, xerr=spread, fmt="o", markersize=3, linewidth=1, label=role.replace("_", " "))
        axis.set_yticks(range(len(names)), [f"{factor}: {value}" for factor, value in names], fontsize=7)
        axis.axvline(0, color="black", linewidth=0.8)
        axis.set_xscale("symlog", linthresh=0.01)
        axis.invert_yaxis()
        axis.grid(alpha=0.3)
        axis.set_title(f'graph="{family}"')
        axis.set_xlabel("attention-mass recall, difference from the default")
        axis.legend(fontsize=7)
    figure.tight_layout()
    target = path.with_suffix(".png")
    figure.savefig(target, dpi=110)
    plt.close(figure)
    return target


# ----------------------------------------------------------------------


def merge(paths: list[Path], out: Path | None, console: Console) -> dict[str, float]:
    """One file of the rows of several: recall of one and predictions of another make one row of an arm and a prompt."""
    files, runs = read_runs(paths, "sizes")
    _, hashes = rows_and_texts(files)
    rows: dict[tuple, dict] = {}
    for file in files:
        for row in file["rows"]:
            key = tuple(row[name] for name in ("family", "factor", "value", "role", "test", "prompt"))
            rows[key] = rows.get(key, {}) | row
    about = {"model": files[0]["model"], "sizes": files[0]["sizes"], "texts_sha256": hashes}
    return finish(list(rows.values()), out, console, **about, runs=runs)


def finish(rows: list[dict], out: Path | None, console: Console, *, model: str, **more) -> dict[str, float]:
    cells = cells_of(rows)
    show(cells, console)
    claims = claims_of(cells)
    path = write_results("ablations", rows, claims, label=model, folder=out, model=model, cells=cells, **more)
    console.print(f"wrote {path}")
    if any("recall_difference" in cell for cell in cells):
        draw(console, plot, path)
    return claims


def texts_of(roles: list[str], kinds: list[str], sizes: Sizes, numbers: list[int], seed: int, tokenizer):
    """Token ids, origins and hashes. A frozen text gives its first and its last tokens; others are drawn one by one."""
    rows, origins, hashes = [], [], {}
    for role in roles:
        for kind in kinds:
            for number in numbers:
                if role == "choosing":
                    ids = texts.frozen_text(kind, tokenizer)
                    own = ids[: sizes.total] if number == 0 else ids[-sizes.total :]
                else:
                    own = texts.fresh_text(kind, tokenizer, seed + number)[: sizes.total]
                rows.append(own)
                origins.append((role, kind, number))
                hashes[f"{role} {kind} {number}"] = texts.digest(own)
    return rows, origins, hashes


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    factors = sorted({arm.factor for arm in arms_of(4096, 256)})
    parser.add_argument("--factors", nargs="+", choices=factors, metavar="FACTOR", help=f"of {', '.join(factors)}")
    parser.add_argument("--texts", nargs="+", default=list(ROLES), choices=ROLES, help="what the texts are for")
    parser.add_argument("--prompts", nargs="+", type=int, default=[0, 1], choices=(0, 1), help="of each text")
    parser.add_argument("--seed", type=int, default=20, help="draws the held-out texts")
    parser.add_argument("--layers", nargs="+", type=int, default=list(range(0, 30, 3)), help="whose recall is measured")
    parser.add_argument(
        "--predictions", default="on", choices=("on", "off", "only"), help="of the arms that are marked for it"
    )
    parser.add_argument("--threads", type=int, default=1, help="torch's threads: its operators are small here")
    parser.add_argument(
        "--small", action="store_true", help="a tiny random model, one prompt of 512 tokens for each use"
    )
    parser.add_argument("--kept", type=Path, help="file for the dense run, read where it exists")
    parser.add_argument("--merge", nargs="+", type=Path, help="join the rows of earlier runs instead")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw this result file instead of measuring")
    parser.add_argument("--out", type=Path, help="folder of the result file")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> dict[str, float]:
    args = arguments(argv)
    console = Console(width=None if Console().is_terminal else 200)
    if args.plot:
        draw(console, plot, args.plot)
        return {}
    if args.merge:
        return merge(args.merge, args.out, console)
    torch.set_num_threads(args.threads)
    if args.small:
        from ckv_compile.testing import TINY_VOCAB, tiny_model

        sizes, name, layers = SMALL, "tiny", [0, 1]
        more = {"recent_window": 16}
        model = tiny_model("llama", max_position_embeddings=2 * sizes.total)
        origins = [(role, "python", 0) for role in args.texts]
        ids = torch.randint(1, TINY_VOCAB, (len(origins), sizes.total), generator=torch.Generator().manual_seed(0))
        rows = ids.tolist()
        hashes = {" ".join(map(str, origin)): texts.digest(row) for origin, row in zip(origins, rows, strict=True)}
    else:
        sizes, name, layers, more = Sizes(), "smollm2", args.layers, {}
        tokenizer, model = load_smollm2()
        rows, origins, hashes = texts_of(args.texts, list(KINDS), sizes, args.prompts, args.seed, tokenizer)
    arms = [
        arm
        for arm in arms_of(sizes.context, sizes.budget)
        if arm.family in args.families and (args.factors is None or arm.factor in args.factors)
    ]
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("dense", total=len(rows) * model.config.num_hidden_layers)
        prompts = kept_prompts(model, rows, origins, sizes, args.kept, lambda: progress.advance(task))
        prompts.widest = max([8, *(arm.options.get("kappa", 8) for arm in arms)])
        layers = [] if args.predictions == "only" else layers
        about = {"model": name, "sizes": dataclasses.asdict(sizes) | {"budget": sizes.budget}, "texts_sha256": hashes}
        part: list[Path] = []

        def keep(rows: list[dict]) -> None:
            """A run that is stopped leaves a file that ``--merge`` reads."""
            before = part[:]
            part[:] = [write_results("ablations", rows, {}, label=f"{name}-part", folder=args.out, cells=[], **about)]
            for path in before:
                path.unlink()

        found = measure(model, prompts, arms, layers, args.predictions != "off", more, progress, keep)
    claims = finish(found, args.out, console, **about, held_out_seed=args.seed)
    for path in part:
        path.unlink()
    return claims


if __name__ == "__main__":
    main()
