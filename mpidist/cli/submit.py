"""Submission of a shipped job script: reads it and the site's env.sh, renders, and hands the text to sbatch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mpidist import shipped
from mpidist.cli import job_script
from mpidist.cli.job_script import Options
from mpidist.errors import LaunchError

_ENV = "env.sh"
_SUBMIT_S = 120.0


def names() -> list[str]:
    """Return the names of the shipped job scripts."""
    return sorted(path.stem for path in shipped.folder("slurm").glob("*.sbatch"))


def text_of(name: str, options: Options, env_file: Path | None, environ: Mapping[str, str]) -> tuple[str, Options]:
    """Return the text to submit, and the options with the site's values in their place.

    Args:
        name: Of a shipped script.
        options: The user's; ``folder`` and ``env_file`` are filled in.
        env_file: The site's ``env.sh``; None: that of ``MPIDIST_SLURM``, else the shipped one.
        environ: Usually ``os.environ``.

    Raises:
        LaunchError: No such script, no such file.
        ValueError: A value that sbatch would not take.
    """
    folder = shipped.folder("slurm")
    if name not in names():
        raise LaunchError(f"there is no job script {name}: {', '.join(names())}")
    own = Path(environ.get("MPIDIST_SLURM") or folder) / _ENV
    file = (env_file or own).resolve()
    if not file.is_file():
        raise LaunchError(f"{file}: no such file; --env names the site's env.sh, and {folder / _ENV} is one to copy")
    script = (folder / f"{name}.sbatch").read_text(encoding="utf-8")
    values = {**job_script.values_of(file.read_text(encoding="utf-8")), **options.settings}
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
        arguments=absolute(options.arguments),
        folder=str(folder.resolve()),
        env_file=str(file),
    )
    job_script.validate(filled)
    return job_script.render(script, filled), filled


def fitted(header: Mapping[str, str | None], shipped_header: Mapping[str, str]) -> dict[str, str | None]:
    """Return the header with one rank for each GPU, unless the ranks of a node were given; no GPUs take the line out."""
    made = dict(header)
    gpus = (made.get("gpus-per-node") or "").split(":")[-1]
    if gpus.isdigit() and int(gpus) == 0:
        made["gpus-per-node"] = None
    elif gpus.isdigit() and "ntasks-per-node" in shipped_header and not {"ntasks", "ntasks-per-node"} & set(made):
        made["ntasks-per-node"] = str(int(gpus))
    return made


def environment_of(values: Mapping[str, str], prefix: str, base_prefix: str) -> dict[str, str]:
    """Return the setting that has the job use this Python's environment, where ``env.sh`` names none."""
    is_own = prefix != base_prefix and not values.get("MPIDIST_VENV") and not values.get("MPIDIST_IMAGE")
    return {"MPIDIST_VENV": prefix} if is_own else {}


def absolute(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments, a program that is a file here by its absolute path.

    Raises:
        LaunchError: A Python script that is not there.
    """
    if not arguments:
        return ()
    path = Path(arguments[0])
    if path.suffix == ".py" and not path.is_file():
        raise LaunchError(f"{path}: no such file from here")
    return (str(path.resolve()), *arguments[1:]) if path.is_file() else tuple(arguments)


def submit(text: str, options: Options) -> int:
    """Hand a text to sbatch; return its exit status. sbatch prints the job's number.

    Raises:
        LaunchError: There is no sbatch.
    """
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise LaunchError("sbatch was not found: submit on a login node of a Slurm cluster, or look at the text with --dry-run")
    environ = job_script.without_overrides(os.environ, options.header)
    try:
        return subprocess.run([sbatch], input=text, text=True, env=environ, timeout=_SUBMIT_S, check=False).returncode
    except subprocess.TimeoutExpired:
        raise LaunchError(f"sbatch did not answer within {_SUBMIT_S:g} s; squeue --me says whether the job was taken") from None
