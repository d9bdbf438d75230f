"""Link: the messages between this process and those of another program.

The messages of a call and their memory belong to a ``Transfer``, which the link holds until MPI
has ended them, whatever exception leaves the call. The messages of one are begun in one call in C,
and a message that must be sent or taken once in one step of an iterator: Python runs no handler of
a signal within these (since 3.11), nor before the next call. So a call that is left has begun all
of its messages or none, and knows which.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import repeat

import numpy as np

from mpidist.comm.coupling.messages import END, LEAVES, Tag
from mpidist.comm.memory import buffer
from mpidist.comm.mpi import backoff, mpi_errors, runtime
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.nonblocking import Request
from mpidist.comm.recorder import recorder
from mpidist.errors import CommTimeout, MpidistError

_LONGEST_SLEEP_S = 1e-3
# A wait for the other program yields its core so long, then sleeps. In a transfer both sides yield
# for longer: MPI moves a part of the data at each test, and sleeps would halve the bandwidth.
_YIELD_S, _TRANSFER_YIELD_S = 500e-6, 50e-3

# All links of the process: MPI may work on the memory of their transfers to its end.
_links: list[Link] = []


class Link:
    """This process's messages with its partners in another program.

    Args:
        comm: The intercommunicator of both programs.
        program: Name of the other one.
        partners: Ranks in it.
        timeout_s: Longest wait; None for no limit.

    Attributes:
        at_exit: Called with a time limit before MPI ends: the last words of a program that has not
            closed.
        unserved: Partner and numbers of the last small message that has arrived; None when the
            caller has served it.
        where: Beginning of an error's text.
    """

    def __init__(
        self, comm: MPI.Intercomm, own: str, program: str, partners: Sequence[int],
        timeout_s: float | None,
    ) -> None:  # fmt: skip
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._comm = comm
        self.program = program
        self.partners = tuple(partners)
        self._timeout_s = timeout_s
        self.where = f'process {comm.Get_rank()} of "{own}"'
        self.at_exit: Callable[[float], object] | None = None
        self.unserved: tuple[int, np.ndarray] | None = None
        # Begun, and not known to have ended. Sends are those of one thread at a time, receives
        # those of an inlet's.
        self._sends: list[Transfer] = []
        self._receives: list[Transfer] = []
        self._ended: set[int] = set()  # partners that have this process's last word
        _links.append(self)
        runtime.close_at_exit(self)

    def ask(self, partner: int, samples: int) -> None:
        """Send a request for samples."""
        with self._explained("get"):
            self._begin(partner, [(np.array([samples], np.int64), Tag.ASK)], Transfer(None))

    def leave(self, partner: int) -> None:
        """Send ``LEAVES``, once."""
        self._end(partner, Tag.ASK, LEAVES)

    def end(self, partner: int) -> None:
        """Send the end, once."""
        self._end(partner, Tag.HEAD, END)

    def request(self) -> tuple[int, int] | None:
        """Return a partner and its request that have arrived, or None.

        It is the same one until the caller sets ``unserved`` to None.
        """
        self._take(Tag.ASK)
        if self.unserved is None:
            return None
        partner, numbers = self.unserved[0], self.unserved[1].tolist()
        if len(numbers) != 1 or (numbers[0] < 1 and numbers[0] != LEAVES):
            raise MpidistError(
                f'{self.where} got a request of "{self.program}" that cannot be read: {numbers}'
            )
        return partner, numbers[0]

    def header(self) -> tuple[int, list[int]] | None:
        """Return a partner and the numbers of its header that have arrived, or None."""
        self._take(Tag.HEAD)
        if (found := self.unserved) is None:
            return None
        self.unserved = None
        return found[0], found[1].tolist()

    def send(
        self, partner: int, head: Sequence[int], data: Sequence[buffer.Buffer], sample: Transfer
    ) -> None:
        """Send a sample.

        Blocks: until the memory may be changed.

        Args:
            sample: Holds the memory of the data.

        Raises:
            CommTimeout: Not received in time.
        """
        with self._explained("put"):
            messages: list[tuple[object, Tag]] = [(np.array(head, np.int64), Tag.HEAD)]
            self._begin(partner, messages + [(part, Tag.DATA) for part in data], sample)
        self.until(sample.has_ended, "put", "the data was not received", yield_s=_TRANSFER_YIELD_S)

    def receive(
        self, partner: int, space: Sequence[buffer.Buffer], owner: object,
        stops: Callable[[], bool],
    ) -> bool:  # fmt: skip
        """Receive the data behind a header; return whether it is complete.

        Args:
            owner: Holds the memory of the space.
            stops: Ends the wait.

        Raises:
            MpidistError: A message has more or fewer bytes than its part of the space.
        """
        status, rest, transfer = MPI.Status(), deque(space), Transfer(owner)
        self._receives.append(transfer)

        def is_over() -> bool:
            # Matched before it is received: of a receive that is too short Open MPI crashes.
            while rest and (found := self._comm.Improbe(partner, Tag.DATA, status)) is not None:
                nbytes, announced = status.Get_count(MPI.BYTE), rest[0][1]
                if nbytes != announced:
                    raise MpidistError(
                        f'{self.where} got of process {partner} of "{self.program}" other data '
                        f"than its header announced: {nbytes} bytes, not {announced}"
                    )
                transfer.requests.append(found.Irecv(rest.popleft()))
            return (transfer.has_ended() and not rest) or stops()

        self.until(is_over, "get", "the data did not come", None, _TRANSFER_YIELD_S)
        self._receives = _under_way(self._receives)
        return transfer.has_ended() and not rest

    def until(
        self, ready: Callable[[], object], call: str, problem: str | Callable[[], str],
        timeout_s: float | None = -1.0, yield_s: float = _YIELD_S, is_recorded: bool = True,
    ) -> None:  # fmt: skip
        """Wait until ``ready`` is true.

        Args:
            call: The user's call, and ``problem`` what has not come, for the error; called at its
                time if it is a function.
            timeout_s: -1 for the link's own.
            yield_s: Time after which the wait sleeps between tests.
            is_recorded: The wait is an entry in the recorder, unless ``ready`` is true at once.

        Raises:
            CommTimeout: Not in time.
        """
        limit_s = self._timeout_s if timeout_s == -1.0 else timeout_s
        with self._explained(call), self._entry(call, is_recorded and not ready()):
            if not backoff.until(
                ready, timeout_s=limit_s, yield_s=yield_s, longest_s=_LONGEST_SLEEP_S
            ):
                missing = problem() if callable(problem) else problem
                raise CommTimeout(
                    f'{self.where}: {call} with "{self.program}": {missing} within {limit_s:g} s'
                )

    def waiting(self, call: str) -> AbstractContextManager[None]:
        """Return a context that is an entry in the recorder: this thread waits in a call."""
        return recorder.recorded("wait", f'{call} with "{self.program}"')

    def _entry(self, call: str, is_recorded: bool) -> AbstractContextManager[None]:
        return self.waiting(call) if is_recorded else nullcontext()

    def _explained(self, call: str) -> _Explained:
        return _Explained(f'{self.where}: {call} with "{self.program}"')

    def close(self, timeout_s: float) -> None:
        """Say this process's last words, and let MPI send what has been begun; before MPI ends."""
        # The other program may have ended, too.
        with suppress(Exception):
            if self.at_exit is not None:
                self.at_exit(timeout_s)
            backoff.until(lambda: not _under_way(self._sends), timeout_s=timeout_s)

    def _begin(
        self, partner: int, messages: Sequence[tuple[object, Tag]], transfer: Transfer
    ) -> None:
        """Begin to send messages: all of them, or none."""
        buffers, tags = zip(*messages, strict=True)
        transfer.held.append(buffers)
        self._sends = [*_under_way(self._sends), transfer]
        transfer.requests.extend(map(self._comm.Isend, buffers, repeat(partner), tags))

    def _end(self, partner: int, tag: Tag, number: int) -> None:
        if partner in self._ended:
            return
        memory = np.array([number], np.int64)
        transfer = Transfer(memory)
        with self._explained("close"):
            self._sends = [*_under_way(self._sends), transfer]
            for request in map(self._comm.Isend, (memory,), (partner,), (tag,)):
                self._ended |= {partner}
                transfer.requests += [request]

    def _take(self, tag: Tag) -> None:
        """Receive a small message that has arrived, unless one is unserved."""
        status = MPI.Status()
        if self.unserved is not None or not self._comm.Iprobe(MPI.ANY_SOURCE, tag, status):
            return
        partner, nbytes = status.Get_source(), status.Get_count(MPI.BYTE)
        numbers = np.zeros(-(-nbytes // 8), np.int64)
        for _ in map(self._comm.Recv, ([numbers, nbytes, MPI.BYTE],), (partner,), (tag,)):
            self.unserved = partner, numbers  # without a call, see above


class Transfer:
    """Messages of one call, and what holds their memory.

    Attributes:
        held: Owners of the memory.
        requests: Of the messages that have been begun.
    """

    def __init__(self, owner: object) -> None:
        self.held = [owner]
        self.requests: list[Request] = []
        self._count = 0  # have ended

    def has_ended(self) -> bool:
        """Return whether MPI has ended all messages that have been begun."""
        while self._count < len(self.requests) and self.requests[self._count].Test():
            self._count += 1
        return self._count == len(self.requests)


class _Explained:
    """Block whose MPI errors become the library's."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and mpi_errors.is_mpi_error(error):
            raise mpi_errors.translate(error, self._where) from None


def _under_way(transfers: list[Transfer]) -> list[Transfer]:
    return [transfer for transfer in transfers if not transfer.has_ended()]
