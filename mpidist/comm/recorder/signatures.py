"""Signatures of one kind of operations on one group, as the writer looks them up."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from mpidist.comm.recorder.recorder import Recorder

if TYPE_CHECKING:
    import torch

Form: TypeAlias = "tuple[str, torch.dtype | None, tuple[int, ...]]"

MOST = 1 << 12  # a program of many shapes


class Signatures(dict[Form, int]):
    """Numbers of signatures by operation, dtype and shape; a lookup is one instruction.

    Args:
        recorder: The process's.
        kind: Of the operations.
        label: Of the group; empty without one.
    """

    def __init__(self, recorder: Recorder, kind: str, label: str = "") -> None:
        super().__init__()
        self._signature = recorder.signature
        self._kind, self._label = kind, label

    def __missing__(self, form: Form) -> int:
        """List a signature in the recorder; return its number."""
        operation, dtype, shape = form
        name = "" if dtype is None else str(dtype).removeprefix("torch.")
        number = self._signature(self._kind, operation, self._label, name, shape)
        # Also what the table has no room for, which would take its lock at each operation.
        if len(self) < MOST:
            self[form] = number
        return number
