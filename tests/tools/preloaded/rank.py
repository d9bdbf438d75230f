"""Rank of a job: has a process forked by the server in its place, and ends as that process ends.

``python -I -S rank.py SOCKET (-c SOURCE | -m MODULE | FILE) [ARGUMENTS]``. The fork runs the
program with this process's variables, folder, cores and open files, the socket to MPICH's launcher
among them. Signals go on to it; it is killed when this process is. Where the fork would not be what
a new interpreter is (a variable that torch or Python reads as it starts differs, or a namespace),
this process becomes that interpreter.
"""

import contextlib
import json
import os
import signal
import socket
import sys

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    path, *words = sys.argv[1:]
    files = _open_files()
    request = {
        "words": words,
        "environ": dict(os.environ),
        "folder": os.getcwd(),
        "cores": sorted(os.sched_getaffinity(0)),
        "namespaces": namespaces(),
        "files": files,
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        # A server that has ended says why in the output of the tests.
        server.connect(path)
        socket.send_fds(server, [json.dumps(request).encode()], files)
        answer = server.recv(32)
        if answer == b"import":
            os.execv(sys.executable, [sys.executable, *words])
        copy = int(answer)
        for number in PASSED_ON:
            signal.signal(number, lambda number, _: _send(copy, number))
        status = int(server.recv(32))
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


def namespaces() -> list[str]:
    """Return the names of the calling process's namespaces."""
    folder = "/proc/self/ns"
    return [os.readlink(f"{folder}/{name}") for name in sorted(os.listdir(folder))]


def _send(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def _open_files() -> list[int]:
    """Numbers of this process's open files, as its launcher left them."""
    numbers = []
    for name in os.listdir("/proc/self/fd"):
        # The listing's own file is closed by now.
        with contextlib.suppress(OSError):
            os.fstat(int(name))
            numbers.append(int(name))
    return sorted(numbers)


if __name__ == "__main__":
    main()
