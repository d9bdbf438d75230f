"""Agreements beside the threads of the library that call MPI all the time."""

import threading

import pytest

from mpidist.comm.mpi import agreement_lock
from tests.tools.support import short_job


def test_a_function_that_holds_the_lock():
    entered = []

    def enter(number, *, name):
        entered.append((number, name))
        return number

    held = agreement_lock.holding(enter)
    thread = threading.Thread(target=held, args=(1,), kwargs={"name": "other"})
    with agreement_lock.lock:
        thread.start()
        thread.join(0.05)
        # The lock is re-entrant.
        assert held(2, name="own") == 2
        assert entered == [(2, "own")]
    thread.join()
    assert entered == [(2, "own"), (1, "other")]


_AGREEMENTS = """
    import os, sys, threading
    from collections import Counter
    import mpidist.comm
    import mpidist.rpc
    from mpidist.comm.mpi import runtime
    from mpidist.comm.mpi.processes import Agreement, all_processes
    from mpidist.comm.watchdog import watchdog

    world = mpidist.comm.init()
    if BESIDE == "rpc":
        mpidist.rpc.init_rpc(f"worker{world.rank}")
    everyone = all_processes(30.0)
    peers, stops = watchdog._watchdog.peers, threading.Event()

    def serves():
        while not stops.is_set():
            peers.serve()

    def looks():
        while not stops.is_set():
            peers.dead()

    def calls():
        right = f"worker{(world.rank + 1) % world.size}"
        while not stops.is_set():
            mpidist.rpc.rpc_sync(right, divmod, (7, 2))

    runtime.settle_world(None)
    beside = {"watchdog": (serves, looks), "rpc": (calls, calls)}[BESIDE]
    threads = [threading.Thread(target=one) for one in beside]
    for thread in threads:
        thread.start()
    count = 0
    while (found := everyone.agree(True, 0.0)) == Agreement(True) and count < COUNT:
        count += 1
    stops.set()
    for thread in threads:
        thread.join()
    # Its worker has served the others' calls.
    world.barrier()
    print(found, count, flush=True)
    # A rank alone may have other numbers.
    os._exit(found != Agreement(True))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("beside", "count"), [("watchdog", 6000), ("rpc", 6000)])
def test_agreements_have_their_result_beside_other_threads(beside, count):
    text = _AGREEMENTS.replace("BESIDE", repr(beside)).replace("COUNT", str(count))
    done = short_job(3, text, "--with-ft", "ulfm")
    expected = [f"Agreement(is_done=True, status=None) {count}"] * 3
    assert sorted(done.stdout.splitlines()) == expected, done.stdout + done.stderr
