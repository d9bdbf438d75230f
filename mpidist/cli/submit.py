"""Submission of a shipped job script: fills in options and the site's ``env.sh``, calls sbatch."""

from __future__ import annotations

import difflib
import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mpidist import shipped
from mpidist.cli import job_script
from mpidist.cli.bench import RANKS
from mpidist.cli.job_script import Options
from mpidist.errors import LaunchError

_ENV = "env.sh"
_SUBMIT_S = 120.0
# Similarity of two names, from 0 to 1, from which on one counts as a misspelling of the other.
_ALMOST = 0.85
# Variables of job.sh that a user may set.
_OF_JOBS = ("MPIDIST_CHECKPOINT",)


def parse_pairs(texts: Sequence[str] | None, option: str) -> dict[str, str]:
    """Parse ``NAME=VALUE`` texts of a command-line option.

    Raises:
        ValueError: A text has another form.
    """
    pairs = [text.partition("=") for text in texts or ()]
    wrong = [name for name, equals, _ in pairs if not equals or not name]
    if wrong:
        raise ValueError(f"{option} takes NAME=VALUE; got {wrong[0]!r}")
    return {name: text for name, _, text in pairs}


def names() -> list[str]:
    """Return the names of the shipped job scripts."""
    return sorted(path.stem for path in shipped.folder("slurm").glob("*.sbatch"))


def text_of(
    name: str, options: Options, env_file: Path | None, environ: Mapping[str, str]
) -> tuple[str, Options]:
    """Return the text to submit, and the options completed by the site's values.

    Args:
        name: Name of a shipped script.
        options: The user's options; ``folder`` and ``env_file`` are filled in.
        env_file: The site's ``env.sh``; None for that of ``MPIDIST_SLURM``, else the shipped one.
        environ: Usually ``os.environ``.

    Raises:
        LaunchError: No such script or file.
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
    script = (folder / f"{name}.sbatch").read_text(encoding="utf-8")
    site_values = job_script.values_of(_read(file))
    require_known(options.settings, {*site_values, *job_script.values_of(_read(folder / _ENV))})
    values = {**site_values, **options.settings}
    is_in_image = bool(values.get("MPIDIST_IMAGE"))
    require_program(name, options.arguments, is_in_image)
    header: dict[str, str | None] = {**job_script.site_header(values), **options.header}
    header = fitted(header, job_script.header_of(script))
    filled = replace(
        options,
        header=header,
        settings={
            **environment_of(values, sys.prefix, sys.base_prefix),
            **options.settings,
            **job_script.settings_of(header),
        },
        arguments=options.arguments
        if is_in_image or name == "bench"
        else absolute(options.arguments),
        folder=str(folder.resolve()),
        env_file=str(file),
    )
    job_script.validate(filled)
    return job_script.render(script, filled), filled


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


def fitted(
    header: Mapping[str, str | None], shipped_header: Mapping[str, str]
) -> dict[str, str | None]:
    """Return the header with one rank per GPU, unless the header has a number of ranks.

    Zero GPUs remove the line for GPUs.
    """
    fitted_header = dict(header)
    gpus = (fitted_header.get("gpus-per-node") or "").split(":")[-1]
    is_number = gpus.isascii() and gpus.isdigit()
    if is_number and int(gpus) == 0:
        fitted_header["gpus-per-node"] = None
    elif (
        is_number
        and "ntasks-per-node" in shipped_header
        and not {"ntasks", "ntasks-per-node"} & set(fitted_header)
    ):
        fitted_header["ntasks-per-node"] = str(int(gpus))
    return fitted_header


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


def require_program(name: str, arguments: Sequence[str], is_in_image: bool) -> None:
    """Refuse arguments that the job script would refuse, before the job waits for its nodes.

    Args:
        name: Name of the job script.
        arguments: Arguments after ``--``.
        is_in_image: Programs are in a container image, whose files this process cannot see.

    Raises:
        LaunchError: Wrong arguments; the text describes valid ones.
    """
    if name == "test" and arguments:
        raise LaunchError(f"test checks the cluster, and takes no program; got {arguments[0]}")
    if name == "bench":
        if arguments and arguments[0] not in RANKS:
            raise LaunchError(
                "bench takes the name of a benchmark behind --, then its arguments: "
                f"{', '.join(RANKS)}"
            )
        return
    programs = list(arguments[:1])
    if name == "array":
        if not arguments or not Path(arguments[0]).is_file():
            raise LaunchError(
                "array takes a file of arguments, one run a line: mpidist submit array --array 1-4 "
                "-- sweep.txt train.py"
            )
        programs = list(arguments[1:2])
    for program in programs:
        # Arguments without a program go to the example.
        if not program.startswith("-") and not is_in_image and not Path(program).is_file():
            raise LaunchError(
                f"{program}: no such file from here. A Python program and its arguments stand "
                f"behind --, without 'python': mpidist submit {name} -- train.py --epochs 3"
            )


def absolute(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments, the first one as an absolute path if it is a file."""
    path = Path(arguments[0]) if arguments else None
    return (
        (str(path.resolve()), *arguments[1:])
        if path is not None and path.is_file()
        else tuple(arguments)
    )


def run(
    name: str, options: Options, env_file: Path | None, environ: Mapping[str, str], is_dry: bool
) -> int | None:
    """Submit a shipped job script and return sbatch's exit status; print the text if ``is_dry``.

    Raises:
        LaunchError: See ``text_of`` and ``submit``.
        ValueError: See ``text_of``.
    """
    text, filled = text_of(name, options, env_file, environ)
    if is_dry:
        print(text, end="")
        return None
    return submit(text, filled)


def submit(text: str, options: Options) -> int:
    """Pass a text to sbatch and return its exit status. sbatch prints the job number.

    Raises:
        LaunchError: There is no sbatch.
    """
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise LaunchError(
            "sbatch was not found: submit on a login node of a Slurm cluster, or look at the text "
            "with --dry-run"
        )
    environ = job_script.without_overrides(os.environ, options.header)
    try:
        return subprocess.run(
            [sbatch], input=text, text=True, env=environ, timeout=_SUBMIT_S, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"sbatch did not answer within {_SUBMIT_S:g} s; squeue --me says whether the job was "
            "taken"
        ) from None
