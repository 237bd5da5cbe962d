"""FreeKV (Liu et al. 2025): a step attends to what the step before it would have chosen."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ckv_compile.policies.base import Step, TokenPolicy, of_pages, page_bounds, page_products, similarity

THRESHOLD = 0.8  # tau: mean cosine of two steps' queries over the heads of a list, below which it is chosen anew


class FreeKV(TokenPolicy):
    """Speculative retrieval: pages by the previous step's query, so that choosing them delays nothing.

    Fine-grained correction: lists whose queries changed (mean cosine over their heads below tau = 0.8) are chosen by the
    step's own query. Pages are scored by the bounds of their keys as in Quest, and a list's score is the mean over its heads
    of the softmax over pages. Pages have 16 tokens here and 32 in the paper.
    """

    state = ("page_low", "page_high", "last_query")

    def prepare(
        self, state: dict[str, Tensor], key: Tensor, start: int, stop: int, size: int, first: list[int], config: Any
    ) -> None:
        page_bounds(state, key, start, stop, first, config.num_sink_tokens)

    def scores(self, step: Step) -> Tensor:
        query = step.query
        if query.shape[2] == 1:
            last = step.state["last_query"]  # [b, Hq, D]
            alike = similarity(query[:, :, 0], last).unflatten(1, (step.graphs, -1)).mean(2)  # [b, G]
            reused = (alike >= THRESHOLD).repeat_interleave(query.shape[1] // step.graphs, 1)
            query = torch.where(reused[..., None, None], last[:, :, None].to(query.dtype), query)
        step.state["last_query"].copy_(step.query[:, :, -1])
        products = page_products(step, query)
        return of_pages(step, step.by_graph(products.softmax(-1)).mean(2))
