import threading

import pytest

from ckv_compile.community.workers import shared_pool


@pytest.fixture
def busy_worker():
    """The only thread of the pool of one worker waits until ``set`` is called."""
    began, release = threading.Event(), threading.Event()
    pool = shared_pool(1, 60.0)
    ticket = pool.submit(lambda stop: (began.set(), release.wait(60)))
    assert began.wait(60)
    yield release
    release.set()
    assert pool.wait(ticket, 60)
