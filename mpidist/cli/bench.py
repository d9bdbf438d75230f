"""Shipped benchmarks by name: which there are, the ranks they want, and what must be installed for them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path

from mpidist import shipped
from mpidist.errors import LaunchError

# Ranks unless others are asked for: kernels are measured by one rank, all else by two.
RANKS = {
    "collectives": 2, "execution": 2, "rpc": 2, "ddp": 2, "oss": 2, "powersgd": 2, "kernels": 1, "device": 2, "autograd": 2,
    "wire": 2, "owners": 2, "scaling": 2,
}  # fmt: skip
# Commands of a benchmark that are no job: they start jobs by themselves, or read records. Those of
# _SILENT write nothing.
_ALONE = {"scaling": ("sweep", "report", "startup", "advise")}
_SILENT = ("advise",)
_LIBRARIES = ("matplotlib", "psutil", "tabulate")


def is_installed(name: str) -> bool:
    """Say whether a package can be imported."""
    return importlib.util.find_spec(name) is not None


def is_job(name: str, arguments: Sequence[str]) -> bool:
    """Say whether a benchmark with these arguments is to be started on several ranks."""
    return not arguments or arguments[0] not in _ALONE.get(name, ())


def program(
    name: str, output: Path, arguments: Sequence[str], has: Callable[[str], bool] = is_installed
) -> tuple[str, ...]:
    """Return a benchmark's path and arguments; its folder for results is made.

    Args:
        name: One of ``RANKS``.
        output: Folder of the JSON and the plots.
        arguments: Of the benchmark.
        has: Says whether a package can be imported.

    Raises:
        LaunchError: No such benchmark; packages are missing; the folder cannot be made.
    """
    if name not in RANKS:
        raise LaunchError(f"there is no benchmark {name}: {', '.join(RANKS)}")
    path = shipped.folder("benchmarks") / f"bench_{name}.py"
    if not path.is_file():
        raise LaunchError(f"{path.name} is not in {path.parent}; install mpidist again")
    missing = [package for package in _LIBRARIES if not has(package)]
    if missing:
        raise LaunchError(f"the benchmarks need {', '.join(missing)}: pip install 'mpidist[bench]'")
    if "--output" in arguments:
        raise LaunchError("--output is mpidist bench's own: put it before the --")
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"the folder of the results cannot be made: {error}") from error
    if arguments and arguments[0] in _SILENT:
        return (str(path), *arguments)
    # Behind the arguments: the first may be a command of the benchmark's, whose option it is.
    return (str(path), *arguments, "--output", str(output.resolve()))
