"""Packages of mpidist by attribute, imported at first use."""

import json
import sys

import mpidist
from tests.tools.support import started

_PROGRAM = """
import json, sys
import mpidist
before = [name for name in sys.modules if name.startswith("mpidist.")]
has_torch = "torch" in sys.modules
names = [mpidist.ddp.DistributedDataParallel.__module__, mpidist.rpc.rpc_sync.__name__]
names += [mpidist.slurm.Job.__module__]
print(json.dumps([before, has_torch, names, "mpi4py.MPI" in sys.modules]))
"""


def test_packages_are_imported_at_the_first_use_of_their_names():
    done = started([sys.executable, "-c", _PROGRAM], 60)
    assert done.returncode == 0, done.stderr
    before, has_torch, names, has_mpi = json.loads(done.stdout)
    assert before == [] and not has_torch and not has_mpi
    assert names == ["mpidist.ddp.module", "rpc_sync", "mpidist.slurm.job"]


def test_a_name_that_does_not_exist_is_an_attribute_error():
    assert not hasattr(mpidist, "dpp") and {"ddp", "comm", "__version__"} <= set(dir(mpidist))
