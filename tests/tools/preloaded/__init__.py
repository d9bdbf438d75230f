"""Ranks that are forked from a process with torch imported: jobs of tests start without the import.

``import torch`` takes 1.8 s of a core, which is most of what a job of two ranks takes.
``server.py`` is the process that forks; the launcher starts ``rank.py``, which asks it to.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from mpidist.comm.mpi.launcher_env import without_launcher

_HERE = Path(__file__).parent
# A fork runs its program in the namespace of __main__, which is as an interpreter leaves it.
_SERVER = """\
import sys
sys.path.insert(1, {root!r})
from tests.tools.preloaded.server import Server
program = Server(*map(int, sys.argv[1:])).serve()
sys.path.remove({root!r})
program.run(globals())
"""


def interpreter(variables: dict[str, str]) -> list[str]:
    """Return the command of a Python that has imported torch, for a job with ``variables``.

    The server of this process is started by the first call and ends with this process. A job with
    another variable that torch or Python reads as it starts, or in another namespace, imports torch
    by itself.
    """
    return [
        sys.executable,
        "-I",
        "-S",
        str(_HERE / "rank.py"),
        _address(frozenset(variables.items())),
    ]


@functools.cache
def _address(variables: frozenset[tuple[str, str]]) -> str:
    """Start the server; return the path of its socket."""
    folder = tempfile.mkdtemp(prefix="mpidist-ranks-")
    path = f"{folder}/socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(128)
        # The server ends when the other end of this pipe is closed, however this process ends.
        owned, owner = os.pipe()
        program = _SERVER.format(root=str(_HERE.parents[2]))
        server = subprocess.Popen(
            [sys.executable, "-c", program, str(listener.fileno()), str(owned)],
            env={**without_launcher(os.environ), **dict(variables)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(listener.fileno(), owned),
        )
        os.close(owned)
    atexit.register(_end, server, owner, folder)
    return path


def _end(server: subprocess.Popen[bytes], owner: int, folder: str) -> None:
    os.close(owner)
    server.wait()
    shutil.rmtree(folder, ignore_errors=True)
