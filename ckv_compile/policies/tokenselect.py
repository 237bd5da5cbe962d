"""TokenSelect (Wu et al. 2025): all heads vote for tokens, and a step like the one before keeps its tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from ckv_compile.policies.base import Step, TokenPolicy, similarity

THRESHOLD = 0.9  # of the cosine of two queries, beyond which the selection stays (selection cache)


class TokenSelect(TokenPolicy):
    """Soft vote: a token's score is its probability summed over all heads of the layer, so all share one list.

    Selection cache: where the cosine of all heads' query with that of the last selection is above 0.9, this step chooses
    with the latter. That is the same selection, but for tokens that joined the index meanwhile.
    """

    state = ("last_query",)

    def scores(self, step: Step) -> Tensor:
        query = step.query
        if query.shape[2] == 1:
            last = step.state["last_query"]  # [b, Hq, D]
            alike = similarity(query.flatten(1), last.flatten(1)) > THRESHOLD  # [b]
            query = torch.where(alike[:, None, None, None], last[:, :, None].to(query.dtype), query)
        step.state["last_query"].copy_(query[:, :, -1])
        vote = step.choose(step.probabilities(query)).sum((1, 2))
        return vote[:, None].expand(-1, step.graphs, -1)
