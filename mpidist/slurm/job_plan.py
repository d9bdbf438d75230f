"""Plan of a submission: a shipped job script with the options, the site's values, the program.

The plan is checked against itself and against limits of the partition, before sbatch is called:
Slurm accepts some jobs that never start, and job scripts refuse others only after they have waited
for nodes.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mpidist import shipped
from mpidist.errors import LaunchError
from mpidist.slurm import job_script, programs
from mpidist.slurm.job_script import Options
from mpidist.slurm.job_shape import (
    completed,
    cpus_for_memory,
    objections,
    own_objections,
    shape_of,
)
from mpidist.slurm.partition import Partition, counted, in_words

_ENV = "env.sh"
# Similarity of two names, from 0 to 1, from which on one counts as a misspelling of the other.
_ALMOST = 0.85
# Variables of job.sh that a user may set.
_OF_JOBS = ("MPIDIST_CHECKPOINT",)
# Numbers that the plan completes.
_OPEN = ("nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time")
_RANKS = {"nodes", "ntasks", "ntasks-per-node", "gpus-per-node"}


@dataclass(frozen=True)
class JobPlan:
    """A job to submit.

    Attributes:
        text: The job script, for sbatch.
        options: The options, completed by the site's values and the partition's.
        notes: What the user should know before the submission.
    """

    text: str
    options: Options
    notes: tuple[str, ...]


def names() -> list[str]:
    """Return the names of the shipped job scripts."""
    return sorted(path.stem for path in shipped.folder("slurm").glob("*.sbatch"))


def planned(
    name: str,
    options: Options,
    env_file: Path | None,
    environ: Mapping[str, str],
    partitions: Mapping[str, Partition] | None = None,
) -> JobPlan:
    """Return the job to submit.

    Args:
        name: Name of a shipped script.
        options: The user's options; ``folder`` and ``env_file`` are filled in.
        env_file: The site's ``env.sh``; None for that of ``MPIDIST_SLURM``, else the shipped one.
        environ: Usually ``os.environ``.
        partitions: The cluster's partitions by name; None if they are unknown.

    Raises:
        LaunchError: No such script or file; a job above a limit, or that would end at once.
        ValueError: A value that sbatch would refuse.
    """
    folder = shipped.folder("slurm")
    if name not in names():
        raise LaunchError(f"there is no job script {name}: {', '.join(names())}")
    own = Path(environ.get("MPIDIST_SLURM") or folder) / _ENV
    file = (env_file or own).resolve()
    if not file.is_file():
        raise LaunchError(
            f"{file}: no such file; --env names the site's env.sh, and {folder / _ENV} is one to "
            "copy"
        )
    # As the arguments, whose bytes it is to carry whatever the locale.
    script = os.fsdecode((folder / f"{name}.sbatch").read_bytes())
    site_values = job_script.values_of(_read(file))
    shipped_values = job_script.values_of(_read(folder / _ENV))
    require_known(options.settings, {*site_values, *shipped_values})
    if file == (folder / _ENV).resolve():
        # Nobody has edited it: its number of GPUs says nothing about this cluster.
        site_values.pop("MPIDIST_GPUS_PER_NODE", None)
    values = {**site_values, **options.settings}
    is_in_image = bool(values.get("MPIDIST_IMAGE"))
    require_program(name, options.arguments, is_in_image, bool(values.get("MPIDIST_MODULES")))
    given: dict[str, str | None] = {**job_script.site_header(values), **options.header}
    given |= job_script.header_from(environ, given)
    filled = replace(options, header=given, folder=str(folder.resolve()), env_file=str(file))
    job_script.validate(filled)
    shipped_header = job_script.header_of(script)
    where = _partitions_of(given, partitions)
    header = completed(name, given, shipped_header, where[0] if where else None)
    _require_sound({**shipped_header, **header}, where, has_cpu_ranks=name == "couple")
    if name == "couple":
        programs.divided(programs.parse(options.arguments), _ranks({**shipped_header, **header}))
    filled = replace(
        filled,
        header=header,
        settings={
            **environment_of(values, sys.prefix, sys.base_prefix),
            **options.settings,
            **job_script.settings_of(header),
        },
        arguments=options.arguments
        if is_in_image or name == "bench"
        else absolute(name, options.arguments),
    )
    text = job_script.render(script, filled)
    return JobPlan(text, filled, _notes(shipped_header, given, header, where, partitions))


def _partitions_of(
    header: Mapping[str, str | None], partitions: Mapping[str, Partition] | None
) -> list[Partition]:
    """Return the partitions that a job may run in, as far as they are known."""
    known = partitions or {}
    if asked := header.get("partition"):
        return [known[name] for name in asked.split(",") if name in known]
    return [partition for partition in known.values() if partition.is_default]


def _ranks(header: Mapping[str, str | None]) -> int:
    """Return the number of ranks that a complete header asks for."""
    shape = shape_of(header)
    return int(header.get("ntasks") or shape.nodes * shape.ranks)


def _require_sound(
    header: Mapping[str, str | None], where: Sequence[Partition], has_cpu_ranks: bool
) -> None:
    """Refuse a job that fails everywhere, or in each of its partitions."""
    if own := own_objections(header, has_cpu_ranks):
        raise LaunchError("; ".join(own))
    by_partition = {str(partition): objections(header, partition) for partition in where}
    if by_partition and all(by_partition.values()):
        raise LaunchError(
            "; ".join(f"{name}: {'; '.join(found)}" for name, found in by_partition.items())
        )


def _notes(
    shipped_header: Mapping[str, str],
    given: Mapping[str, str | None],
    header: Mapping[str, str | None],
    where: Sequence[Partition],
    partitions: Mapping[str, Partition] | None,
) -> tuple[str, ...]:
    asked = {**shipped_header, **header}
    shape = shape_of(asked)
    chosen = [key for key in _OPEN if key in header and key not in given]
    source = f" ({', '.join(f'--{key}' for key in chosen)} by the partition)" if chosen else ""
    notes = [f"{shape}{source if where else ''}; time limit {asked.get('time') or 'none'}"]
    if where:
        notes.append(" or ".join(map(str, where)))
        notes += [
            f"partition {partition.name} starts no jobs at present"
            for partition in where
            if not partition.is_up
        ]
    elif partitions is None:
        notes.append("nothing is taken from a partition: sinfo was not found, or failed")
    else:
        notes.append("nothing is taken from a partition: no known one is given, none the default")
    least = shape_of(shipped_header)
    if where and not _RANKS & set(given) and shape.nodes * shape.ranks < least.nodes * least.ranks:
        notes.append(
            f"{counted(shape.nodes * shape.ranks, 'rank')}, where the script alone starts "
            f"{least.nodes * least.ranks}: the partition has no more"
        )
    notes += filter(None, (_memory_note(asked, partition) for partition in where))
    if shape.gpus and shape.ranks < shape.gpus:
        unused = shape.gpus - shape.ranks
        verb = "stays" if unused == 1 else "stay"
        notes.append(f"{counted(unused, 'GPU')} of each node {verb} unused")
    return tuple(notes)


def _memory_note(header: Mapping[str, str | None], partition: Partition) -> str:
    """Return what the partition makes of the job's memory; empty if that is as asked for."""
    shape = shape_of(header)
    own = shape.ranks * shape.cpus
    if (cpus := cpus_for_memory(shape, partition)) > own:
        return (
            f"partition {partition.name} gives at most {partition.memory.most_per_cpu}M for each "
            f"CPU: the job takes, and pays for, {cpus} CPUs of a node in place of {own}"
        )
    if shape.memory_mb or any(header.get(option) for option in job_script.MEMORY):
        return ""
    default_mb = partition.memory.default_mb(own)
    return (
        f"partition {partition.name} gives {in_words(default_mb)} on a node: --mem for more"
        if default_mb
        else ""
    )


def _read(file: Path) -> str:
    """Return the text of an ``env.sh``.

    Raises:
        LaunchError: bash could not read the file.
    """
    try:
        text = file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise LaunchError(f"{file} is no text: {error}") from error
    if "\r" in text:
        raise LaunchError(
            f"{file} has the line ends of Windows, which bash does not read: sed -i 's/\\r$//' "
            f"{file}"
        )
    return text


def environment_of(values: Mapping[str, str], prefix: str, base_prefix: str) -> dict[str, str]:
    """Return a setting for this Python's virtual environment if ``env.sh`` names no environment."""
    is_own = (
        prefix != base_prefix and not values.get("MPIDIST_VENV") and not values.get("MPIDIST_IMAGE")
    )
    return {"MPIDIST_VENV": prefix} if is_own else {}


def require_known(settings: Mapping[str, str], known: Collection[str]) -> None:
    """Refuse a setting whose name looks like a misspelled name of ``env.sh``.

    Raises:
        LaunchError: A misspelled name; the text has the probable one.
    """
    for name in settings:
        near = difflib.get_close_matches(name, known, 1, _ALMOST)
        if near and name not in known and name not in _OF_JOBS:
            raise LaunchError(f"--set {name}: env.sh has no such value; is {near[0]} meant?")


def _benchmarks() -> list[str]:
    files = shipped.folder("benchmarks").glob("bench_*.py")
    return sorted(path.stem.removeprefix("bench_") for path in files)


def require_program(
    name: str, arguments: Sequence[str], is_in_image: bool, has_modules: bool = False
) -> None:
    """Refuse arguments that the job script would refuse, before the job waits for its nodes.

    Args:
        name: Name of the job script.
        arguments: Arguments after ``--``.
        is_in_image: Programs are in a container image, whose files this process cannot see.
        has_modules: The job loads modules, whose commands this process may not see.

    Raises:
        LaunchError: Wrong arguments; the text describes valid ones.
    """
    if name == "test" and arguments:
        raise LaunchError(f"test checks the cluster, and takes no program; got {arguments[0]}")
    if name == "bench":
        if arguments and arguments[0] not in (benchmarks := _benchmarks()):
            raise LaunchError(
                "bench takes the name of a benchmark behind --, then its arguments: "
                f"{', '.join(benchmarks)}"
            )
        return
    if name == "couple":
        for one in programs.parse(arguments):
            if not is_in_image:
                programs.require_found(one, has_modules)
        return
    files = list(arguments[:1])
    if name == "array":
        if not arguments or not Path(arguments[0]).is_file():
            raise LaunchError(
                "array takes a file of arguments, one run a line: mpidist submit array --array 1-4 "
                "-- sweep.txt train.py"
            )
        files = list(arguments[1:2])
    for program in files:
        # Arguments without a program go to the example.
        if not program.startswith("-") and not is_in_image and not Path(program).is_file():
            raise LaunchError(
                f"{program}: no such file from here. A Python program and its arguments stand "
                f"behind --, without 'python': mpidist submit {name} -- train.py --epochs 3"
            )


def absolute(name: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments of a job script, programs as absolute paths if they are files."""
    if name == "couple":
        return programs.absolute(arguments)
    path = Path(arguments[0]) if arguments else None
    return (
        (str(path.resolve()), *arguments[1:])
        if path is not None and path.is_file()
        else tuple(arguments)
    )
