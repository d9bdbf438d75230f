"""Collectives and messages of Python objects.

Objects are sent as frames: small ones in one message, large memory (tensors, arrays) directly from
and into place, past 2 GiB in pieces. The calls are collective over the group like their tensor
counterparts, and synchronous.

A frame holds a pickle, which runs code of its sender when it is read, or data: numbers, texts,
containers, tensors and arrays. Every call has an argument ``data_only``: True for data, False for a
pickle, None for the value of ``MPIDIST_TRUST`` (``trust``). A rank that asks for data refuses a
pickle unread (``FrameError``). An object that is not plain data is refused on its own rank
(``NotPlainData``), and the other ranks of a collective raise ``MpidistError``.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from torch.autograd import profiler as torch_profiler

from mpidist.comm.execution import arguments, profiling
from mpidist.comm.execution.execution import Execution
from mpidist.comm.execution.group_settings import GroupSettings
from mpidist.comm.execution.operation import Operation
from mpidist.comm.messages import object_messages
from mpidist.comm.messages.matched_receive import MatchedReceive
from mpidist.comm.messages.object_messages import ObjectReceiver
from mpidist.comm.messages.request_work import RequestWork
from mpidist.comm.mpi import trust
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.tags import Tag
from mpidist.comm.object_collectives import all_gather, broadcast, gather, scatter
from mpidist.comm.serialization import frame
from mpidist.comm.serialization.frame import Message
from mpidist.comm.serialization.tensor_format import Buffer
from mpidist.errors import FrameError, MpidistError


class Objects(Execution):
    """The object calls of a process group."""

    def __init__(self, comm: Communicator, settings: GroupSettings) -> None:
        super().__init__(comm, settings)
        self._object_receiver = ObjectReceiver()
        # Held while the parts of one object are posted, which arrive in the order of posting.
        self._posting_objects = threading.Lock()

    def broadcast_object(
        self, obj: object = None, src: int = 0, *, data_only: bool | None = None
    ) -> Any:
        """Return rank ``src``'s object on all ranks; the others' argument is ignored."""
        where, is_data = self.where("broadcast_object"), trust.is_data_only(data_only)
        arguments.rank(where, src, "src", self.size)
        message, refusal = _encoded(obj, is_data) if self.rank == src else (None, None)
        operation = Operation(
            "broadcast_object", broadcast, args=(message, src), facts=(("src", src),)
        )
        header, body = self._launch(operation)
        if refusal is not None:
            raise refusal
        return obj if self.rank == src else _accepted(where, header, body, is_data)

    def broadcast_object_list(
        self, object_list: list[object], src: int = 0, *, data_only: bool | None = None
    ) -> None:
        """Overwrite every rank's list with rank ``src``'s."""
        object_list[:] = self.broadcast_object(object_list, src, data_only=data_only)

    def all_gather_object(self, obj: object, *, data_only: bool | None = None) -> list[Any]:
        """Return the W ranks' objects, in rank order."""
        where, is_data = self.where("all_gather_object"), trust.is_data_only(data_only)
        (header, body), refusal = _encoded(obj, is_data)
        data = bytearray().join((header, *body))
        frames = self._launch(Operation("all_gather_object", all_gather, args=(data,)))
        if refusal is not None:
            raise refusal
        return [_accepted(where, *frame.split(part), is_data) for part in frames]

    def gather_object(
        self, obj: object, dst: int = 0, *, data_only: bool | None = None
    ) -> list[Any] | None:
        """Return the W ranks' objects on rank ``dst``, None elsewhere."""
        where, is_data = self.where("gather_object"), trust.is_data_only(data_only)
        arguments.rank(where, dst, "dst", self.size)
        message, refusal = _encoded(obj, is_data)
        received = self._launch(
            Operation("gather_object", gather, args=(message, dst), facts=(("dst", dst),))
        )
        if refusal is not None:
            raise refusal
        if self.rank != dst:
            return None
        return [_accepted(where, header, body, is_data) for header, body in received]

    def scatter_object(
        self,
        object_list: Sequence[object] | None = None,
        src: int = 0,
        *,
        data_only: bool | None = None,
    ) -> Any:
        """Return the rank's object of rank ``src``'s list of W."""
        where, is_data = self.where("scatter_object"), trust.is_data_only(data_only)
        arguments.rank(where, src, "src", self.size)
        messages: list[Message] | None = None
        refusal: Exception | None = None
        if self.rank == src:
            if isinstance(object_list, (list, tuple)) and len(object_list) == self.size:
                encoded = [_encoded(obj, is_data) for obj in object_list]
                refusal = next((error for _, error in encoded if error is not None), None)
                messages = [message for message, _ in encoded]
            else:
                refusal = ValueError(
                    f"{where} needs object_list to hold {self.size} objects, one a rank"
                )
            if refusal is not None:  # sent to all ranks, not only to the object's
                messages = [frame.refusal(repr(refusal))] * self.size
        header, body = self._launch(
            Operation("scatter_object", scatter, args=(messages, src), facts=(("src", src),))
        )
        if refusal is not None:
            raise refusal
        return _accepted(where, header, body, is_data)

    def send_object(self, obj: object, dst: int, *, data_only: bool | None = None) -> None:
        """Send an object to rank ``dst``; matches its ``recv_object``. Not collective.

        Blocks: until the object may be changed; for large ones, until they are received.

        Raises:
            NotPlainData: The object must be data, and is not; nothing was sent.
            CommTimeout: Not received within the group's timeout. The object is still under way.
            RankFailureError: Rank ``dst`` died, or its program has ended.
        """
        send = self._send_object
        if torch_profiler._is_profiler_enabled:
            send = profiling.calling(send, self, "send_object")
        send(obj, dst, data_only)

    def recv_object(
        self, src: int | None = None, *, data_only: bool | None = None
    ) -> tuple[Any, int]:
        """Receive an object from rank ``src``, or from any; return it and the sender's rank.

        Not collective.

        Raises:
            FrameError: The message is a pickle, and data is asked for; or it is not an object. The
                message is received.
        """
        receive = self._recv_object
        if torch_profiler._is_profiler_enabled:
            receive = profiling.calling(receive, self, "recv_object")
        return receive(src, data_only)

    def _send_object(self, obj: object, dst: int, data_only: bool | None) -> None:
        self._require_usable("send_object")
        arguments.rank(self.where("send_object"), dst, "dst", self.size)
        with self._explained("send_object", is_collective=False):
            self._send_message(frame.encode(obj, trust.is_data_only(data_only)), dst)

    def _send_message(self, message: Message, dst: int) -> None:
        works = []
        # All parts are posted before the first wait: a wait that raises leaves none of them unsent.
        with self._posting_objects:
            for part, tag in object_messages.parts(message, Tag.OBJECT_MESSAGE):
                request = self._mpi.Isend(
                    (part, memoryview(part).nbytes, MPI.BYTE), dst, self._comm.own_tag(tag)
                )
                works.append(RequestWork(self, "send_object", None, request, dst, part))
        for work in works:
            work.wait()

    def _recv_object(self, src: int | None, data_only: bool | None) -> tuple[Any, int]:
        self._require_usable("recv_object")
        is_data, where = trust.is_data_only(data_only), self.where("recv_object")
        if src is not None:
            arguments.rank(where, src, "src", self.size)
        with self._explained("recv_object", is_collective=False):
            header, body, source = self._object_receiver.receive(
                self._comm,
                MPI.ANY_SOURCE if src is None else src,
                Tag.OBJECT_MESSAGE,
                (where, self.timeout_s, self.peers_of(src)),
                self._wait_for_part,
            )
        return _accepted(where, header, body, is_data), source

    def _wait_for_part(self, request: MatchedReceive, part: memoryview, source: int) -> None:
        RequestWork(self, "recv_object", None, request, source, part).wait()


def _encoded(obj: object, is_data: bool) -> tuple[Message, Exception | None]:
    """Return an object's message, or the message of a refusal and its error.

    Ranks that wait for the object then get the reason.
    """
    try:
        return frame.encode(obj, is_data), None
    except Exception as error:  # pickle raises any error of the object's own methods
        return frame.refusal(repr(error)), error


def _accepted(where: str, header: Buffer, body: Sequence[Buffer], is_data: bool) -> Any:
    try:
        return frame.decode(header, body, is_data)
    except frame.RefusedError as refusal:
        raise MpidistError(f"{where}: a rank could not send its object: {refusal}") from None
    except FrameError as error:
        raise FrameError(f"{where}: {error}") from error
