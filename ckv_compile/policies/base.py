"""What a policy may say, and what several of them compute."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ckv_compile.community import partition as partitions
from ckv_compile.reference.attended import Span, grouped_scores
from ckv_compile.reference.nominal import accumulate_dtype

PAGE = 16  # tokens of a page (Quest, section 4)


class Policy:
    """What both kinds share.

    state: names of further buffers of the index (``index_layout``) that the policy keeps about tokens or steps.
    sees_prompt: whether it needs the queries of the prompt; without them, steps are dense.
    """

    state: ClassVar[tuple[str, ...]] = ()
    sees_prompt: ClassVar[bool] = False

    def block_input(
        self, key: Tensor, first: Tensor, start: int, stop: int, size: int, graphs: int, config: Any
    ) -> Tensor:
        """What a worker needs to group positions ``start .. stop - 1``: ``[B, G, stop - start, any]``, of its own memory.

        key: [B, Hkv, >= stop, D]. first: int32 [B] on the host. size: tokens of a block, counted from ``start``.
        """
        return torch.zeros(key.shape[0], graphs, stop - start, 0, dtype=torch.int32)

    def partition(
        self,
        given: np.ndarray,
        first: list[int],
        config: Any,
        memory: Any,
        layer: int,
        backlog: Callable[[], int] | None,
        stop: np.ndarray,
        context: int = 0,
    ) -> list[list[partitions.Partition]]:
        """Worker side: the groups ``[row][graph]`` of one block of ``block_input``. Pages, unless it says otherwise.

        first: of each row, positions of the block before it are sinks or padding and in no group. context: tokens that
        there are so far, of which the block is a part.
        """
        graphs, nodes = given.shape[1], given.shape[2]
        return [[partitions.contiguous_pages(nodes, row, PAGE)] * graphs for row in first]

    def prepare(
        self, state: dict[str, Tensor], key: Tensor, start: int, stop: int, size: int, first: list[int], config: Any
    ) -> None:
        """Keep what steps need to know of the keys ``start .. stop - 1`` (and of earlier ones) in a layer's ``state``.

        key: [B, Hkv, >= stop, D]. first: position of each row's first token. size: tokens of a block, from ``start``.
        """


class GroupPolicy(Policy):
    """Groups of tokens are published, scored by ``ckv::route`` and taken whole.

    score: of the groups, None for the one that ``config.score`` names.
    """

    score: str | None = None


class TokenPolicy(Policy):
    """Every token that is indexed, no sink and not in the tail is scored anew by every step, and the best are attended.

    Pages are published only so that the runtime knows how far the index reaches.
    """

    def observe(
        self, state: dict[str, Tensor], query: Tensor, key: Tensor, length: int, first: list[int], scale: float
    ) -> None:
        """See a prefill of a layer: query [B, Hq, Q, D] of positions ``length ..``, key [B, Hkv, length + Q, D]."""

    def scores(self, step: Step) -> Tensor:
        """float32 [b, G, gap] of the positions ``step.gap``; larger is better, of equals the newer, and NaN is worst.

        Or int64, all different.
        """
        raise NotImplementedError


@dataclasses.dataclass
class Step:
    """One decode step of rows with equal spans, of one layer.

    query: float32 [b, Hq, Q, D] of the positions ``span.stop - Q ..``; key: [b, Hkv, span.stop, D]; graphs: G lists of
    Hq / G heads each. state: the layer's buffers of these rows, by name. scale: of the products.
    """

    query: Tensor
    key: Tensor
    span: Span
    graphs: int
    scale: float
    state: dict[str, Tensor]

    @property
    def gap(self) -> slice:
        """Positions that may be chosen."""
        return slice(self.span.sink_end, self.span.tail_start)

    def by_graph(self, heads: Tensor) -> Tensor:
        """Per-head values [b, Hq, Q, n] as [b, G, Hq / G * Q, n]."""
        return heads.reshape(heads.shape[0], self.graphs, -1, heads.shape[-1])

    def choose(self, heads: Tensor) -> Tensor:
        """The positions that may be chosen, of values [b, .., n] for all positions from the row's first on."""
        return heads[..., self.span.sink_end - self.span.first : self.span.tail_start - self.span.first]

    def logits(self, query: Tensor | None = None) -> Tensor:
        """q . k * scale of every head for the row's positions: float32 [b, Hq, Q, n], -inf for what comes after a query.

        query: [b, Hq, Q, D] to use instead of the step's own.
        """
        own = self.query if query is None else query
        keys = self.key[:, :, self.span.first :]
        queries = own.shape[2]
        flat = grouped_scores(own.flatten(1, 2) * self.scale, keys).unflatten(1, own.shape[1:3])
        if queries > 1:
            later = torch.ones(queries, queries, dtype=torch.bool, device=own.device).triu_(1)
            flat[..., -queries:].masked_fill_(later, -torch.inf)
        return flat

    def probabilities(self, query: Tensor | None = None) -> Tensor:
        """alpha of eq. 1 over the row's whole context: float32 [b, Hq, Q, n]."""
        return self.logits(query).softmax(-1)


def graph_keys(key: Tensor, graphs: int) -> Tensor:
    """Keys [B, Hkv, n, D] as float32 for each graph, of its own memory: [B, G, n, D], or [B, 1, n, Hkv * D]."""
    key = key.to(torch.float32, copy=True)
    if graphs == 1 and key.shape[1] > 1:
        return key.transpose(1, 2).flatten(2).unsqueeze(1)
    return key.repeat_interleave(graphs // key.shape[1], 1) if graphs > key.shape[1] else key


def group_sum(heads: Tensor, graphs: int) -> Tensor:
    """Sums over the heads of each graph: [B, Hq, n] -> [B, G, n]."""
    return heads.unflatten(1, (graphs, -1)).sum(2)


def similarity(query: Tensor, last: Tensor) -> Tensor:
    """Cosine of the queries of two steps, per head: [b, Hq, D] twice -> [b, Hq]; 0 where one of them is zero."""
    return torch.nn.functional.cosine_similarity(query.float(), last.float(), dim=-1, eps=1e-12)


def page_bounds(state: dict[str, Tensor], key: Tensor, start: int, stop: int, first: list[int], sinks: int) -> None:
    """Least and largest key of every page that ``start .. stop - 1`` touch, per channel (Quest, section 3.3).

    Page p holds positions 16 p .. 16 p + 15. State ``page_low``, ``page_high``: [B, Hkv, pages, D] in key's dtype; sinks
    and padding do not count.
    """
    begin, end = start // PAGE * PAGE, -(-stop // PAGE) * PAGE
    keys = key[:, :, begin:stop]
    positions = torch.arange(begin, end, device=key.device)
    row_first = torch.tensor(first, device=key.device)[:, None] + sinks
    absent = (positions < row_first) | (positions >= stop)  # [B, n]
    padded = torch.nn.functional.pad(keys, (0, 0, 0, end - stop))
    for name, extreme in (("page_low", torch.inf), ("page_high", -torch.inf)):
        pages = torch.where(absent[:, None, :, None], extreme, padded).unflatten(2, (-1, PAGE))
        state[name][:, :, begin // PAGE : end // PAGE] = pages.amin(3) if extreme > 0 else pages.amax(3)


def page_products(step: Step, query: Tensor | None = None) -> Tensor:
    """Upper bounds of q . k * scale over the keys of every page: sum over channels of max(q low, q high) (Quest, eq. 1).

    Returns float32 [b, Hq, Q, pages], of the pages that hold a position of ``step.gap``.
    """
    own = step.query if query is None else query
    own = own * step.scale
    pages = slice(step.gap.start // PAGE, -(-step.gap.stop // PAGE))
    low, high = (step.state[name][:, :, pages].to(accumulate_dtype(own.dtype)) for name in ("page_low", "page_high"))
    flat = own.flatten(1, 2)
    bound = grouped_scores(flat.clamp(min=0), high) + grouped_scores(flat.clamp(max=0), low)
    return bound.unflatten(1, own.shape[1:3])


def of_pages(step: Step, values: Tensor) -> Tensor:
    """The value of every position's page: [.., pages] of ``page_products`` -> [.., gap]."""
    gap = torch.arange(step.gap.start, step.gap.stop, device=values.device)
    return values[..., gap // PAGE - step.gap.start // PAGE]
