"""Types of ``srun --mpi``: those that Slurm offers, and the one that fits an MPI library; pure.

``mpidist run`` and ``slurm/job.sh`` both choose here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from mpidist.comm.mpi.launcher_env import OPEN_MPI


def choose(abi: str, library: str, offered: Sequence[str]) -> str:
    """Return the type for an MPI library, or "" if Slurm offers none that its ranks understand.

    Args:
        abi: ``openmpi`` or ``mpich``.
        library: The library's version text and the path of its file, which name Cray's.
        offered: The types that Slurm offers.
    """
    if abi == OPEN_MPI:
        order = [
            "pmix",
            *sorted((name for name in offered if name.startswith("pmix_")), reverse=True),
        ]
    else:
        is_cray = "cray" in library.lower()
        order = ["cray_shasta", "pmi2"] if is_cray else ["pmi2", "cray_shasta"]
    return next((name for name in order if name in offered), "")


def parse(text: str) -> tuple[str, ...]:
    """Return the types in the output of ``srun --mpi=list``.

    Slurm prints one type per line, and the versions of pmix after a colon.
    """
    names: list[str] = []
    for line in text.splitlines():
        head, colon, tail = line.replace("srun: ", "").strip().partition(":")
        words = tail.split(",") if colon else [head]
        names += [word.strip() for word in words if re.fullmatch(r"\s*[a-z][a-z0-9_]*\s*", word)]
    return tuple(dict.fromkeys(names))
