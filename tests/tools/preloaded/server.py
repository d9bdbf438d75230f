"""Server of ranks: a process with torch imported, which forks itself for each rank that asks.

It has one thread, has started no MPI and imported nothing of mpidist, so that a fork of it is what
an interpreter is after ``import torch``.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import io
import json
import os
import resource
import runpy
import selectors
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from tests.tools.preloaded.rank import namespaces

# The beginnings of the variables that torch, its libraries and Python read as they start.
# LD_LIBRARY_PATH is not among them: Open MPI's launcher adds its own folder to it.
_READ_AT_START = (
    *("ATEN_", "DNNL_", "GOMP_", "KMP_", "LD_PRELOAD", "MALLOC_", "MKL_", "NPY_", "OMP_"),
    *("ONEDNN_", "OPENBLAS_", "PYTHON", "TORCH"),
)
_LARGEST_REQUEST = 1 << 20
_MOST_FILES = 250  # the most that one message may carry is 253
_OWN_FILES = 1000  # the server's are above those of any rank


class Program(NamedTuple):
    """Command line of a rank, and what a process has from its launcher."""

    words: list[str]  # after the interpreter: -c SOURCE, -m MODULE or FILE, and arguments
    environ: dict[str, str]
    folder: str
    cores: list[int]
    namespaces: list[str]
    files: list[int]

    def enter(self, files: list[int]) -> None:
        """Take, in a fork, the rank's variables, folder, cores and open ``files``."""
        # A group of its own, as launchers give it to a rank.
        os.setpgid(0, 0)
        files = [_moved(file) for file in files]
        os.closerange(0, _OWN_FILES)
        for file, number in zip(files, self.files, strict=True):
            os.dup2(file, number)
        os.closerange(_OWN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        os.environ.clear()
        os.environ.update(self.environ)
        os.chdir(self.folder)
        os.sched_setaffinity(0, self.cores)

    def run(self, namespace: dict[str, Any]) -> None:
        """Run the program as ``__main__``, whose ``namespace`` it is."""
        import numpy as np
        import torch

        _open_streams()
        torch._import_device_backends()
        # Python's generator draws its seed in every fork anew; NumPy's goes on.
        np.random.seed()
        for name in [name for name in namespace if not name.startswith("__")]:
            del namespace[name]
        sys.orig_argv = [sys.executable, *self.words]
        first, *rest = self.words
        if first == "-m":
            sys.argv, sys.path[0] = ["-m", *rest[1:]], self.folder
            runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
        elif first == "-c":
            sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
            exec(compile(rest[0], "<string>", "exec"), namespace)
        else:
            sys.argv, sys.path[0] = self.words, os.path.dirname(os.path.abspath(first))
            namespace["__file__"] = first
            with open(first, "rb") as source:
                code = compile(source.read(), first, "exec")
            exec(code, namespace)


class Server:
    """Process that forks a rank for each request until its owner ends.

    A connection carries one request and stays open while the fork runs. Its end is that of the
    rank's launcher's process, and kills the fork.
    """

    def __init__(self, listener: int, owner: int) -> None:
        # torch sets some itself.
        self._read_at_start = _read_at_start(os.environ)
        self._namespaces = namespaces()
        # Which backends torch finds, and what they do, is for the fork's variables to say.
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        import torch._dynamo
        import torch.distributed.rpc  # noqa: F401

        self._listener = socket.socket(fileno=_moved(listener))
        self._ready = selectors.PollSelector()
        self._ready.register(self._listener, selectors.EVENT_READ, self._connect)
        self._ready.register(_moved(owner), selectors.EVENT_READ, self._end)
        self._processes: dict[socket.socket, int] = {}
        # A fork copies the pages that it writes, and the collector would write all of them.
        gc.collect()
        gc.freeze()

    def serve(self) -> Program:
        """Answer requests; return in each fork, with its program."""
        while True:
            for key, _ in self._ready.select():
                program = key.data(key.fileobj)
                if program is not None:
                    return program

    def _connect(self, listener: socket.socket) -> None:
        accepted, _ = listener.accept()
        connection = socket.socket(fileno=_moved(accepted.detach()))
        self._ready.register(connection, selectors.EVENT_READ, self._request)

    def _request(self, connection: socket.socket) -> Program | None:
        """Fork for a rank, or kill the fork of a rank that is gone."""
        data, files = b"", []
        # A rank that is gone leaves a connection that has ended or is reset.
        with contextlib.suppress(OSError):
            data, files, _, _ = socket.recv_fds(connection, _LARGEST_REQUEST, _MOST_FILES)
        if not data:
            self._drop(connection)
            return None
        program = Program(**json.loads(data))
        here = (self._read_at_start, self._namespaces)
        forks = (_read_at_start(program.environ), program.namespaces) == here
        process = os.fork() if forks else None
        if process == 0:
            self._detach()
            program.enter(files)
            return program
        for file in files:
            os.close(file)
        if process is None:
            _tell(connection, "import")
            return None
        self._processes[connection] = process
        ended = functools.partial(self._ended, connection)
        self._ready.register(_moved(os.pidfd_open(process)), selectors.EVENT_READ, ended)
        _tell(connection, process)
        return None

    def _ended(self, connection: socket.socket, end: int) -> None:
        self._ready.unregister(end)
        os.close(end)
        _, status = os.waitpid(self._processes.pop(connection), 0)
        _tell(connection, status)

    def _drop(self, connection: socket.socket) -> None:
        if connection in self._processes:
            os.kill(self._processes[connection], signal.SIGKILL)
        self._ready.unregister(connection)
        connection.close()

    def _end(self, owner: int) -> None:
        for process in self._processes.values():
            os.kill(process, signal.SIGKILL)
        os._exit(0)

    def _detach(self) -> None:
        """Leave the sockets without their files, which the fork closes by number."""
        for key in self._ready.get_map().values():
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.detach()


def _open_streams() -> None:
    """Open Python's standard streams anew: how they write depends on what their files are."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        # PYTHONUNBUFFERED is the server's, too.
        unbuffered = number and isinstance(old.buffer, io.FileIO)
        file = os.fdopen(number, "wb" if number else "rb", 0 if unbuffered else -1, closefd=False)
        lines = number == 2 or file.isatty()
        stream = io.TextIOWrapper(
            file, old.encoding, old.errors, line_buffering=lines, write_through=unbuffered
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _read_at_start(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(_READ_AT_START)}


def _tell(connection: socket.socket, answer: object) -> None:
    """Send an answer to a rank, which may be gone."""
    with contextlib.suppress(OSError):
        connection.send(str(answer).encode())


def _moved(file: int) -> int:
    """Move an open file to a number that no rank's has; it is closed by ``exec``."""
    moved = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _OWN_FILES)
    os.close(file)
    return moved
