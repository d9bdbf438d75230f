"""Entries of a group's messages in the recorder.

An entry begins where the message is issued. It ends where the program learns that the message has
ended: in the call that issued it, in a test of its handle or in a wait for it, or where the handle
is dropped. The peer of a receive from any rank is known at its end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpidist.comm.recorder.recorder import Recorder
from mpidist.comm.recorder.ring import BeginNext
from mpidist.comm.recorder.signatures import Signatures


class MessageEntries:
    """Entries of the messages of one group.

    Args:
        recorder: The process's.
        label: Of the group in the recorder.
        world_ranks: The group's ranks in the world.

    Attributes:
        end: Stores the end of an entry.
        fail: Stores its end by an exception.
        sends: Signatures of sends.
        receives: Signatures of receives.
    """

    def __init__(self, recorder: Recorder, label: str, world_ranks: Sequence[int]) -> None:
        self._begin, self.end, self.fail = recorder.begin, recorder.end, recorder.fail
        self._begins = recorder.begins
        self.sends = Signatures(recorder, "send", label)
        self.receives = Signatures(recorder, "receive", label)
        self._world_ranks = world_ranks
        self._name_peer = recorder.name_peer

    def send(self, operation: str, tensor: torch.Tensor, dst: int, tag: int) -> int:
        """Begin an entry; return its number."""
        signature = self.sends[operation, tensor.dtype, tensor.shape]
        return self._begin(signature, 0, tensor.nbytes, self._world_ranks[dst], tag)

    def receive(self, operation: str, tensor: torch.Tensor, src: int | None, tag: int) -> int:
        """Begin an entry; return its number."""
        signature = self.receives[operation, tensor.dtype, tensor.shape]
        peer = -1 if src is None else self._world_ranks[src]
        return self._begin(signature, 0, tensor.nbytes, peer, tag)

    def prepared(
        self,
        kind: Signatures,
        operation: str,
        tensor: torch.Tensor,
        peer: int | None,
        tag: int,
    ) -> BeginNext:
        """Return a function that begins an entry, called with 0.

        Args:
            kind: ``sends`` or ``receives``.
        """
        signature = kind[operation, tensor.dtype, tensor.shape]
        return self._begins(
            signature, tensor.nbytes, -1 if peer is None else self._world_ranks[peer], tag
        )

    def send_object(self, nbytes: int, dst: int) -> int:
        """Begin the entry of an object; return its number."""
        signature = self.sends["send_object", None, ()]
        return self._begin(signature, 0, nbytes, self._world_ranks[dst])

    def receive_object(self, src: int | None) -> int:
        """Begin the entry of an object; return its number."""
        peer = -1 if src is None else self._world_ranks[src]
        return self._begin(self.receives["recv_object", None, ()], 0, 0, peer)

    def name_sender(self, entry: int, sender: int) -> None:
        """Store the sender of a receive from any rank, before the end of its entry.

        Args:
            entry: The entry's number.
            sender: Rank in the group.
        """
        self._name_peer(entry, self._world_ranks[sender])
