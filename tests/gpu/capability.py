"""Trial of MPI's operations on device memory, for ``make gpu``; caches the results for the tests.

The trial takes up to minutes if operations hang. Without it the tests' device memory is staged.
``python -m tests.gpu.capability``, without a launcher.
"""

from __future__ import annotations

import torch

from mpidist.comm.discovery import capability
from mpidist.comm.discovery.trial_operations import WORKS
from mpidist.comm.mpi import runtime


def main() -> None:
    device = runtime.device()
    if device.type == "cuda":
        capability.try_operations(device)
    found = capability.capabilities()
    print(f"{found.library}\nCUDA-aware: {found.cuda_aware} ({found.cuda_source})")
    print(f"ROCm-aware: {found.rocm_aware} ({found.rocm_source})")
    for operation, verdict in found.operations.items():
        print(f"  {operation:24} {verdict}")
    working = sum(verdict.startswith(WORKS) for verdict in found.operations.values())
    print(
        f"{working} of {len(found.operations)} operations work on {device} of torch "
        f"{torch.__version__}",
        flush=True,
    )


if __name__ == "__main__":
    main()
