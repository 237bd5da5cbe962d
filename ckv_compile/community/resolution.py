"""The resolution (gamma of eq. 5) that gives a mean community size.

No gamma suits all graphs of a model: at one mean size they differ by a factor of 2 each way between key graphs and of
70 between attention graphs. Relative to the number of nodes it is stable, though: gamma = constant * n / 512 with one
constant per layer and graph, which later blocks, refreshes and sequences start from.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Hashable

import numpy as np

from ckv_compile.community.leiden import next_gamma
from ckv_compile.config import GAMMA_NUMERATOR, CommunityConfig

NODES_PER_CONSTANT = 512
ATTENTION_NUMERATOR = 48.0  # 1.6-7.3 on local heads and 0.1-0.8 on hub heads, times a mean size of 16
REMEMBERED_RANGE = 64.0  # a constant further than this from its start value is not remembered as found


@dataclasses.dataclass(frozen=True)
class SearchPlan:
    """How a graph source is partitioned: the start of the search, its length, and the passes of the engine.

    constant: gamma * 512 / n to start from. tolerance: accepted relative error of the mean size.
    corrections: evaluations after the first. passes: full Leiden passes.
    """

    constant: float
    tolerance: float
    corrections: int
    passes: int

    @classmethod
    def of(cls, config: CommunityConfig) -> SearchPlan:
        """The plan of a configuration.

        The paper caps Leiden's iterations at floor(log10 n), 4 to 7 (a deviation): two passes are within 0.5 % of the
        modularity that igraph reaches in two iterations, at less than a quarter of its CPU time (bench/partition.py).
        """
        corrections = 0 if config.gamma is not None else None
        if config.graph == "keys":
            plan = cls(GAMMA_NUMERATOR / config.mean_size, tolerance=0.2, corrections=2, passes=2)
        elif config.graph == "attention":
            plan = cls(ATTENTION_NUMERATOR / config.mean_size, tolerance=0.1, corrections=6, passes=2)
        else:
            plan = cls(GAMMA_NUMERATOR / config.mean_size, tolerance=0.1, corrections=6, passes=2)
        return plan if corrections is None else dataclasses.replace(plan, corrections=corrections)

    def start_gamma(self, nodes: int, constant: float | None = None) -> float:
        return (self.constant if constant is None else constant) * max(1, nodes) / NODES_PER_CONSTANT


class ResolutionMemory:
    """Constants that searches ended with, by key (layer, graph); safe to share between threads.

    What a search starts from depends on which partition ended before, hence on the speed of workers: with
    ``deterministic=True`` the partition functions leave it alone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._constants: dict[Hashable, float] = {}

    def get(self, key: Hashable, default: float) -> float:
        with self._lock:
            return self._constants.get(key, default)

    def put(self, key: Hashable, constant: float, start: float) -> None:
        """Remember a constant, kept within a range around the plan's ``start``."""
        if math.isfinite(constant) and constant > 0.0:
            constant = min(start * REMEMBERED_RANGE, max(start / REMEMBERED_RANGE, constant))
            with self._lock:
                self._constants[key] = constant

    def clear(self) -> None:
        with self._lock:
            self._constants.clear()

    def __len__(self) -> int:
        with self._lock:
            return len(self._constants)

    def __getstate__(self) -> dict:
        with self._lock:
            return {"constants": dict(self._constants)}

    def __setstate__(self, state: dict) -> None:
        self._lock = threading.Lock()
        self._constants = dict(state["constants"])


def search_gamma(
    evaluate: Callable[[float], tuple[np.ndarray, float]],
    gamma: float,
    mean_size: float,
    *,
    tolerance: float,
    corrections: int,
) -> tuple[np.ndarray, float]:
    """The labels and gamma whose mean community size comes closest to ``mean_size``.

    evaluate: gamma -> (labels, mean size). The same search as the native engine does by itself, for the others.
    """
    log_gammas = np.zeros(corrections + 1)
    log_means = np.zeros(corrections + 1)
    found: tuple[np.ndarray, float] | None = None
    closest = math.inf
    for k in range(corrections + 1):
        labels, mean = evaluate(gamma)
        if found is None:
            found = labels, gamma
        if not mean > 0.0:
            break
        log_gammas[k], log_means[k] = math.log(gamma), math.log(mean)
        miss = abs(log_means[k] - math.log(mean_size))
        if miss < closest:
            closest, found = miss, (labels, gamma)
        if closest <= math.log1p(tolerance):
            break
        gamma = float(next_gamma(log_gammas, log_means, k + 1, math.log(mean_size)))
    assert found is not None
    return found
