"""Execution of point-to-point steps on one rank: tensors and objects."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from mpidist.comm.messages.p2p import P2POp
from mpidist.errors import MpidistError
from tests.fuzz.call_steps import MODES
from tests.fuzz.issue import Handle, equal
from tests.fuzz.memory import Memory
from tests.fuzz.operands import Operands, Tensor, operands
from tests.fuzz.programs import (
    Call,
    Message,
    Messages,
    ObjectMessages,
    described,
)
from tests.fuzz.rank_run import Pending, RankRun
from tests.fuzz.references import expected
from tests.fuzz.values import obj


class MessageSteps:
    """Posts the messages of a step, waits for them, and checks the received values."""

    def __init__(self, run: RankRun) -> None:
        self._run = run

    def messages(self, where: str, step: Messages, place: int) -> None:
        if step.group not in self._run.handles:
            return
        handle = self._run.handles[step.group]
        rank = handle.rank
        posts: list[tuple[int, bool]] = [
            (i, True) for i, m in enumerate(step.messages) if m.src == rank
        ]
        receives = [(i, False) for i, m in enumerate(step.messages) if m.dst == rank]
        # Sends and receives each keep their order, in which they match.
        merged = sorted(posts + receives, key=lambda post: (post[0], post[1]))
        if self._run.rng.random() < 0.5:
            merged = receives + posts if self._run.rng.random() < 0.5 else posts + receives
        with MODES[step.modes[rank]]():
            memories = {post: self._message_memory(step, *post) for post in merged}
            try:
                begun = self._post(step, handle, merged, memories)
            except Exception as error:
                begun = {post: error for post in merged}
        for post in merged:
            finish = self._message_end(
                f"{where}.{post[0]}",
                step.messages[post[0]],
                post[1],
                memories[post],
                begun[post],
                handle,
            )
            self._run.pending.append(
                Pending(place + step.waits[rank], step.group, finish, blocks_close=True)
            )

    def object_messages(self, where: str, step: ObjectMessages) -> None:
        if step.group not in self._run.handles:
            return
        handle = self._run.handles[step.group]
        rank = handle.rank
        numbered = list(enumerate(step.messages))
        # Otherwise a receive from any source could match an object of the next step.
        handle.native.barrier()

        def send(thread: int) -> None:
            for number, (src, own, dst, count) in numbered:
                if (src, own) == (rank, thread):
                    try:
                        handle.native.send_object(
                            (number, obj(f"{step.seed} {number}", count)), dst
                        )
                    except Exception as error:
                        self._run.fail(f"{where} send_object {number}", error)

        senders = [
            threading.Thread(target=send, args=(thread,), name=f"sender-{thread}", daemon=True)
            for thread in sorted({thread for _, (src, thread, _, _) in numbered if src == rank})
        ]
        for sender in senders:
            sender.start()
        due = {number: message for number, message in numbered if message[2] == rank}
        last: dict[tuple[int, int], int] = {}
        for src in sorted(message[0] for message in due.values()):
            try:
                (number, got), source = handle.native.recv_object(None if step.any_source else src)
            except Exception as error:
                self._run.fail(f"{where} recv_object", error)
                continue
            message = due.pop(number, None)
            if message is None or message[0] != source:
                self._run.fail(
                    f"{where} recv_object",
                    f"object {number} from rank {source}, which is not under way",
                )
                continue
            if not equal(got, obj(f"{step.seed} {number}", message[3])):
                self._run.fail(
                    f"{where} recv_object", f"object {number} from rank {source} is damaged"
                )
            if last.get(message[:2], -1) > number:
                self._run.fail(
                    f"{where} recv_object",
                    f"object {number} of thread {message[1]} of rank {source} came late",
                )
            last[message[:2]] = number
        for sender in senders:
            sender.join()

    def _message_memory(self, step: Messages, number: int, is_send: bool) -> tuple[Call, Memory]:
        message = step.messages[number]
        side = 0 if is_send else 1
        call = _as_broadcast(
            message, step.seed + number, step.modes[message.src if is_send else message.dst]
        )
        ours = operands(call, side, 2)
        if not is_send and message.expected is not None:
            # The receive is at the start of memory for the whole message, so that writes after it
            # are found.
            whole = Tensor(0, 0, (message.count + 8192,), (1,))
            ours = Operands((Tensor(0, 0, (message.expected,), (1,)), whole), (), (0,))
        return call, Memory(call, ours)

    def _post(
        self, step: Messages, handle: Handle, merged: list[Any], memories: dict[Any, Any]
    ) -> dict[Any, Any]:
        rank = handle.rank
        is_torch = step.apis[rank] == "torch"
        begun: dict[Any, Any] = {}
        if step.way == "batch":
            items = []
            for number, is_send in merged:
                message, tensor = step.messages[number], memories[number, is_send][1].tensors[0]
                peer = (
                    message.dst
                    if is_send
                    else None
                    if message.any_source and not is_torch
                    else message.src
                )
                if is_torch:
                    operation = dist.isend if is_send else dist.irecv
                    items.append(
                        dist.P2POp(
                            operation, tensor, group=handle.torch, tag=message.tag, group_peer=peer
                        )
                    )
                else:
                    items.append(P2POp("isend" if is_send else "irecv", tensor, peer, message.tag))
            if items:
                batch = (
                    dist.batch_isend_irecv(items)
                    if is_torch
                    else handle.native.batch_isend_irecv(items)
                )
                begun.update(zip(merged, batch, strict=True))
            return begun
        for number, is_send in merged:
            message, tensor = step.messages[number], memories[number, is_send][1].tensors[0]
            src = None if message.any_source else message.src
            is_blocking = step.way == "blocking"
            try:
                if is_torch and is_send:
                    call = dist.send if is_blocking else dist.isend
                    got = call(tensor, group=handle.torch, tag=message.tag, group_dst=message.dst)
                elif is_torch:
                    receive = dist.recv if is_blocking else dist.irecv
                    got = receive(tensor, group=handle.torch, tag=message.tag, group_src=src)
                elif is_send:
                    send = handle.native.send if is_blocking else handle.native.isend
                    got = send(tensor, message.dst, message.tag)
                else:
                    receive = handle.native.recv if is_blocking else handle.native.irecv
                    got = receive(tensor, src, message.tag)
                begun[number, is_send] = None if is_blocking else got
            except Exception as error:
                begun[number, is_send] = error
        return begun

    def _message_end(
        self,
        where: str,
        message: Message,
        is_send: bool,
        received: tuple[Call, Memory],
        work: Any,
        handle: Handle,
    ) -> Callable[[], None]:
        call, memory = received
        place_text = f"{where} {'send' if is_send else 'receive'}, {described(message)}"

        def finish() -> None:
            error = work if isinstance(work, Exception) else None
            try:
                if work is not None and error is None:
                    work.wait()
            except Exception as raised:
                error = raised
            if message.expected is not None and not is_send:
                # A truncated receive may contain anything, but memory after it must be unchanged.
                memory.tensors[0].copy_(torch.zeros_like(memory.tensors[0])) if not memory.tensors[
                    0
                ].is_inference() else None
                zeros = torch.zeros(message.expected, dtype=memory.tensors[0].dtype)
                wrong = (
                    "" if memory.tensors[0].is_inference() else memory.difference([(zeros, None)])
                )
                if not isinstance(error, MpidistError):
                    wrong = f"expected an MpidistError; got {error!r}; {wrong}"
            elif error is not None:
                self._run.fail(place_text, error)
                return
            else:
                wrong = memory.difference([] if is_send else expected(call, 1, 2))
                source = (
                    work.source_rank()
                    if not is_send and hasattr(work, "source_rank")
                    else message.src
                )
                if source != message.src:
                    wrong += f" source_rank() says {source}"
            if wrong:
                self._run.fail(place_text, wrong)

        return finish


def _as_broadcast(message: Message, seed: int, mode: str) -> Call:
    return Call(
        "broadcast", 0, ("native",) * 2, (False,) * 2, (mode,) * 2, (0,) * 2, seed, message.dtype,
        counts=(message.count,), values="bits",
    )  # fmt: skip
