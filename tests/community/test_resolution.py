import math
import pickle
import threading

import numpy as np
import pytest

from ckv_compile.community.resolution import ResolutionMemory, SearchPlan, search_gamma
from ckv_compile.config import CommunityConfig


def run_search(mean_of, gamma, target, tolerance, corrections):
    asked = []

    def evaluate(gamma):
        asked.append(gamma)
        return np.array([gamma]), mean_of(gamma)

    labels, found = search_gamma(evaluate, gamma, target, tolerance=tolerance, corrections=corrections)
    assert labels[0] == found
    return found, asked


def test_a_start_within_tolerance_takes_one_evaluation():
    found, asked = run_search(lambda gamma: 90 / gamma, 10.0, 8, 0.3, 2)
    assert (found, len(asked)) == (10.0, 1)


def test_inverse_proportion_takes_one_correction():
    found, asked = run_search(lambda gamma: 100 / gamma, 3.0, 8, 0.01, 2)
    assert found == pytest.approx(12.5)
    assert len(asked) == 2


@pytest.mark.parametrize("power", [0.4, 1.0, 1.7])
@pytest.mark.parametrize("start", [0.05, 500.0])
def test_any_power_law_is_met_within_six_corrections(power, start):
    found, asked = run_search(lambda gamma: 100 * gamma**-power, start, 16, 0.1, 6)
    assert 100 * found**-power == pytest.approx(16, rel=0.1)
    assert len(asked) <= 7


def test_a_jump_over_the_target_still_ends_with_the_closest_seen():
    found, asked = run_search(lambda gamma: 200.0 if gamma < 7 else 10.0, 1.0, 16, 0.1, 6)
    assert found >= 7
    assert len(asked) == 7


def test_no_correction_keeps_gamma():
    assert run_search(lambda gamma: 1e6, 4.0, 16, 0.1, 0) == (4.0, [4.0])


def test_a_mean_that_does_not_exist_ends_the_search():
    assert run_search(lambda gamma: 0.0, 4.0, 16, 0.1, 6) == (4.0, [4.0])


def test_plans_follow_the_configuration():
    keys = SearchPlan.of(CommunityConfig())
    assert (keys.constant, keys.corrections, keys.passes) == (12.5, 2, 2)
    assert keys.start_gamma(2048) == 50.0
    attention = SearchPlan.of(CommunityConfig(graph="attention"))
    assert (attention.constant, attention.passes) == (3.0, 2)
    assert SearchPlan.of(CommunityConfig(gamma=7.0)).corrections == 0


def test_memory_returns_what_was_put_within_its_range():
    memory = ResolutionMemory()
    assert memory.get((0, 1), 12.5) == 12.5
    memory.put((0, 1), 20.0, 12.5)
    assert memory.get((0, 1), 12.5) == 20.0
    memory.put((0, 1), 1e9, 12.5)
    assert memory.get((0, 1), 12.5) == 12.5 * 64
    for bad in (math.nan, math.inf, 0.0, -1.0):
        memory.put((0, 2), bad, 12.5)
    assert len(memory) == 1
    memory.clear()
    assert len(memory) == 0


def test_memory_is_safe_to_share_and_to_pickle():
    memory = ResolutionMemory()

    def work(worker):
        for k in range(200):
            memory.put((worker, k), 10.0 + k, 12.5)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(memory) == 800
    copy = pickle.loads(pickle.dumps(memory))
    assert copy.get((3, 7), 0.0) == 17.0
