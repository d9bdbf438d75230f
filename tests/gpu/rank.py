"""Rank of ``make gpu``: mpidist starts MPI after this rank's CUDA context, then a module is run.

``python -m tests.gpu.rank pytest -x …`` is the counterpart of ``python -m mpi4py -m pytest -x …``.
"""

import runpy
import sys

import torch

from mpidist.comm.mpi import library, runtime

if __name__ == "__main__":
    if torch.cuda.is_available():
        torch.cuda.set_device(runtime.device())
    library.load()
    sys.argv = ["mpi4py", "-m", *sys.argv[1:]]
    runpy.run_module("mpi4py", run_name="__main__", alter_sys=True)
