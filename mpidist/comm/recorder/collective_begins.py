"""Begins of a group's collectives, prepared once for each form of a call."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from mpidist.comm.recorder.recorder import Recorder
from mpidist.comm.recorder.ring import BeginNext
from mpidist.comm.recorder.signatures import MOST, Signatures

if TYPE_CHECKING:
    import torch

# Shape and dtype of a tensor.
Form: TypeAlias = "tuple[torch.Size, torch.dtype]"
# A collective without its tensors' memory: its name, and the forms of its inputs and outputs.
Described: TypeAlias = tuple[str, tuple[Form, ...], tuple[Form, ...]]


class CollectiveBegins(dict[Described, BeginNext]):
    """Functions that begin an entry of a collective; a lookup is one instruction.

    A function takes the number of the collective on its group, and returns that of the entry. Both
    the signature and the number of bytes follow from the forms, so that a call computes neither.

    Args:
        recorder: The process's.
        label: Of the group.
    """

    def __init__(self, recorder: Recorder, label: str = "") -> None:
        super().__init__()
        self._prepare = recorder.begins
        self._signatures = Signatures(recorder, "collective", label)

    def __missing__(self, described: Described) -> BeginNext:
        """Prepare the begin of a collective."""
        operation, inputs, outputs = described
        # Of lists the longer one: of a gather, a scatter and their kin it has all data.
        longer = inputs if len(inputs) > len(outputs) else outputs
        shape, dtype = (outputs or inputs or (((), None),))[0]
        nbytes = sum(shape.numel() * dtype.itemsize for shape, dtype in longer)
        begin = self._prepare(self._signatures[operation, dtype, shape], nbytes)
        if len(self) < MOST:
            self[described] = begin
        return begin
