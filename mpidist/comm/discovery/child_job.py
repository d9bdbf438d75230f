"""Child job: two ranks on this node that may crash or hang without harm to their parent.

Started by the launcher of this process's MPI library, without the outer launcher's variables; read
line by line, and ended completely. A launcher may put its ranks into sessions of their own (MPICH's
does), so its processes are found by a mark in their environment.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from mpidist.comm.mpi.launcher_env import without_launcher
from mpidist.comm.mpi.library import home

RANKS = 2
NOT_TRIED = "not tried: "  # begins the reason where a trial has learned nothing
# The reason where ``launcher`` finds none.
NO_LAUNCHER = "no mpirun or mpiexec was found next to the MPI library or on the PATH"
_SILENT = "ended without output"
_MARK = "MPIDIST_NESTED"
_END_S = 3.0  # time for a launcher to end its ranks
_KEPT_LINES = 100  # last lines of output that are kept for the reason
_LOOK_S = 0.1  # longest time until a job is ended that another thread runs

_ending = threading.Event()


def launcher(library: str) -> list[str] | None:
    """Return the beginning of the command line that starts two ranks of an MPI library.

    The search begins above the library that this process has loaded, goes on in the folder of this
    Python, and ends on the PATH. None if no launcher is found.

    Args:
        library: The MPI library's description of itself.
    """
    is_open_mpi = "Open MPI" in library
    found = find_launcher(is_open_mpi)
    # Two ranks may share one core, and must not inherit the core binding of this rank.
    options = ("--oversubscribe", "--bind-to", "none") if is_open_mpi else ()
    return None if found is None else [found, *options, "-n", str(RANKS)]


def find_launcher(is_open_mpi: bool) -> str | None:
    """Return the path of mpirun or mpiexec, searched in the same places; None without one."""
    # The first name is unambiguous on a Debian with several MPIs, and with Intel MPI.
    names = ("mpirun.openmpi" if is_open_mpi else "mpiexec.hydra", "mpirun", "mpiexec")
    folders = [
        *_folders_above_library(),
        str(Path(sys.executable).parent),
        os.environ.get("PATH", os.defpath),
    ]
    for folder in folders:
        for name in names:
            if found := shutil.which(name, path=folder):
                return found
    return None


def environment(environ: Mapping[str, str], is_root: bool) -> dict[str, str]:
    """Return the environment of a child job.

    It has this process's module path, one thread per rank, a home, and none of a launcher's
    variables.
    """
    variables = without_launcher(environ)
    variables["PYTHONPATH"] = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
    variables["OMP_NUM_THREADS"] = "1"
    variables["HOME"] = home(environ)
    if is_root:  # the user has already given Open MPI this permission
        variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return variables


def answers(
    library: str, module: str, marker: str, silence_s: float, wrong: str = _SILENT
) -> tuple[list[str], str]:
    """Start two ranks of a program with the library's own mpirun; return what they answer.

    Local: one rank calls it. Blocks: until both have ended, at most about ``silence_s``.

    Args:
        library: The MPI library's description of itself.
        module: The program, a module.
        marker: Text before an answer, anywhere in a line.
        silence_s: Seconds without an answer after which the job is ended.
        wrong: What failed if the job has ended well, and its answers are others than expected.

    Returns:
        The answers, and the reason of the failure where they are others than expected.
    """
    start = launcher(library)
    if start is None:
        return [], NO_LAUNCHER
    texts: list[str] = []

    def on_line(line: str) -> bool:
        _, found, text = line.partition(marker)
        if found:
            texts.append(text.strip())
        return bool(found)

    ending = run([*start, sys.executable, "-m", module], on_line, silence_s)
    return texts, f"{start[0]}: {ending or (wrong if texts else _SILENT)}"


def end_all() -> None:
    """End the jobs that other threads of this process run, and those that they would start.

    Their launchers are in sessions of their own, which a terminal's Ctrl-C does not reach.
    """
    _ending.set()


def run(command: Sequence[str], on_line: Callable[[str], bool], silence_s: float) -> str:
    """Run a command until it ends or is silent for too long; leave none of its processes behind.

    Blocks: until then.

    Args:
        on_line: Called with each line of output; True if the line is progress, which restarts the
            timeout.
        silence_s: Seconds without progress after which the command is ended.

    Returns:
        The reason of a failure, else "".
    """
    mark = uuid.uuid4().hex
    variables = environment(os.environ, os.geteuid() == 0) | {_MARK: mark}
    try:
        process = subprocess.Popen(
            list(command),
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        return str(error)
    try:
        lines = _read_lines(process, on_line, silence_s)
        if lines is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
    finally:
        _terminate(process, mark)
    if _ending.is_set():
        return "ended with this process"
    if lines is None or process.returncode is None:
        return f"hung: no output within {silence_s:g} s"
    return _exit_reason(process.returncode, lines)


def _folders_above_library() -> Iterator[str]:
    # A prefix has lib/libmpi.so and bin/mpirun; a distribution may have the library in deeper
    # folders.
    seen: set[Path] = set()
    for path in library_files():
        for parent in path.parents[1:]:
            if parent not in seen:
                seen.add(parent)
                yield str(parent / "bin")


def library_files() -> list[Path]:
    """Return the files of the loaded MPI library, else the file that MPI4PY_LIBMPI names."""
    mapped = set()
    with contextlib.suppress(OSError):
        for line in os.fsdecode(Path("/proc/self/maps").read_bytes()).splitlines():
            path = line.split(maxsplit=5)[-1]
            if re.match(r"libmpi(ch)?(_abi)?\.so", os.path.basename(path)):
                mapped.add(path)
    named = os.environ.get("MPI4PY_LIBMPI", "")
    chosen = [Path(path) for path in sorted(mapped) or ([named] if "/" in named else [])]
    return [*chosen, *(path.resolve() for path in chosen)]


def _read_lines(
    process: subprocess.Popen[bytes], on_line: Callable[[str], bool], silence_s: float
) -> list[str] | None:
    """Read the output of a process to its end; return the last lines that were not progress.

    None after a silence of ``silence_s`` seconds, and after ``end_all``.
    """
    assert process.stdout is not None
    poll = select.poll()  # select() is limited to 1024 descriptors
    poll.register(process.stdout, select.POLLIN)
    kept: deque[str] = deque(maxlen=_KEPT_LINES)
    rest, last_output = b"", time.monotonic()
    while True:
        left_s = last_output + silence_s - time.monotonic()
        if left_s <= 0 or _ending.is_set():
            return None
        if not poll.poll(min(left_s, _LOOK_S) * 1e3):
            continue
        piece = os.read(process.stdout.fileno(), 1 << 16)
        *lines, rest = (rest + (piece or b"\n")).split(b"\n")
        for line in lines:
            text = line.decode(errors="replace")
            if on_line(text):
                last_output = time.monotonic()
            else:
                kept.append(text)
        if not piece:
            return list(kept)


def _terminate(process: subprocess.Popen[bytes], mark: str) -> None:
    assert process.stdout is not None
    process.stdout.close()
    # A launcher cleans up after SIGTERM; processes that remain are killed here.
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    deadline = time.monotonic() + _END_S  # a process that hangs in a driver cannot be killed
    while (left := list(_processes_marked(mark))) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    process.poll()


def _processes_marked(mark: str) -> Iterator[int]:
    sign = f"{_MARK}={mark}".encode()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                if sign in Path("/proc", entry, "environ").read_bytes().split(b"\0"):
                    yield int(entry)


def _exit_reason(code: int, lines: Sequence[str]) -> str:
    if code == 0:
        return ""
    # Launchers print a rank's signal; their own exit status may or may not contain it.
    text = "\n".join(lines)
    numbers = re.findall(r"signal:?\s+(\d+)", text, re.IGNORECASE)
    number = int(numbers[0]) if numbers else -code if code < 0 else code - 128
    if number in set(signal.Signals):
        return f"ended by signal {number} ({signal.Signals(number).name})"
    # The last line of a traceback is the most useful.
    if errors := [line for line in lines if re.match(r"[\w.]*Error: ", line)]:
        return f"ended with exit status {code}: {errors[0]}"
    # The rank's own lines precede the launcher's, which are enclosed in rules.
    sections = [
        part.split("\n")
        for part in re.split(r"^[-=]{20,}$", text, flags=re.MULTILINE)
        if re.search("[a-zA-Z]", part)
    ]
    last = [line.strip() for line in (sections or [[]])[0] if line.strip()]
    return f"ended with exit status {code}: {' / '.join(last[-3:])[-300:]}"
