"""Pickles by value: cloudpickle is imported by threads that send and that receive, at once."""

from __future__ import annotations

import pytest

from tests.tools.support import python, started

pytest.importorskip("cloudpickle")

SCRIPT = """
import importlib, sys, threading
from mpidist.rpc.values import pickles

sys.setswitchinterval(1e-6)
failures = []

def attempt(act, gate):
    gate.wait()
    try:
        act()
    except BaseException as failure:
        failures.append(failure)

for _ in range(200):
    for name in [name for name in sys.modules if name.split(".")[0] == "cloudpickle"]:
        del sys.modules[name]
    gate = threading.Barrier(2)
    acts = (
        lambda: pickles.dumps(lambda: 0),
        lambda: importlib.import_module("cloudpickle.cloudpickle"),  # as a pickle names it
    )
    threads = [threading.Thread(target=attempt, args=(act, gate)) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
print("imported")
"""


def test_a_first_lambda_is_pickled_while_another_is_read():
    done = started([*python(), "-c", SCRIPT], 100)
    assert done.stdout == "imported\n", done.stderr
