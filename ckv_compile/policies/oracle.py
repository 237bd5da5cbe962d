"""The tokens of most attention, found by attending to everything: the best that any policy can do with one list."""

from __future__ import annotations

from torch import Tensor

from ckv_compile.policies.base import Step, TokenPolicy


class Oracle(TokenPolicy):
    """A token's score is its probability (eq. 1) over the whole context, summed over the graph's heads."""

    def scores(self, step: Step) -> Tensor:
        return step.by_graph(step.choose(step.probabilities())).sum(2)
