"""Shipped benchmarks: names, default numbers of ranks, and required packages."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path

from mpidist import shipped, whole_file
from mpidist.errors import LaunchError

# Default number of ranks.
RANKS = {
    "collectives": 2,
    "execution": 2,
    "rpc": 2,
    "ddp": 2,
    "oss": 2,
    "powersgd": 2,
    "kernels": 1,
    "device": 2,
    "autograd": 2,
    "owners": 2,
    "scaling": 2,
}
# Commands of a benchmark that start their own jobs or only read records. Commands in _SILENT write
# no files.
_ALONE = {"scaling": ("sweep", "report", "startup", "advise")}
_SILENT = ("advise",)
_LIBRARIES = ("matplotlib", "psutil", "rich")
# Arithmetic on recorded results draws and measures nothing.
_OF_ARITHMETIC = ("rich",)


def is_installed(name: str) -> bool:
    """Return whether a package can be imported."""
    return importlib.util.find_spec(name) is not None


def is_job(name: str, arguments: Sequence[str]) -> bool:
    """Return whether a benchmark with these arguments runs on ranks of a job."""
    return not arguments or arguments[0] not in _ALONE.get(name, ())


def program(
    name: str, output: Path, arguments: Sequence[str], has: Callable[[str], bool] = is_installed
) -> tuple[str, ...]:
    """Return a benchmark's path and arguments, and create its folder for results if it writes any.

    Args:
        name: One of ``RANKS``.
        output: Folder of the JSON and the plots.
        arguments: The benchmark's arguments.
        has: Returns whether a package can be imported.

    Raises:
        LaunchError: No such benchmark; missing packages; the folder cannot be created or written.
    """
    if name not in RANKS:
        raise LaunchError(f"there is no benchmark {name}: {', '.join(RANKS)}")
    path = shipped.folder("benchmarks") / f"bench_{name}.py"
    if not path.is_file():
        raise LaunchError(f"{path.name} is not in {path.parent}; install mpidist again")
    is_silent = bool(arguments) and arguments[0] in _SILENT
    libraries = _OF_ARITHMETIC if is_silent and "--measure" not in arguments else _LIBRARIES
    missing = [package for package in libraries if not has(package)]
    if missing:
        raise LaunchError(f"the benchmarks need {', '.join(missing)}: pip install 'mpidist[bench]'")
    if "--output" in arguments:
        raise LaunchError("--output is mpidist bench's own: put it before the --")
    if is_silent:
        return (str(path), *arguments)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"the folder of the results cannot be made: {error}") from error
    # Before the measurement, which may take minutes.
    if problem := whole_file.problem_of(output / "record.json"):
        raise LaunchError(
            f"the results cannot be written: {problem}; --output names another folder"
        )
    # After the arguments, because the first one may be a command, and --output is its option.
    return (str(path), *arguments, "--output", str(output.resolve()))
