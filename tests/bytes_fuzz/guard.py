"""Guard of a process that reads untrusted bytes: forbidden events, and limits of memory."""

from __future__ import annotations

import os
import resource
import sys
import sysconfig
from typing import Any

_FORBIDDEN = frozenset(
    {
        *(
            "import",
            "exec",
            "open",
            "code.__new__",
            "function.__new__",
            "marshal.loads",
            "pickle.find_class",
        ),
        *(
            "os.system",
            "os.exec",
            "os.fork",
            "os.forkpty",
            "os.posix_spawn",
            "os.spawn",
            "os.remove",
            "os.rename",
            "os.putenv",
        ),
        *(
            "subprocess.Popen",
            "socket.connect",
            "socket.bind",
            "ctypes.dlopen",
            "ctypes.dlsym",
            "ctypes.call_function",
        ),
    }
)
_SPARE_BYTES = 1 << 30  # of address space, in addition to its size after warming up
_MOST_GROWTH_KIB = 64 << 10  # of resident memory in one case
_status = os.open("/proc/self/status", os.O_RDONLY)


class Guard:
    """An audit hook, which cannot be removed, and limits of memory.

    Args:
        folder: Files may be opened below it.

    Attributes:
        imports: Beginnings of the names of modules that the code under test may import.
    """

    def __init__(self, folder: str) -> None:
        self.imports: tuple[str, ...] = ()
        self._is_armed = False
        self._events: list[str] = []
        # Tracebacks in logs and answers read the lines of source files.
        self._sources = tuple(
            {
                sysconfig.get_paths()["stdlib"],
                sysconfig.get_paths()["purelib"],
                os.getcwd(),
                sys.prefix,
            }
        )
        self._folder = folder
        self._resident = 0
        sys.addaudithook(self._note)

    def _note(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._is_armed or event not in _FORBIDDEN:
            return
        if event == "import" and self.imports and args[0].startswith(self.imports):
            self._is_armed = (
                False  # an import opens and executes files; the next case finds the module loaded
            )
            return
        if event in ("open", "os.remove", "os.rename") and self._is_expected(args):
            return
        self._is_armed = False
        self._events.append(f"{event} {args!r:.200}")
        raise RuntimeError(f"forbidden while bytes are read: {event}")

    def _is_expected(self, args: tuple[Any, ...]) -> bool:
        path = args[0]
        if not isinstance(path, str):
            return isinstance(path, int)  # a descriptor that was opened before
        # Tracebacks parse their lines; if that fails, Python's parser opens the file by name.
        if path.startswith(self._folder) or path == "<unknown>":
            return True
        return (
            path.endswith(".py") and path.startswith(self._sources) and args[1] in ("r", "rb", None)
        )

    def limit(self) -> None:
        """Limit the address space from now on."""
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
        most = pages * os.sysconf("SC_PAGE_SIZE") + _SPARE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))

    def __enter__(self) -> Guard:
        # The maximum so far, because hypothesis allocates between cases.
        self._resident = _resident()
        self._is_armed = True
        return self

    def __exit__(self, *args: Any) -> None:
        self._is_armed = False

    def require_clean(self) -> None:
        """Raise for a forbidden event in the last case.

        Raises:
            AssertionError: An event, or more memory than any case of the allowed size justifies.
        """
        if self._events:
            events, self._events = self._events, []
            raise AssertionError(f"forbidden while bytes are read: {events}")
        grown = _resident() - self._resident
        if grown > _MOST_GROWTH_KIB:
            raise AssertionError(f"one case took {grown} KiB of memory")


def _resident() -> int:
    """Return the maximum resident memory of this process in KiB.

    ``getrusage`` would include the memory of its parent before fork.
    """
    text = os.pread(_status, 4096, 0)
    place = text.index(b"VmHWM:") + 6
    return int(text[place : text.index(b"kB", place)])
