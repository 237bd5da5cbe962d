import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from ckv_compile.community.graph import attention_graph
from ckv_compile.community.leiden import leiden
from ckv_compile.community.workers import PartitionPool, shared_pool
from ckv_compile.errors import PartitionError


def wait_for_stop(stop):
    while not stop[0]:
        time.sleep(0.002)
    return "half a result"


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_results_arrive_once_each_through_on_done(workers):
    seen = []
    with PartitionPool(workers, 30.0) as pool:
        tickets = [
            pool.submit(lambda k, stop: k * k, k, description=("layer", k), on_done=lambda r, e: seen.append((r, e)))
            for k in range(20)
        ]
        assert pool.drain(30)
        assert all(pool.wait(ticket, 1) for ticket in tickets)
    assert [ticket.result for ticket in tickets] == [k * k for k in range(20)]
    assert sorted(seen) == [(k * k, None) for k in range(20)]
    assert (pool.stats.jobs, pool.stats.failures, pool.stats.timeouts, pool.pending) == (20, 0, 0, 0)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("error", [ValueError, BaseException, GeneratorExit])
def test_a_job_that_raises_is_answered_with_its_fallback(workers, error):
    def fail(stop):
        raise error("bad weights")

    with PartitionPool(workers) as pool:
        ticket = pool.submit(fail, description=("layer 3", "graph 1"), fallback=lambda: "pages")
        assert pool.wait(ticket, 10)
        assert ticket.result == "pages"
        assert isinstance(ticket.error, error)
        assert pool.submit(lambda stop: "next", fallback=lambda: "pages") is not None
        assert pool.drain(10)
        assert pool.stats.failures == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_a_late_job_is_stopped_and_answered_with_its_fallback(workers):
    with PartitionPool(workers, timeout=0.1) as pool:
        began = time.monotonic()
        ticket = pool.submit(wait_for_stop, description=("layer 5",), fallback=lambda: "pages")
        assert pool.wait(ticket, 5)
        assert time.monotonic() - began < 2
        assert ticket.result == "pages"
        assert isinstance(ticket.error, PartitionError)
        assert "layer 5" in str(ticket.error)
        assert "0.1 s" in str(ticket.error)
        assert (pool.stats.timeouts, pool.stats.failures) == (1, 1)
        after = pool.submit(lambda stop: "in time")
        assert pool.wait(after, 5)
        assert after.result == "in time"


def test_a_partition_that_is_too_slow_is_stopped_by_its_own_polling(planted_lists):
    graph = attention_graph(*planted_lists(20000, 50, 0.3, 0), lam=0.5, prune=0.0)

    def partition(stop):
        while not stop[0]:
            labels = leiden(graph, gamma=50.0, passes=100, stop=stop)
        return labels

    with PartitionPool(1, timeout=0.2) as pool:
        ticket = pool.submit(partition, fallback=lambda: "pages")
        assert pool.wait(ticket, 5)
        assert ticket.result == "pages"
        assert pool.wait(pool.submit(lambda stop: 1), 5)


def test_a_job_that_ignores_its_flag_loses_its_thread():
    release = threading.Event()
    with PartitionPool(1, timeout=0.1) as pool:
        stuck = pool.submit(lambda stop: release.wait(20), fallback=lambda: "pages")
        behind = pool.submit(lambda stop: "behind")
        assert pool.wait(stuck, 5)
        assert stuck.result == "pages"
        assert pool.wait(behind, 10)
        assert behind.result == "behind"
        release.set()


def test_submit_never_waits_and_a_full_queue_answers_with_fallbacks():
    gate = threading.Event()
    with PartitionPool(1, max_pending=2) as pool:
        blocker = pool.submit(lambda stop: gate.wait(20))
        while pool._queue:
            time.sleep(0.001)
        began = time.monotonic()
        tickets = [pool.submit(lambda k, stop: k, k, fallback=lambda: "pages") for k in range(5)]
        assert time.monotonic() - began < 0.5
        assert [ticket.done for ticket in tickets] == [False, False, True, True, True]
        assert {ticket.result for ticket in tickets[2:]} == {"pages"}
        assert "2 jobs are waiting" in str(tickets[2].error)
        gate.set()
        assert pool.drain(10)
        assert [ticket.result for ticket in tickets[:2]] == [0, 1]
        assert blocker.result is True
        assert pool.stats.rejected == 3


def test_failing_fallbacks_and_callbacks_do_not_end_a_worker():
    def fail(*args, **kwargs):
        raise RuntimeError("no")

    with PartitionPool(1) as pool:
        ticket = pool.submit(fail, fallback=fail, on_done=fail)
        assert pool.wait(ticket, 5)
        assert ticket.result is None
        assert pool.wait(pool.submit(lambda stop: 1), 5)


def test_close_answers_everything_and_refuses_later_jobs():
    pool = PartitionPool(1, timeout=60.0)
    running = pool.submit(wait_for_stop, fallback=lambda: "pages")
    waiting = [pool.submit(lambda stop: 1, fallback=lambda: "pages") for _ in range(3)]
    while not pool._running:
        time.sleep(0.001)
    pool.close()
    for ticket in [running, *waiting, pool.submit(lambda stop: 1, fallback=lambda: "pages")]:
        assert pool.wait(ticket, 5)
        assert ticket.result == "pages"
        assert isinstance(ticket.error, PartitionError)
    assert pool.drain(1)


def test_cpu_seconds_are_those_of_the_jobs():
    def spin(stop):
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass

    with PartitionPool(2) as pool:
        for _ in range(4):
            pool.submit(spin)
        pool.submit(lambda stop: time.sleep(0.2))
        assert pool.drain(10)
        assert 0.2 <= pool.stats.cpu_seconds < 0.35


def test_drain_gives_up_after_its_timeout():
    gate = threading.Event()
    with PartitionPool(1) as pool:
        pool.submit(lambda stop: gate.wait(20))
        assert not pool.drain(0.05)
        gate.set()
        assert pool.drain(10)


def test_shared_pools_are_one_per_kind():
    assert shared_pool(2, 9.0) is shared_pool(2, 9.0)
    assert shared_pool(2, 9.0) is not shared_pool(1, 9.0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
def test_the_child_of_a_fork_has_a_working_empty_pool():
    gate = threading.Event()
    with PartitionPool(1, timeout=60.0) as pool:
        parents = pool.submit(lambda stop: gate.wait(20))
        while not pool._running:
            time.sleep(0.001)
        child = os.fork()
        if child == 0:
            try:
                ok = parents.done and isinstance(parents.error, PartitionError) and pool.pending == 0
                ticket = pool.submit(lambda stop: 41)
                ok = ok and pool.wait(ticket, 5) and ticket.result == 41
            finally:
                os._exit(0 if ok else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert not parents.done
        gate.set()
        assert pool.drain(5)


def test_an_interpreter_with_unfinished_jobs_exits_at_once():
    program = """
import numpy as np, time
from ckv_compile.community.graph import key_graph
from ckv_compile.community.leiden import leiden
from ckv_compile.community.workers import PartitionPool
graph = key_graph(np.random.default_rng(0).integers(0, 20000, (20000, 8)).astype(np.int32))
def work(stop):
    while not stop[0]:
        leiden(graph, gamma=50.0, passes=100, stop=stop)
pool = PartitionPool(2, 600.0)
tickets = [pool.submit(work) for _ in range(4)]
while len(pool._running) < 2:
    time.sleep(0.01)
time.sleep(0.1)
print("end of main", time.time())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert time.time() - float(done.stdout.split()[-1]) < 3
    assert "Fatal" not in done.stderr


def test_a_worker_lets_go_of_a_jobs_arrays():
    import weakref

    array = np.zeros(10)
    gone = weakref.ref(array)
    with PartitionPool(1) as pool:
        ticket = pool.submit(lambda a, stop: None, array)
        del array
        assert pool.wait(ticket, 5)
        for _ in range(100):
            if gone() is None:
                break
            time.sleep(0.01)
        assert gone() is None


def test_a_cancelled_job_is_answered_without_its_fallback_and_is_no_failure(caplog):
    seen, ran = [], []
    with PartitionPool(1, 30.0) as pool:
        running = pool.submit(wait_for_stop, fallback=lambda: "pages", on_done=lambda r, e: seen.append((r, str(e))))
        waiting = pool.submit(
            lambda stop: ran.append(1), description="x", on_done=lambda r, e: seen.append((r, str(e)))
        )
        waiting.cancel()
        running.cancel()
        assert pool.drain(5)
    assert not ran
    assert seen == [(None, "partition of () was cancelled"), (None, "partition of x was cancelled")]
    assert (pool.stats.failures, pool.stats.timeouts) == (0, 0)
    assert not caplog.records


def test_time_spent_waiting_for_what_a_job_needs_does_not_count():
    with PartitionPool(1, timeout=0.2) as pool:
        arrived = threading.Event()
        ticket = pool.submit(lambda stop: "done", fallback=lambda: "late", ready=arrived.wait)
        assert not pool.wait(ticket, 0.5)
        arrived.set()
        assert pool.wait(ticket, 30)
    assert (ticket.result, ticket.error) == ("done", None)


def test_a_job_wakes_one_worker():
    with PartitionPool(8, 60.0) as pool:
        woken, wait = [], pool._work_waits.wait
        pool._work_waits.wait = lambda: wait() and woken.append(threading.current_thread())
        together = threading.Barrier(8)
        for _ in range(8):
            pool.submit(lambda stop: together.wait())
        assert pool.drain(60)
        while pool._idle < 8:
            time.sleep(0.001)
        woken.clear()
        for _ in range(5):
            assert pool.wait(pool.submit(lambda stop: None), 60)
        assert len(woken) <= 5
