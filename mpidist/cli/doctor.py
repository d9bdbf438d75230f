"""Examination of a machine or job: collects facts, tries small operations, applies rules.

Without a launcher the doctor examines this process, and starts two ranks with the MPI library's
launcher to see whether they connect. Under mpirun or srun all ranks are examined; rank 0 reports.
"""

from __future__ import annotations

import dataclasses
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import FrameType
from typing import NoReturn

from mpidist import progress_bar
from mpidist.cli import facts as process_facts
from mpidist.cli import first_program
from mpidist.cli.deadline import deadline
from mpidist.cli.facts import Facts
from mpidist.cli.finding import NOTE, PROBLEM, WARNING, Finding
from mpidist.cli.findings import findings
from mpidist.comm.discovery import child_job, installed, launcher_trial
from mpidist.comm.mpi import launcher_env
from mpidist.errors import MpidistError

# Checks in a separate job.
_HANDSHAKE = "two ranks of mpirun"
_FIRST_PROGRAM = "init_process_group and all_reduce on two ranks"
_SILENCE_S = 8.0
# The ranks import torch from a file system that may be cold.
_TORCH_SILENCE_S = 60.0


@dataclass(frozen=True)
class Report:
    """Result of an examination.

    Attributes:
        ranks: Facts of all ranks, by rank; only of this process if MPI did not start.
        findings: Findings, the most severe first.
        is_mine: This process prints the report.
    """

    ranks: list[Facts]
    findings: list[Finding]
    is_mine: bool

    def exit_code(self, strict: bool = False) -> int:
        """Return 1 if a problem was found, or with ``strict`` a warning, else 0."""
        levels = {PROBLEM, WARNING} if strict else {PROBLEM}
        return int(any(finding.level in levels for finding in self.findings))

    def as_data(self) -> dict[str, object]:
        """Return the report as data for a JSON file."""
        return {
            "ranks": [dataclasses.asdict(facts) for facts in self.ranks],
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "problems": sum(finding.level == PROBLEM for finding in self.findings),
            "warnings": sum(finding.level == WARNING for finding in self.findings),
            "notes": sum(finding.level == NOTE for finding in self.findings),
        }


def examine(environ: Mapping[str, str], timeout_s: float, tries_launcher: bool) -> Report:
    """Examine this process, or the job that this process is a rank of.

    Collective: over the job.

    Args:
        environ: Usually ``os.environ``, before MPI has started.
        timeout_s: Limit in seconds for the start of MPI on all ranks, and for each operation.
        tries_launcher: Without a launcher, also start two ranks by mpirun.
    """
    launch = launcher_env.from_environment(environ)
    is_alone = launch.size in (None, 1)
    late = (
        f"[rank {launch.rank or 0}] mpidist doctor: MPI did not start within {timeout_s:g} s. "
        "Do all ranks run it? Does the launcher belong to the MPI library that Python loads? "
        "This rank ends"
    )
    died = (
        f"[rank {launch.rank or 0}] mpidist doctor: the process ended while MPI started; MPI's "
        "own message above says more"
    )
    try:
        library = installed.installed()
    except MpidistError as error:
        return _without_mpi(
            process_facts.collect(environ, shutil.which("mpirun") or ""), error, launch.rank
        )
    with ThreadPoolExecutor(1) as pool, _ending_trials() if is_alone else nullcontext():
        trial = (
            pool.submit(_try_two_ranks, library.text)
            if is_alone and tries_launcher and library.mpirun
            else None
        )
        own = process_facts.collect(environ, shutil.which("mpirun") or "")
        # torch is imported before the deadline starts, because a cold network file system is slow.
        from mpidist.cli import questions

        try:
            with deadline(timeout_s, late, died):
                questions.start(timeout_s)
        except MpidistError as error:
            return _without_mpi(own, error, launch.rank)
        own = questions.ask(own, library)
        checks = {} if trial is None else trial.result()
        return report_of(own, checks, timeout_s)


def report_of(own: Facts, checks: Mapping[str, str], timeout_s: float) -> Report:
    """Run the small operations and gather the facts of all ranks. MPI must have started.

    A process alone that has a device tries MPI's operations on its memory, once a machine.

    Collective: over the job. Blocks: for seconds, and for minutes if operations hang.

    Args:
        own: This rank's facts, including those of MPI.
        checks: Results of earlier checks.
        timeout_s: Limit in seconds for each operation.
    """
    from mpidist.cli import questions

    mpi = own.mpi
    assert mpi is not None
    group = questions.trial_group(timeout_s)
    own = replace(
        own,
        checks={**checks, **questions.check(group, timeout_s)},
        clock_s=questions.clock(group),
        computing_s=questions.computing_time(group),
    )
    # If a check failed on one rank only, the gather waits until the other ranks' checks time out.
    ranks = questions.gather(own)
    # All ranks have the same facts and decide alike, because the next calls are collective.
    if not any(text for facts in ranks for text in facts.checks.values()):
        shares_memory = questions.shares_node_memory(group)
        own = replace(own, mpi=replace(mpi, shares_memory=shares_memory))
        if len(ranks) == 1 and own.device is not None:
            with progress_bar.spinner("tries MPI's operations on device memory", own.rank):
                questions.try_device_operations()
        ranks = questions.gather(questions.with_operations(own))
    group.close()
    return Report(ranks, findings(ranks), own.rank == 0)


@contextmanager
def _ending_trials() -> Iterator[None]:
    """End the jobs of the other thread if the block is left by an exception, Ctrl-C or SIGTERM."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    former = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except BaseException:
        child_job.end_all()
        raise
    finally:
        signal.signal(signal.SIGTERM, former)


def _try_two_ranks(library: str) -> dict[str, str]:
    checks = {_HANDSHAKE: launcher_trial.try_launcher(library, _SILENCE_S)}
    if not checks[_HANDSHAKE]:
        checks[_FIRST_PROGRAM] = first_program.try_two_ranks(library, _TORCH_SILENCE_S)
    return checks


def _without_mpi(own: Facts, error: MpidistError, rank: int | None) -> Report:
    own = replace(own, problem=str(error))
    # Only rank 0 prints, because ranks without MPI would all print the same report.
    return Report([own], findings([own]), rank in (None, 0))
