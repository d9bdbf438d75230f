"""Fixture of one virtual cluster for all tests of this folder: sites and submitted jobs."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mpidist.comm.mpi.launcher_env import without_launcher
from tests.slurm import cluster as virtual
from tests.slurm import packages
from tests.tools.support import ROOT, missing

_ENDED = (
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "BOOT_FAIL",
    "DEADLINE",
)
_POLL_S = 0.1
# For all jobs, on a machine with other load.
LIMIT_S = 300.0


class Job:
    """Submitted job, with its state in Slurm and its log."""

    def __init__(self, slurm: Slurm, number: str) -> None:
        self._slurm, self.number = slurm, number

    def fields(self) -> dict[str, str]:
        """Return the fields of ``scontrol show job`` by name."""
        return dict(
            re.findall(
                r"(\w[\w/:]*)=(\S*)",
                self._slurm.command("scontrol", "--oneliner", "show", "job", self.number),
            )
        )

    def log(self) -> str:
        """Return the log so far."""
        (path,) = self._slurm.work.glob(f"*-{self.number}.out")
        return path.read_text()

    def exit_code(self, limit_s: float = LIMIT_S) -> int:
        """Wait for the end of the job; return its exit code."""
        self.wait(lambda fields: fields["JobState"] in _ENDED, limit_s)
        code, number = self.fields()["ExitCode"].split(":")
        return int(code) or 128 * bool(int(number)) + int(number)

    def wait(self, condition: Callable[[dict[str, str]], bool], limit_s: float = LIMIT_S) -> None:
        """Wait until the job's fields satisfy ``condition``; a failure includes the log."""
        end = time.monotonic() + limit_s
        while not condition(fields := self.fields()):
            if time.monotonic() > end:
                with contextlib.suppress(ValueError):
                    pytest.fail(f"job {self.number} ({fields}) after {limit_s} s:\n{self.log()}")
                pytest.fail(f"job {self.number} has not begun after {limit_s} s: {fields}")
            time.sleep(_POLL_S)

    def start_again_now(self) -> bool:
        """Remove the two-minute delay of a requeued job; return whether the job was requeued."""
        fields = self.fields()
        assert int(fields["Restarts"]) > 0 or fields["JobState"] not in _ENDED, self.log()
        if int(fields["Restarts"]) == 0 or fields["JobState"] == "COMPLETING":
            return False
        # Wait a second: a node rejects a job that ended in the same second of its clock.
        if fields["JobState"] == "PENDING":
            self._slurm.command(
                "scontrol", "update", f"JobId={self.number}", "StartTime=now+2", check=False
            )
        return True


class Slurm:
    """Cluster from a user's view: commands, a folder for submission, and copies of ``slurm/``."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.work = folder, folder / "work"
        self.work.mkdir()
        # As in the login shell of a user, without this checkout's environment.
        kept = {
            name: text
            for name, text in without_launcher(os.environ).items()
            if not name.startswith(("MPIDIST_", "OMP_"))
        }
        self.environment = {
            **kept,
            "SLURM_CONF": str(folder / "slurm.conf"),
            "OMP_NUM_THREADS": "1",
            # The jobs share two cores: a rank that polls leaves its core to one that computes.
            "OMPI_MCA_mpi_yield_when_idle": "1",
        }

    def command(self, *words: str | Path, check: bool = True, **environment: str) -> str:
        """Run a command in the submission folder; return its output."""
        done = subprocess.run(
            words,
            cwd=self.work,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert not check or done.returncode == 0, f"{words}: {done.stderr}"
        return (done.stdout if check else done.stdout + done.stderr).strip()

    def site(self, name: str, lines: str = "", **values: str | int) -> Path:
        """Copy ``slurm/`` and edit ``env.sh``, as a user does."""
        site = self.folder / name
        shutil.copytree(ROOT / "slurm", site)
        text = (site / "env.sh").read_text()
        for key, value in {"VENV": sys.prefix, **values}.items():
            text, count = re.subn(rf'(?m)^MPIDIST_{key}=".*"$', f'MPIDIST_{key}="{value}"', text)
            assert count == 1, f"env.sh has no value MPIDIST_{key}"
        (site / "env.sh").write_text(text + lines)
        return site

    def submit(
        self, script: Path, *arguments: str | Path, options: str = "", **environment: str
    ) -> Job:
        """Source the values and submit, as in slurm/README.md; one node and CPU by default."""
        line = (
            f'source "{script.parent}/env.sh"; sbatch --parsable --cpus-per-task=1 {options} "$@"'
        )
        words = ("bash", "-euc", line, "sbatch", script, *arguments)
        return Job(self, self.command(*words, **environment).split("\n")[-1])


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """Yield the running cluster, and remove it afterwards."""
    if os.environ.get("MPIDIST_CI") == "1":
        reason = packages.install()
    else:
        reason = packages.problem()
    if reason:
        missing(f"{reason} (as root: python -m tests.slurm.cluster install)")
    # Names of sockets must be short.
    folder = Path(tempfile.mkdtemp(prefix="mpidist-slurm-", dir="/tmp"))
    command = [sys.executable, "-m", virtual.__name__, "hold", str(folder)]
    # The cluster ends with this pipe, even if this process is killed.
    holder = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "ready\n", (
            "the virtual cluster did not start"
        )
        yield Slurm(folder)
    finally:
        assert holder.stdin is not None
        holder.stdin.close()
        holder.wait(timeout=60)
        assert not (left := virtual.leftovers(folder)), left
        shutil.rmtree(folder, ignore_errors=True)
