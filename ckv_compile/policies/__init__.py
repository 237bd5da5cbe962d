"""How a decode step finds the tokens that it attends to besides sinks and tail, one small file each, by name.

Every policy ends in a list of tokens that ``ckv::sparse_attention`` attends to, exactly, and none of them decides about
leading positions, the recent window or what is not indexed yet: these are attended under all of them. There are two kinds:

    GroupPolicy  groups of tokens are published in the index; ``ckv::route`` and ``ckv::retrieve`` take the best ones
    TokenPolicy  every token gets a score at every step, from the query, the keys and what the policy keeps about them
"""

from __future__ import annotations

from ckv_compile.policies.base import GroupPolicy, Policy, TokenPolicy
from ckv_compile.policies.communities import Communities
from ckv_compile.policies.components import Components
from ckv_compile.policies.freekv import FreeKV
from ckv_compile.policies.graphkv import GraphKV
from ckv_compile.policies.h2o import H2O
from ckv_compile.policies.kmeans import KMeans
from ckv_compile.policies.neighborhoods import Neighborhoods
from ckv_compile.policies.oracle import Oracle
from ckv_compile.policies.pages import Pages
from ckv_compile.policies.quest import Quest
from ckv_compile.policies.snapkv import SnapKV
from ckv_compile.policies.sparq import SparQ
from ckv_compile.policies.tokenselect import TokenSelect

POLICIES: dict[str, Policy] = {
    "communities": Communities(),
    "components": Components(),
    "neighborhoods": Neighborhoods(),
    "kmeans": KMeans(cosine=True),
    "kmeans_l2": KMeans(cosine=False),
    "quest": Quest(),
    "sparq": SparQ(),
    "tokenselect": TokenSelect(),
    "freekv": FreeKV(),
    "h2o": H2O(),
    "snapkv": SnapKV(),
    "graphkv": GraphKV(),
    "streaming": Pages(score="recency"),
    "random": Pages(score="random"),
    "oracle": Oracle(),
}

__all__ = ["POLICIES", "GroupPolicy", "Policy", "TokenPolicy", "policy_of"]


def policy_of(name: str) -> Policy:
    return POLICIES[name]
