"""Packages of Debian that tests need: ``python -m tests.tools.debian_packages PROGRAM PACKAGE...``.

Installs the packages where the program is missing; without root or apt-get it prints the reason,
and the tests that need the program say so themselves.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

# -o: wait for the lock, because another apt-get may run.
_APT = (
    *("apt-get", "-qq", "-y", "-o", "DPkg::Lock::Timeout=60"),
    *("-o", "Acquire::Retries=2", "-o", "Acquire::http::Timeout=30"),
)


def install(packages: Sequence[str]) -> str | None:
    """Install packages; return the reason for a failure, or None."""
    if os.geteuid() != 0:
        return f"only root can install {', '.join(packages)}"
    if shutil.which("apt-get") is None:
        return f"no apt-get here: install the equivalents of {', '.join(packages)}"
    for words in (["update"], ["install", "--no-install-recommends", *packages]):
        done = subprocess.run(
            [*_APT, *words],
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            return f"apt-get {words[0]} failed: {(done.stderr or done.stdout).strip()[-400:]}"
    return None


def main() -> None:
    program, packages = sys.argv[1], sys.argv[2:]
    if shutil.which(program) is None and (failure := install(packages)) is not None:
        print(f"{program} is missing: {failure}")


if __name__ == "__main__":
    main()
