"""Packages and abilities that a virtual cluster needs on this machine."""

from __future__ import annotations

import ctypes.util
import os
import shutil
import subprocess

from tests.tools import debian_packages

PACKAGES = ("slurm-wlm", "munge", "libpmix2", "libpmix-dev")


UNSHARE = ("unshare", "--uts")


def problem() -> str | None:
    """Return what this machine lacks for a virtual cluster, or None."""
    absent = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if path_of(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed"
    # A slurmd that starts without this library never offers --mpi=pmix.
    if ctypes.util.find_library("pmix") is None:
        return "libpmix2 not installed"
    if os.geteuid() != 0:
        return "slurmd must run as root"
    trial = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True)
    return (
        None
        if trial.returncode == 0
        else f"the nodes need host names of their own: {trial.stderr.strip()}"
    )


def install() -> str | None:
    """Install missing packages; return the reason for a failure, or None."""
    if (missing := problem()) is None:
        return None
    failure = debian_packages.install(PACKAGES)
    return f"{missing}; {failure}" if failure is not None else problem()


def path_of(name: str) -> str | None:
    """Return the path of a program; daemons may be only on root's PATH."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin")
