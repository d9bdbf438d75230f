"""Submission of a planned job: asks sinfo and scontrol for the partitions, calls sbatch.

sbatch is called twice: ``--test-only`` has Slurm say whether it could start the job.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from mpidist.errors import LaunchError
from mpidist.slurm import job_script, partition
from mpidist.slurm.job import Job
from mpidist.slurm.job_plan import JobPlan, planned
from mpidist.slurm.job_script import Options
from mpidist.slurm.partition import Partition

_SINFO_S = 20.0
_SUBMIT_S = 120.0

_log = logging.getLogger(__name__)


def submit(
    script: str,
    *arguments: str | os.PathLike[str],
    nodes: int | None = None,
    ntasks_per_node: int | None = None,
    gpus_per_node: int | str | None = None,
    cpus_per_task: int | None = None,
    mem: int | str | None = None,
    time: int | str | None = None,
    partition: str | None = None,
    account: str | None = None,
    array: str | None = None,
    name: str | None = None,
    sbatch: Mapping[str, str] | None = None,
    settings: Mapping[str, str] | None = None,
    env: str | os.PathLike[str] | None = None,
    is_tested: bool = True,
) -> Job:
    """Submit a shipped job script, as ``mpidist submit`` does, and return the job.

    The plan is logged at level INFO. Numbers left out are taken from the partition.

    Args:
        script: Name of the job script: ``"ddp"``, ``"oss"``, ``"rpc"``, ``"array"``,
            ``"couple"``, ``"bench"``, ``"test"``.
        arguments: The program and its arguments; none for the script's example. Several programs
            for ``"couple"``, with ``"::"`` between them.
        nodes: Nodes of the job.
        ntasks_per_node: Ranks of a node.
        gpus_per_node: GPUs of a node, one rank each; ``"a100:4"`` names their type; 0 for none.
        cpus_per_task: CPUs of a rank.
        mem: Memory of a node: MB, or a text as ``"64G"``; 0 for all that it has.
        time: Limit: minutes, or a text as ``"1-12:00:00"``.
        partition: Partition, or several, divided by commas.
        account: Account to charge.
        array: Tasks of a job array, as ``"1-99%4"``.
        name: Name of the job.
        sbatch: Other options of sbatch by long name, as ``{"qos": "low"}``.
        settings: Values of ``env.sh`` for this job.
        env: The site's ``env.sh``; None for that of ``MPIDIST_SLURM``, else the shipped one.
        is_tested: Ask ``sbatch --test-only`` first. It also refuses jobs that would wait: for
            nodes or a partition that are down, or behind a reservation.

    Raises:
        LaunchError: No such script or program; a job that Slurm would not start, or that would end
            at once; there is no sbatch, or it refuses the job.
        ValueError: A value that sbatch would refuse.

    Example:
        >>> job = mpidist.slurm.submit(
        ...     "ddp", "train.py", "--epochs", "3", nodes=2
        ... )  # doctest: +SKIP
        >>> job.wait()  # doctest: +SKIP
        'COMPLETED'
    """
    given = {
        "job-name": name,
        "nodes": nodes,
        "ntasks-per-node": ntasks_per_node,
        "gpus-per-node": gpus_per_node,
        "cpus-per-task": cpus_per_task,
        "mem": mem,
        "time": time,
        "account": account,
        "partition": partition,
        "array": array,
    }
    header = {key: str(value) for key, value in given.items() if value is not None}
    words = tuple(os.fspath(word) for word in arguments)
    options = Options({**header, **(sbatch or {})}, dict(settings or {}), words)
    plan = planned(script, options, None if env is None else Path(env), os.environ, partitions())
    for note in plan.notes:
        _log.info("%s", note)
    done = call_sbatch(plan, is_captured=True, is_tested=is_tested)
    if done.returncode != 0:
        raise LaunchError(f"sbatch ended with {done.returncode}: {' '.join(done.stderr.split())}")
    # With several clusters: "4711;cluster".
    return Job(done.stdout.strip().split("\n")[-1].split(";")[0])


def partitions() -> dict[str, Partition] | None:
    """Return the cluster's partitions by name as sinfo prints them; None if it does not.

    Their limits of memory are scontrol's; without it they are unknown.
    """
    sinfo = shutil.which("sinfo")
    if sinfo is None:
        return None
    try:
        done = subprocess.run(
            [sinfo, "--all", "--noheader", "--exact", "-o", partition.FORMAT],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_SINFO_S,
            check=False,
        )
        if done.returncode != 0:
            raise ValueError(" ".join(done.stderr.split()) or f"status {done.returncode}")
        found = partition.parse(done.stdout)
        return partition.with_memory_limits(found, _shown_partitions()) or None
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        _log.warning("sinfo does not say what the partitions have: %s", error)
        return None


def _shown_partitions() -> str:
    """Return what ``scontrol show partition`` prints; nothing if it fails."""
    scontrol = shutil.which("scontrol")
    if scontrol is None:
        return ""
    try:
        done = subprocess.run(
            [scontrol, "--oneliner", "--all", "show", "partition"],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_SINFO_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        _log.warning("scontrol does not say how much memory jobs may have: %s", error)
        return ""
    return done.stdout if done.returncode == 0 else ""


def call_sbatch(
    plan: JobPlan, is_captured: bool = False, is_tested: bool = True
) -> subprocess.CompletedProcess[str]:
    """Pass a job that Slurm could start to sbatch, and return the ended process.

    Args:
        plan: The job.
        is_captured: Keep sbatch's output: the job's number, or its error. Otherwise it goes where
            this process's does.
        is_tested: Have Slurm say first whether it could start the job.

    Raises:
        LaunchError: There is no sbatch, it did not answer, or Slurm would not start the job.
    """
    tested = _sbatch(plan, "--test-only", is_captured=True) if is_tested else None
    if tested is not None and tested.returncode != 0:
        said = " ".join(f"{tested.stderr} {tested.stdout}".split())
        raise LaunchError(
            f"sbatch --test-only: {said or f'status {tested.returncode}, without a word'}. The "
            f"job: {'; '.join(plan.notes)}. Slurm also refuses so what would wait: for nodes or a "
            "partition that are down, or behind a reservation. sbatch itself takes such a job: "
            "mpidist submit ... --dry-run | sbatch, or submit(..., is_tested=False)"
        )
    return _sbatch(plan, *(["--parsable"] if is_captured else []), is_captured=is_captured)


def _sbatch(plan: JobPlan, *options: str, is_captured: bool) -> subprocess.CompletedProcess[str]:
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise LaunchError(
            "sbatch was not found: submit on a login node of a Slurm cluster, or look at the text "
            "with --dry-run"
        )
    try:
        done = subprocess.run(
            [sbatch, *options],
            # The bytes of the arguments, whatever the locale.
            input=os.fsencode(plan.text),
            env=job_script.without_overrides(os.environ, plan.options.header),
            timeout=_SUBMIT_S,
            check=False,
            capture_output=is_captured,
        )
    except subprocess.TimeoutExpired:
        taken = "" if "--test-only" in options else "; squeue --me says whether the job was taken"
        raise LaunchError(
            f"{' '.join(['sbatch', *options])} did not answer within {_SUBMIT_S:g} s{taken}"
        ) from None
    out, err = ((said or b"").decode(errors="replace") for said in (done.stdout, done.stderr))
    return subprocess.CompletedProcess(done.args, done.returncode, out, err)
