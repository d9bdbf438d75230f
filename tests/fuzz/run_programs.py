"""Execution of random programs on the ranks of a job, with all failures gathered on all ranks."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist

from mpidist.comm import work as works
from mpidist.comm.group import from_world
from mpidist.comm.p2p import P2POp
from mpidist.errors import DisagreementError, MpidistError
from tests.fuzz.deadline import Deadline
from tests.fuzz.issue import Handle, equal, issue, objects
from tests.fuzz.memory import Memory
from tests.fuzz.operands import Operands, Tensor, obj, operands
from tests.fuzz.programs import (
    OBJECTS,
    Call,
    Close,
    InOrder,
    Lanes,
    Make,
    Message,
    Messages,
    ObjectMessages,
    Program,
    Step,
    Then,
)
from tests.fuzz.references import expected

_MODES: dict[str, Callable[[], Any]] = {
    "": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}
_REFUSALS = (TypeError, ValueError, DisagreementError)


@dataclass
class Pending:
    """Operation in progress.

    ``finish`` waits for the operation and checks the result; ``blocks_close``: ``finish`` must run
    before its group closes.
    """

    due: int
    group: int
    finish: Callable[[], None]
    blocks_close: bool = False


class Player:
    """Execution of one program on one rank.

    Attributes:
        failures: Failures on this rank.
        outcomes: "right" or "refused" by position, for calls that may raise.
    """

    def __init__(
        self, program: Program, world_rank: int, deadline: Deadline, is_quiet: bool = False
    ) -> None:
        self._program = program
        self._me = world_rank
        self._deadline = deadline
        self._is_quiet = is_quiet
        self._handles: dict[int, Handle] = {}
        self._pending: list[Pending] = []
        self._rng = random.Random(f"order {program.seed} {world_rank}")
        self.failures: list[str] = []
        self.outcomes: dict[str, str] = {}

    def play(self) -> None:
        """Run all steps, wait for all operations, close all groups."""
        names: list[str] = []
        try:
            for place, step in enumerate(self._program.steps):
                self._deadline.now(f"step {place}: {described(step)}")
                self._do(str(place), step, place)
                names = [handle.native.name for handle in self._handles.values()]
                self._finish_due(place)
            self._deadline.now("waits at the end")
            self._finish_due(None)
        except Exception as error:
            self._fail("a step that everything else needs", error)
        for number in sorted(self._handles, reverse=True):
            self._deadline.now(f"close of group {number}")
            self._close(number)
        works.release_orphans()
        if works._orphans:
            self._fail("the end", f"{len(works._orphans)} request(s) left")
        left = [
            thread.name
            for thread in threading.enumerate()
            if thread.name in {f"mpidist-{name}" for name in names}
        ]
        if left:
            self._fail("the end", f"threads left: {left}")

    # --- verdicts ---

    def _fail(self, where: str, what: str | BaseException) -> None:
        text = what if isinstance(what, str) else f"{type(what).__name__}: {what}"
        self.failures.append(f"{where}: {text}")
        if self._is_quiet:
            return
        # Print at once, because other ranks may wait for this one without end.
        sys.stderr.write(f"seed {self._program.seed}, world rank {self._me}: {where}: {text}\n")
        if isinstance(what, BaseException):
            sys.stderr.write("".join(traceback.format_exception(what)))
        sys.stderr.flush()

    def _settle(
        self, where: str, call: Call, memory: Memory, error: Exception | None, rank: int, size: int
    ) -> None:
        """Record the outcome of a call: right, refused where allowed, or wrong."""
        if error is not None:
            if not (call.may_refuse or call.must_refuse) or not isinstance(error, _REFUSALS):
                self._fail(f"{where}, {described(call)}", error)
                return
            self.outcomes[where] = "refused"
            wrong = memory.difference([])
        elif call.must_refuse:
            self._fail(f"{where}, {described(call)}", "neither TypeError nor ValueError")
            return
        else:
            if call.may_refuse:
                self.outcomes[where] = "right"
            wrong = memory.difference(expected(call, rank, size))
        if wrong:
            self._fail(f"{where}, {described(call)}", wrong)

    # --- steps ---

    def _do(self, where: str, step: Step, place: int) -> None:
        if isinstance(step, Make):
            self._make(step.group)
        elif isinstance(step, Close):
            self._close(step.group)
        elif isinstance(step, Lanes):
            self._lanes(where, step)
        elif isinstance(step, Then):
            self._then(where, step, place)
        elif isinstance(step, InOrder):
            self._in_order(where, step, place)
        elif isinstance(step, Messages):
            self._messages(where, step, place)
        elif isinstance(step, ObjectMessages):
            self._object_messages(where, step)
        elif step.group in self._handles:
            pending = self._call(where, step, place)
            if pending is not None:
                self._pending.append(pending)

    def _finish_due(self, place: int | None) -> None:
        due = [item for item in self._pending if place is None or item.due <= place]
        self._rng.shuffle(due)
        for item in due:
            item.finish()
        self._pending = [item for item in self._pending if all(item is not other for other in due)]

    def _make(self, number: int) -> None:
        group, seed = self._program.groups[number], self._program.seed
        if group.how == "world":
            self._handles[number] = Handle(from_world(f"fuzz {seed}", 1800.0, debug=group.is_debug))
            return
        if group.how == "torch":
            created = dist.new_group(list(group.members))
            if self._me in group.members:
                self._handles[number] = Handle(created.native, created)
            return
        assert group.parent is not None
        above = self._program.groups[group.parent].members
        if self._me not in above:
            return
        parent = self._handles[group.parent].native
        if group.how == "clone":
            self._handles[number] = Handle(parent.clone())
        elif group.how == "new_group":
            native = parent.new_group([above.index(member) for member in group.members])
            if native is not None:
                self._handles[number] = Handle(native)
        else:
            is_in = self._me in group.members
            other = None if seed % 2 else 1
            native = parent.split(
                0 if is_in else other, group.members.index(self._me) if is_in else 0
            )
            if is_in:
                self._handles[number] = Handle(native)
            elif native is not None:
                native.close()

    def _close(self, number: int) -> None:
        if number not in self._handles:
            return
        handle = self._handles[number]
        mine = [item for item in self._pending if item.group == number]
        for item in mine:
            if item.blocks_close:
                item.finish()
        if handle.torch is not None:
            dist.destroy_process_group(handle.torch)
        else:
            handle.native.close()
        del self._handles[number]
        for item in mine:
            if not item.blocks_close:
                item.finish()
        self._pending = [item for item in self._pending if item.group != number]

    def _call(self, where: str, call: Call, place: int) -> Pending | None:
        """Execute a call with its repeats; the last repeat may stay asynchronous."""
        handle = self._handles[call.group]
        rank, size = handle.rank, handle.size
        if call.kind in OBJECTS:
            try:
                for _ in range(call.repeats):
                    with _MODES[call.modes[rank]]():
                        wrong = objects(handle, call)
                    if wrong:
                        self._fail(f"{where}, {described(call)}", wrong)
            except Exception as error:
                self._fail(f"{where}, {described(call)}", error)
            return None
        with _MODES[call.modes[rank]]():
            memory = Memory(call, operands(call, rank, size))
        for time in range(call.repeats):
            finish = self._issued(where, call, memory, handle)
            if call.is_async[rank] and time == call.repeats - 1:
                return Pending(place + call.waits[rank], call.group, finish)
            finish()
            memory.refill()
        return None

    def _issued(self, where: str, call: Call, memory: Memory, handle: Handle) -> Callable[[], None]:
        """Issue a call once; return the function that waits and checks."""
        rank, size = handle.rank, handle.size
        refused: Exception | None = None
        work = None
        try:
            with _MODES[call.modes[rank]]():
                work = issue(handle, call, memory.inputs, memory.outputs)
        except Exception as error:
            refused = error
        by_future = call.seed % 3 == 0 and hasattr(work, "get_future")

        def finish() -> None:
            error = refused
            try:
                if work is not None:
                    (work.get_future() if by_future else work).wait()
            except Exception as raised:
                error = raised
            self._settle(where, call, memory, error, rank, size)

        return finish

    def _lanes(self, where: str, step: Lanes) -> None:
        def run(lane: int, calls: tuple[Call, ...]) -> None:
            try:
                pending = [
                    self._call(f"{where}.{lane}.{i}", call, 0) for i, call in enumerate(calls)
                ]
                for item in pending:
                    if item is not None:
                        item.finish()
            except Exception as error:
                self._fail(f"{where}.{lane}", error)

        threads = [
            threading.Thread(target=run, args=(lane, calls), name=f"lane-{lane}", daemon=True)
            for lane, calls in enumerate(step.lanes)
            if calls[0].group in self._handles
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _then(self, where: str, step: Then, place: int) -> None:
        first, second = step.first, step.second
        if first.group not in self._handles:
            return
        handle = self._handles[first.group]
        rank, size = handle.rank, handle.size
        with _MODES[first.modes[rank]]():
            one = Memory(first, operands(first, rank, size))
            work = issue(handle, first, one.inputs, one.outputs)
        with _MODES[second.modes[rank]]():
            two = Memory(second, operands(second, rank, size))
        ends: list[Callable[[], None]] = []
        is_called = threading.Event()

        def callback(future: Any) -> int:
            try:
                ends.append(self._issued(f"{where}.then", second, two, handle))
            except Exception as error:
                self._fail(f"{where}.then", error)
            is_called.set()
            return place

        if step.api == "done":
            chained = None
            (work.future if hasattr(work, "future") else work.get_future()).add_done_callback(
                callback
            )
        else:
            chained = work.get_future().then(callback)

        def finish() -> None:
            error: Exception | None = None
            try:
                work.wait()
                if chained is not None and chained.wait() != place:
                    self._fail(where, "the chained future has another value")
                is_called.wait()
            except Exception as raised:
                error = raised
            self._settle(where, first, one, error, rank, size)
            for end in ends:
                end()

        self._pending.append(
            Pending(place + first.waits[rank], first.group, finish, blocks_close=True)
        )

    def _in_order(self, where: str, step: InOrder, place: int) -> None:
        group = step.calls[0].group
        if group not in self._handles:
            return
        handle = self._handles[group]
        rank = handle.rank
        ends: list[Callable[[], None]] = []

        def stages() -> None:
            for i, call in enumerate(step.calls):
                pending = self._call(f"{where}.{i}", call, place)
                if pending is not None:
                    ends.append(pending.finish)

        work = handle.native.in_order(stages, async_op=step.is_async[rank])

        def finish() -> None:
            try:
                if work is not None:
                    work.wait()
            except Exception as error:
                self._fail(where, error)
            for end in ends:
                end()

        self._pending.append(
            Pending(place + step.calls[0].waits[rank], group, finish, blocks_close=True)
        )

    # --- messages ---

    def _messages(self, where: str, step: Messages, place: int) -> None:
        if step.group not in self._handles:
            return
        handle = self._handles[step.group]
        rank = handle.rank
        posts: list[tuple[int, bool]] = [
            (i, True) for i, m in enumerate(step.messages) if m.src == rank
        ]
        receives = [(i, False) for i, m in enumerate(step.messages) if m.dst == rank]
        # Sends and receives each keep their order, in which they match.
        merged = sorted(posts + receives, key=lambda post: (post[0], post[1]))
        if self._rng.random() < 0.5:
            merged = receives + posts if self._rng.random() < 0.5 else posts + receives
        with _MODES[step.modes[rank]]():
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
            self._pending.append(
                Pending(place + step.waits[rank], step.group, finish, blocks_close=True)
            )

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
                self._fail(place_text, error)
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
                self._fail(place_text, wrong)

        return finish

    def _object_messages(self, where: str, step: ObjectMessages) -> None:
        if step.group not in self._handles:
            return
        handle = self._handles[step.group]
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
                        self._fail(f"{where} send_object {number}", error)

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
                self._fail(f"{where} recv_object", error)
                continue
            message = due.pop(number, None)
            if message is None or message[0] != source:
                self._fail(
                    f"{where} recv_object",
                    f"object {number} from rank {source}, which is not under way",
                )
                continue
            if not equal(got, obj(f"{step.seed} {number}", message[3])):
                self._fail(f"{where} recv_object", f"object {number} from rank {source} is damaged")
            if last.get(message[:2], -1) > number:
                self._fail(
                    f"{where} recv_object",
                    f"object {number} of thread {message[1]} of rank {source} came late",
                )
            last[message[:2]] = number
        for sender in senders:
            sender.join()


def run(program: Program, verdicts: Any, deadline: Deadline, is_quiet: bool = False) -> list[str]:
    """Run a program; return the failures of all ranks.

    Collective: over ``verdicts``, the group of all ranks.
    """
    player = Player(program, verdicts.rank, deadline, is_quiet)
    player.play()
    deadline.now("the verdict of all ranks")
    return told_by_all(verdicts, player.failures, player.outcomes)


def told_by_all(verdicts: Any, failures: list[str], outcomes: dict[str, str]) -> list[str]:
    """Return all failures, and the calls that only some ranks refused.

    Collective: over ``verdicts``.
    """
    everything = verdicts.all_gather_object((failures, outcomes))
    reports = [
        f"rank {rank}: {failure}" for rank, (found, _) in enumerate(everything) for failure in found
    ]
    for where in sorted({where for _, ends in everything for where in ends}):
        ends = {
            rank: outcomes[where]
            for rank, (_, outcomes) in enumerate(everything)
            if where in outcomes
        }
        if len(set(ends.values())) > 1:
            reports.append(f"{where}: not alike on all ranks: {ends}")
    return reports


@contextlib.contextmanager
def torch_default_group() -> Iterator[None]:
    """Create torch's default group on mpidist's backend for the block."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("mpidist")
    try:
        yield
    finally:
        dist.destroy_process_group()


def described(step: Any) -> str:
    """Return a step as a Python expression, without default values."""
    if isinstance(step, tuple):
        return (
            f"({', '.join(map(described, step))},)"
            if step and hasattr(step[0], "__dataclass_fields__")
            else repr(step)
        )
    if not hasattr(step, "__dataclass_fields__"):
        return repr(step)
    parts = [
        f"{field.name}={described(getattr(step, field.name))}"
        for field in fields(step)
        if getattr(step, field.name) != field.default
    ]
    return f"{type(step).__name__}({', '.join(parts)})"


def _as_broadcast(message: Message, seed: int, mode: str) -> Call:
    return Call(
        "broadcast", 0, ("native",) * 2, (False,) * 2, (mode,) * 2, (0,) * 2, seed, message.dtype,
        counts=(message.count,), values="bits",
    )  # fmt: skip
