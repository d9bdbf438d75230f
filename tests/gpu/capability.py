"""Report of MPI's capabilities on device memory, for ``make gpu``; caches the result for the tests.

The trial takes up to minutes if operations hang; inside a test, faulthandler would end it.
Collective: ``mpirun -n 2 python -m tests.gpu.rank tests.gpu.capability``.
"""

from __future__ import annotations

import torch

from mpidist.comm import init
from mpidist.comm.discovery import capability
from mpidist.comm.mpi import runtime


def main() -> None:
    group = init()
    device = runtime.device()
    working = (
        capability.agreed_operations(group._comm, device) if device.type == "cuda" else frozenset()
    )
    found = capability.capabilities()
    if group.rank == 0:
        print(f"{found.library}\nCUDA-aware: {found.cuda_aware} ({found.cuda_source})")
        print(f"ROCm-aware: {found.rocm_aware} ({found.rocm_source})")
        for operation, verdict in found.operations.items():
            print(f"  {operation:24} {'yes' if operation in working else 'no':4} {verdict}")
        print(
            f"{len(working)} of {len(found.operations)} operations work on {device} of torch "
            f"{torch.__version__}",
            flush=True,
        )


if __name__ == "__main__":
    main()
