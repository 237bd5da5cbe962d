"""Pages of consecutive tokens: the newest ones (StreamingLLM, Xiao et al. 2024) or ones drawn anew at every step."""

from __future__ import annotations

from ckv_compile.policies.base import GroupPolicy


class Pages(GroupPolicy):
    """score "recency": sinks and the newest tokens, as StreamingLLM keeps them. "random": a control."""

    def __init__(self, score: str) -> None:
        self.score = score
