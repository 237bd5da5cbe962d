"""Quest (Tang et al. 2024): pages of 16 tokens by an upper bound of their products with the query."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ckv_compile.policies.base import Step, TokenPolicy, of_pages, page_bounds, page_products


class Quest(TokenPolicy):
    """Score of a page: sum over channels of max(q low, q high), the largest of the graph's heads.

    Quest chooses per head and has as many KV as query heads; heads that share keys share a list here, as for every policy.
    Of the last page that fits only in part, its newest tokens are taken.
    """

    state = ("page_low", "page_high")

    def prepare(
        self, state: dict[str, Tensor], key: Tensor, start: int, stop: int, size: int, first: list[int], config: Any
    ) -> None:
        page_bounds(state, key, start, stop, first, config.num_sink_tokens)

    def scores(self, step: Step) -> Tensor:
        return of_pages(step, step.by_graph(page_products(step)).amax(2))
