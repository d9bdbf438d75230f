"""Entries of calls in the process's recorder: at their callers, or where they are executed.

Both sides record the call's number at its caller as the tag, and each other's world rank as the
peer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from mpidist.comm.recorder import recorder
from mpidist.comm.recorder.signatures import MOST
from mpidist.rpc.names import callee

# A wire name, a function's name, another request in words, or the class of what is called.
Name: TypeAlias = object


class CallEntries(dict[Name, int]):
    """Signatures of calls by name, and the recorder's functions.

    Args:
        kind: ``call`` or ``handler``.
        title: Returns the function's name in a wire name, which begins with its length at a caller.

    Attributes:
        begin: Begins an entry; see ``Ring.begin``.
        end: Stores its end.
        fail: Stores its end by an exception.
    """

    def __init__(self, kind: str, title: Callable[[bytes], str] = callee.display_name) -> None:
        super().__init__()
        recorded = recorder.of_process()
        self.begin, self.end, self.fail = recorded.begin, recorded.end, recorded.fail
        self._signature, self._kind, self._title = recorded.signature, kind, title

    def __missing__(self, name: Name) -> int:
        """List a name in the recorder; return the number of its signature."""
        if isinstance(name, bytes):
            text = self._title(name) or "unnamed function"
        else:
            text = name if isinstance(name, str) else getattr(name, "__qualname__", "")
        number = self._signature(self._kind, text)
        # Also what the table has no room for, as in ``Signatures``.
        if len(self) < MOST:
            self[name] = number
        return number
