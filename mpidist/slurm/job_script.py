"""Rendering of job scripts for sbatch from a shipped script and a user's options; pure.

A script has a header of ``#SBATCH --key=value`` lines after the first line, then commands. One
command sources ``env.sh``. Options replace or add header lines. The folder of the shipped scripts
and the program's arguments are written into the text, because a script on standard input has no
path of its own.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_HEADER = re.compile(r"#SBATCH --([a-z-]+)(?:=(.*))?$")
_ASSIGNMENT = re.compile(
    r"""^(?:export )?(MPIDIST_[A-Z_]+)=(?:"([^"]*)"|'([^']*)'|([^\s"';]*))\s*(?:#.*)?$""",
    re.MULTILINE,
)
_SOURCES_ENV = re.compile(r"^source .*env\.sh.*$", re.MULTILINE)
_SETTING = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# sbatch(1), --time and --array.
_TIME = re.compile(
    r"(\d+|\d+:[0-5]?\d|\d+:[0-5]?\d:[0-5]?\d|\d+-\d+(:[0-5]?\d){0,2}|UNLIMITED|INFINITE)"
)
_ARRAY = re.compile(r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%\d+)?", re.ASCII)
_WORD = re.compile(r"[^\s'\"\\\x00-\x1f\x7f]+")
_MEMORY = re.compile(r"[0-9]+[KMGTkmgt]?[Bb]?", re.ASCII)
_POSITIVE = ("nodes", "ntasks", "ntasks-per-node", "cpus-per-task")
# Names in env.sh.
_SITE = {
    "account": "MPIDIST_ACCOUNT",
    "partition": "MPIDIST_PARTITION",
    "gpus-per-node": "MPIDIST_GPUS_PER_NODE",
}
# Memory of a node, of a CPU, of a GPU: sbatch refuses two of them, also from different sources.
MEMORY = ("mem", "mem-per-cpu", "mem-per-gpu")
# Environment variables of sbatch, which take precedence over header lines.
_VARIABLES = {
    "account": "SBATCH_ACCOUNT",
    "partition": "SBATCH_PARTITION",
    "time": "SBATCH_TIMELIMIT",
    "job-name": "SBATCH_JOB_NAME",
    "gpus-per-node": "SBATCH_GPUS_PER_NODE",
    "array": "SBATCH_ARRAY_INX",
    "mem": "SBATCH_MEM_PER_NODE",
    "mem-per-cpu": "SBATCH_MEM_PER_CPU",
    "mem-per-gpu": "SBATCH_MEM_PER_GPU",
    "qos": "SBATCH_QOS",
    "constraint": "SBATCH_CONSTRAINT",
    "reservation": "SBATCH_RESERVATION",
    "output": "SBATCH_OUTPUT",
}


@dataclass(frozen=True)
class Options:
    """A user's options for one job.

    Attributes:
        header: Options of sbatch by long name; None removes a line.
        settings: Values that override those of ``env.sh``.
        arguments: The program and its arguments; empty for the script's example.
        folder: Absolute path of the folder of the shipped scripts.
        env_file: Absolute path of the site's ``env.sh``.
    """

    header: Mapping[str, str | None]
    settings: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    folder: str = ""
    env_file: str = ""


def validate(options: Options) -> None:
    """Require values that sbatch accepts.

    Raises:
        ValueError: A value that sbatch would refuse; the text describes valid values.
    """
    for key, text in options.header.items():
        if text is not None:
            _validate(key, text)
    for name in options.settings:
        if not _SETTING.fullmatch(name):
            raise ValueError(
                f"--set takes NAME=VALUE with the name of a variable of env.sh; got {name!r}"
            )
    for name, text in (
        ("folder of the job scripts", options.folder),
        ("path of env.sh", options.env_file),
    ):
        if not text.startswith("/"):
            raise ValueError(f"the {name} must be absolute; got {text!r}")


def render(script: str, options: Options) -> str:
    """Return the text for sbatch.

    Args:
        script: Text of the shipped script.
        options: Validated options.

    Raises:
        ValueError: The script has no first line ``#!``, or does not source ``env.sh``.
    """
    first, *lines = script.splitlines()
    if not first.startswith("#!"):
        raise ValueError(f"a job script begins with #!/bin/bash; this one with {first!r}")
    if "#SBATCH hetjob" in lines:
        raise ValueError(
            "a heterogeneous job has a header for each component: copy the script, edit it, and "
            "submit it with sbatch"
        )
    end = next(
        (number for number, line in enumerate(lines) if line and not line.startswith("#")),
        len(lines),
    )
    header = _headed([line for line in lines[:end] if line.startswith("#SBATCH")], options.header)
    words = [line for line in lines[:end] if line and not line.startswith("#SBATCH")]
    body = "\n".join(lines[end:])
    sources = [found for found in _SOURCES_ENV.findall(body)]
    if len(sources) != 1:
        raise ValueError("a job script sources env.sh in one line of its own")
    # Exported, because settings may be variables of MPI and UCX, which the ranks read.
    settings = [f"export {name}={shlex.quote(text)}" for name, text in options.settings.items()]
    sourced = "\n".join([f"source {shlex.quote(options.env_file)}", *settings])
    body = body.replace(sources[0], sourced)
    inlined = [f"export MPIDIST_SLURM={shlex.quote(options.folder)}"]
    if options.arguments:
        inlined.append(f"set -- {shlex.join(options.arguments)}")
    return "\n".join([first, *header, *words, "", *inlined, body, ""])


def header_of(script: str) -> dict[str, str]:
    """Return a script's sbatch options by long name; "" for an option without a value."""
    found = (_HEADER.match(line) for line in script.splitlines())
    return {match[1]: match[2] or "" for match in found if match}


def values_of(env: str) -> dict[str, str]:
    """Return the literal values of ``env.sh``, without bash's expansions."""
    return {
        name: double or single or bare for name, double, single, bare in _ASSIGNMENT.findall(env)
    }


def site_header(values: Mapping[str, str]) -> dict[str, str]:
    """Return account, partition and GPUs per node from ``env.sh`` as options of sbatch."""
    return {
        key: values[name]
        for key, name in _SITE.items()
        if values.get(name) and not set("$`") & set(values[name])
    }


def settings_of(header: Mapping[str, str | None]) -> dict[str, str]:
    """Return the values of ``env.sh`` that correspond to header lines; a removed GPU line is 0."""
    texts = {
        key: (header[key] or "0").split(":")[-1] if key == "gpus-per-node" else header[key] or ""
        for key in _SITE
        if key in header
    }
    return {_SITE[key]: text for key, text in texts.items()}


def without_overrides(
    environ: Mapping[str, str], header: Mapping[str, str | None]
) -> dict[str, str]:
    """Return the environment without the variables that take precedence over these lines."""
    keys = {*header, *(MEMORY if not set(MEMORY).isdisjoint(header) else ())}
    hidden = {_VARIABLES[key] for key in keys if key in _VARIABLES}
    return {name: text for name, text in environ.items() if name not in hidden}


def header_from(
    environ: Mapping[str, str], header: Mapping[str, str | None]
) -> dict[str, str | None]:
    """Return what sbatch takes from the environment of a job's place, limit, GPUs and memory.

    Args:
        environ: Usually ``os.environ``.
        header: Options that take precedence.
    """
    memory = MEMORY if set(MEMORY).isdisjoint(header) else ()
    return {
        key: environ[_VARIABLES[key]]
        for key in ("partition", "time", "gpus-per-node", *memory)
        if key not in header and environ.get(_VARIABLES[key])
    }


def _headed(lines: Sequence[str], header: Mapping[str, str | None]) -> list[str]:
    left = dict(header)
    kept = []
    for line in lines:
        match = _HEADER.match(line)
        key = match[1] if match else ""
        if key not in header:
            kept.append(line)
        elif (text := left.pop(key, None)) is not None:
            kept.append(_line(key, text))
    return kept + [_line(key, text) for key, text in left.items() if text is not None]


def _line(key: str, text: str) -> str:
    return f"#SBATCH --{key}={text}" if text else f"#SBATCH --{key}"


def _validate(key: str, text: str) -> None:
    if key in _POSITIVE and not (re.fullmatch(r"[0-9]+", text) and int(text) > 0):
        raise ValueError(f"--{key} must be a positive number; got {text!r}")
    if key == "gpus-per-node" and not re.fullmatch(r"([A-Za-z][\w.-]*:)?[0-9]+", text):
        raise ValueError(f"--{key} must be a number, or TYPE:NUMBER; got {text!r}")
    if key == "time" and not (
        _TIME.fullmatch(text) and any(digit in text for digit in "123456789UI")
    ):
        raise ValueError(
            "--time takes MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS:MINUTES:SECONDS, more than "
            f"none; got {text!r}"
        )
    if key in MEMORY and not _MEMORY.fullmatch(text):
        raise ValueError(f"--{key} takes a number of MB, or of K, M, G or T: 64G; got {text!r}")
    if key == "array" and not _ARRAY.fullmatch(text):
        raise ValueError(f"--array takes numbers and ranges, as 0-7, 1,3,5 or 0-99%4; got {text!r}")
    if text and not _WORD.fullmatch(text):
        raise ValueError(f"--{key} must be one word without quotes; got {text!r}")
    if not re.fullmatch(r"[a-z][a-z-]*", key):
        raise ValueError(f"sbatch's long options are letters and hyphens; got {key!r}")
