"""Programs of one job: a command line with ``::`` between them, and the ranks of each.

``-n 1 simulation --grid 32 :: train.py --epochs 3``, as mpirun takes it but for the colons: sbatch
drops what stands behind a single one. One program may leave out ``-n``, and has the ranks that are
left. The job's interpreter runs files ``*.py`` and ``-m MODULE``, any other program runs by itself.

``main`` prints a line for each program: its number of ranks, and its words as a shell reads them.
``couple.sbatch`` makes of them what srun or mpirun start.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mpidist import shipped
from mpidist.errors import LaunchError

_EXAMPLE = "coupled_heat.py"
# The second one does in ``mpidist submit``.
_BETWEEN = ("::", ":")
_RANKS = ("-n", "-np")
_MODULE = "-m"
_LIKE = "-n 1 simulation --grid 32 :: train.py --epochs 3"
_STATUS_OF_ERROR = 2


@dataclass(frozen=True)
class Program:
    """One program of a job.

    Attributes:
        ranks: Its number of ranks; None for those that the others leave.
        words: The program and its arguments.
    """

    ranks: int | None
    words: tuple[str, ...]

    @property
    def is_python(self) -> bool:
        """Whether the job's interpreter runs it."""
        return self.words[0] == _MODULE or self.words[0].endswith(".py")


def parse(arguments: Sequence[str]) -> list[Program]:
    """Return the programs of a command line; without one the example's two.

    Args:
        arguments: ``[-n RANKS] PROGRAM [ARGUMENTS] :: [-n RANKS] PROGRAM [ARGUMENTS] …``; or
            ``[-n RANKS] [ARGUMENTS]`` of the example, whose simulation has RANKS.

    Raises:
        LaunchError: It is none.
    """
    if any("\n" in word for word in arguments):
        raise LaunchError("an argument of a program has a line end, which couple does not pass on")
    if not is_divided(arguments):
        return _example(arguments)
    parts: list[list[str]] = [[]]
    for word in arguments:
        if word in _BETWEEN:
            parts.append([])
        else:
            parts[-1].append(word)
    found = []
    for part in parts:
        ranks, words = _without_ranks(part)
        if not words:
            raise LaunchError(f"a program is missing beside '::'; couple takes {_LIKE}")
        if words[0].startswith("-") and (words[0] != _MODULE or len(words) == 1):
            raise LaunchError(
                f"a program stands before its arguments; got {words[0]}; couple takes {_LIKE}"
            )
        found.append(Program(ranks, tuple(words)))
    return found


def is_divided(arguments: Sequence[str]) -> bool:
    """Return whether a command line is of several programs (pure)."""
    return not set(_BETWEEN).isdisjoint(arguments)


def _example(arguments: Sequence[str]) -> list[Program]:
    ranks, words = _without_ranks(arguments)
    if words and (words[0] == _MODULE or not words[0].startswith("-")):
        raise LaunchError(
            f"couple takes several programs, with '::' between them (sbatch drops what is behind "
            f"':'), as {_LIKE}; got {words[0]} alone, which the script ddp takes"
        )
    program = str(shipped.folder("examples") / _EXAMPLE)
    return [
        Program(ranks or 1, (program, "simulate")),
        Program(None, (program, "train", *words)),
    ]


def _without_ranks(words: Sequence[str]) -> tuple[int | None, Sequence[str]]:
    """Return the number behind ``-n``, and the words behind it; None and all words without it."""
    if not words or words[0] not in _RANKS:
        return None, words
    text = words[1] if len(words) > 1 else ""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise LaunchError(f"{words[0]} takes a program's number of ranks, 1 or more; got {text!r}")
    return int(text), words[2:]


def divided(programs: Sequence[Program], ranks: int) -> list[Program]:
    """Return the programs with the number of ranks of each (pure).

    Args:
        programs: Of which one may have None.
        ranks: Of the job; the programs may leave some unused.

    Raises:
        LaunchError: The job has too few, or two programs have no number.
    """
    given = sum(program.ranks or 0 for program in programs)
    left = ranks - given
    open_ones = [program for program in programs if program.ranks is None]
    if len(open_ones) > 1:
        raise LaunchError(
            f"one program alone can have the ranks that are left: give -n for {_name(open_ones[1])}"
        )
    if left < len(open_ones):
        parts = [f"{one.ranks or 'at least 1'} for {_name(one)}" for one in programs]
        raise LaunchError(
            f"the programs need {given + len(open_ones)} ranks ({', '.join(parts)}), and the job "
            f"has {ranks}: --nodes times --ntasks-per-node of sbatch for more, or less behind -n"
        )
    return [replace(one, ranks=left if one.ranks is None else one.ranks) for one in programs]


def require_found(program: Program, has_modules: bool = False) -> None:
    """Refuse a program that is not here, or cannot be run.

    Args:
        program: Of the job.
        has_modules: The job loads modules, whose commands this process may not see.

    Raises:
        LaunchError: Names it.
    """
    word = program.words[0]
    path = Path(word)
    if word == _MODULE:
        return
    if path.is_file():
        if not program.is_python and not os.access(path, os.X_OK):
            raise LaunchError(
                f"{word} is neither executable (chmod +x) nor a program of Python (*.py)"
            )
    elif program.is_python or "/" in word:
        raise LaunchError(f"{word}: no such file from here")
    elif not has_modules and shutil.which(word) is None:
        raise LaunchError(f"{word}: no such file here, and no such command on PATH")


def located(program: Program) -> Program:
    """Return a program with an absolute path if it is a file here."""
    path = Path(program.words[0])
    if not path.is_file():
        return program
    return replace(program, words=(str(path.absolute()), *program.words[1:]))


def absolute(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return a command line with the absolute paths of its programs; that of the example as is.

    Raises:
        LaunchError: See ``parse``.
    """
    if not is_divided(arguments):
        return tuple(arguments)
    words: list[str] = []
    for program in map(located, parse(arguments)):
        words += [_BETWEEN[0]] if words else []
        words += [] if program.ranks is None else [_RANKS[0], str(program.ranks)]
        words += program.words
    return tuple(words)


def command(program: Program, python: Sequence[str]) -> tuple[str, ...]:
    """Return the words that start a program (pure).

    Args:
        program: Of the job.
        python: Words of the interpreter; before the last one those of a container.
    """
    return (*(python if program.is_python else python[:-1]), *program.words)


def main(arguments: Sequence[str]) -> int:
    """Print the programs of a job for its script; return the exit status.

    Args:
        arguments: Number of the job's ranks, number of the interpreter's words, these, and the
            command line of the programs.
    """
    ranks, count, *rest = arguments
    python, words = rest[: int(count)], rest[int(count) :]
    try:
        programs = divided(parse(words), int(ranks))
        for program in programs:
            require_found(program)
    except LaunchError as error:
        print(f"mpidist: {error}", file=sys.stderr)
        return _STATUS_OF_ERROR
    for program in programs:
        line = f"{program.ranks} {shlex.join(command(located(program), python))}\n"
        # The bytes of the command line, whatever the locale.
        sys.stdout.buffer.write(os.fsencode(line))
    return 0


def _name(program: Program) -> str:
    return Path(program.words[0]).name if program.words[0] != _MODULE else program.words[1]
