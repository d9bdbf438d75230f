"""The pause of the garbage collector while packages are imported."""

import gc
import subprocess
import sys

import pytest

from mpidist.gc_pause import collector_paused


@pytest.mark.parametrize("is_on", [True, False])
def test_the_collector_is_afterwards_as_it_was(is_on):
    was_on = gc.isenabled()
    (gc.enable if is_on else gc.disable)()
    try:
        with collector_paused():
            with collector_paused():
                pass
            assert not gc.isenabled()
        assert gc.isenabled() == is_on
    finally:
        (gc.enable if was_on else gc.disable)()


def test_the_import_of_comm_makes_no_full_collection():
    program = (
        "import gc, torch\n"
        "full = []\n"
        "gc.callbacks.append(lambda phase, about: full.append(1) if about['generation'] == 2 and"
        " phase == 'start' else None)\n"
        "import mpidist\n"
        "mpidist.comm.ProcessGroup\n"
        "assert gc.isenabled()\n"
        "print(len(full))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
