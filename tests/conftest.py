import collections
import os

import pytest
import torch

# The models of the suite are tiny: threads would only wait for one another.
torch.set_num_threads(1)


COSTLY = (
    "end_to_end",
    "passes",
    "templates",
)  # folders whose tests trace a model or interpret kernels, for seconds each


def every(path, combinations: int) -> int:
    """Which of a test's combinations run by default: every first, second, ... of them.

    Tracing and interpreting everything takes more than an hour on two cores.
    """
    if path.parent.name in COSTLY:
        return 1 if combinations == 1 else 4 if combinations <= 4 else 6 if combinations <= 8 else 8
    return 1 if combinations <= 2 else 2 if combinations <= 8 else 4


def pytest_collection_modifyitems(items):
    """Slow tests, and all combinations of each test, run with SLOW_TESTS=1 (``make test-all``)."""
    if os.environ.get("SLOW_TESTS") == "1":
        return
    combinations = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow: SLOW_TESTS=1 runs it"))
        else:
            combinations[item.path, getattr(item, "originalname", item.name)].append(item)
    for (path, _), same in combinations.items():
        step = every(path, len(same))
        for number, item in enumerate(same):
            if number % step:
                item.add_marker(pytest.mark.skip(reason="one of several combinations: SLOW_TESTS=1 runs it"))


# Kernels run under Triton's interpreter where there is no GPU. Triton reads this when it is first imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def layers_at_once(monkeypatch):
    """All layers have their turn between two steps, so that they are indexed up to the same token."""
    from ckv_compile.runtime import turns

    monkeypatch.setattr(turns, "PART", 1_000)


@pytest.fixture(autouse=True)
def dispatch_state_is_left_as_it_was():
    """Modes and excluded keys are a thread's, not a test's: one that leaks them would fail every test behind it."""
    excluded = torch._C._dispatch_tls_local_exclude_set().raw_repr()
    yield
    after = torch._C._dispatch_tls_local_exclude_set().raw_repr()
    python_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded("Python")
    if python_excluded:
        torch._C._dispatch_tls_set_dispatch_key_excluded("Python", False)
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not python_excluded
    assert after == excluded
