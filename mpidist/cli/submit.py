"""``mpidist submit``: prints the plan of a job, then passes it to sbatch."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpidist.slurm import submission
from mpidist.slurm.job_plan import planned
from mpidist.slurm.job_script import Options


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


def run(
    name: str, options: Options, env_file: Path | None, environ: Mapping[str, str], is_dry: bool
) -> int | None:
    """Submit a shipped job script and return sbatch's exit status; print the text if ``is_dry``.

    The plan is printed to stderr, before sbatch prints the job's number.

    Raises:
        LaunchError: See ``planned`` and ``call_sbatch``.
        ValueError: See ``planned``.
    """
    plan = planned(name, options, env_file, environ, submission.partitions())
    for note in plan.notes:
        print(f"mpidist submit: {note}", file=sys.stderr, flush=True)
    if is_dry:
        print(plan.text, end="")
        return None
    return submission.call_sbatch(plan).returncode
