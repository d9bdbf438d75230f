"""One virtual cluster for all tests of this folder, two sites on it, and the jobs that they submit."""

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
from tests.support import ROOT, missing

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
LIMIT_S = 300.0  # for all jobs, on a machine that does other things beside


class Job:
    """A submitted job: what Slurm and its log say of it."""

    def __init__(self, slurm: Slurm, number: str) -> None:
        self._slurm, self.number = slurm, number

    def fields(self) -> dict[str, str]:
        """Return what ``scontrol show job`` has, by name."""
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
        """Wait for the job's end; return its exit code."""
        self.wait(lambda fields: fields["JobState"] in _ENDED, limit_s)
        code, number = self.fields()["ExitCode"].split(":")
        return int(code) or 128 * bool(int(number)) + int(number)

    def wait(self, condition: Callable[[dict[str, str]], bool], limit_s: float = LIMIT_S) -> None:
        """Wait until the job's fields fulfil ``condition``; the log is in the failure."""
        end = time.monotonic() + limit_s
        while not condition(fields := self.fields()):
            if time.monotonic() > end:
                with contextlib.suppress(ValueError):
                    pytest.fail(f"job {self.number} ({fields}) after {limit_s} s:\n{self.log()}")
                pytest.fail(f"job {self.number} has not begun after {limit_s} s: {fields}")
            time.sleep(_POLL_S)

    def start_again_now(self) -> bool:
        """Take from a requeued job the two minutes that Slurm lets pass before its next run; say whether it is requeued."""
        fields = self.fields()
        assert int(fields["Restarts"]) > 0 or fields["JobState"] not in _ENDED, self.log()
        if int(fields["Restarts"]) == 0 or fields["JobState"] == "COMPLETING":
            return False
        # Not in this second: a node refuses what it has been told to end, and its clock for that
        # has seconds.
        if fields["JobState"] == "PENDING":
            self._slurm.command(
                "scontrol", "update", f"JobId={self.number}", "StartTime=now+2", check=False
            )
        return True


class Slurm:
    """The cluster as its user sees it: commands, a folder to submit from, and the sites' copies of ``slurm/``."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.work = folder, folder / "work"
        self.work.mkdir()
        # As in a login shell of somebody who has none of this checkout's environment.
        kept = {
            name: text
            for name, text in without_launcher(os.environ).items()
            if not name.startswith(("MPIDIST_", "OMP_"))
        }
        self.environment = {
            **kept,
            "SLURM_CONF": str(folder / "slurm.conf"),
            "OMP_NUM_THREADS": "1",
        }

    def command(self, *words: str | Path, check: bool = True, **environment: str) -> str:
        """Run a command in the folder that jobs are submitted from; return its output."""
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
        """Copy ``slurm/`` and edit its ``env.sh``, as a user does."""
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
        """Source the site's values and submit, as slurm/README.md says; one node and one CPU a rank unless told otherwise."""
        line = (
            f'source "{script.parent}/env.sh"; sbatch --parsable --cpus-per-task=1 {options} "$@"'
        )
        words = ("bash", "-euc", line, "sbatch", script, *arguments)
        return Job(self, self.command(*words, **environment).split("\n")[-1])


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """The running cluster; nothing of it remains."""
    if os.environ.get("MPIDIST_CI") == "1":
        reason = virtual.install()
    else:
        reason = virtual.problem()
    if reason:
        missing(f"{reason} (as root: python -m tests.slurm.cluster install)")
    # Names of sockets are short.
    folder = Path(tempfile.mkdtemp(prefix="mpidist-slurm-", dir="/tmp"))
    command = [sys.executable, "-m", virtual.__name__, "hold", str(folder)]
    # The cluster ends with the pipe, however this process ends.
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
