"""Link: the messages between this process and those of another program."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from mpidist.comm.coupling.messages import END, LEAVES, Tag
from mpidist.comm.memory import buffer
from mpidist.comm.mpi import backoff, mpi_errors
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.nonblocking import Request
from mpidist.comm.recorder import recorder
from mpidist.errors import CommTimeout, MpidistError

_LONGEST_SLEEP_S = 1e-3
# A wait for the other program yields its core so long, then sleeps. In a transfer both sides yield
# for longer: MPI moves a part of the data at each test, and sleeps would halve the bandwidth.
_YIELD_S, _TRANSFER_YIELD_S = 500e-6, 50e-3


class Link:
    """This process's messages with its partners in another program.

    Args:
        comm: The intercommunicator of both programs.
        program: Name of the other one.
        partners: Ranks in it.
        timeout_s: Longest wait; None for no limit.

    Attributes:
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
        self._small: list[tuple[MPI.Request, np.ndarray]] = []
        # Of samples that were not received in time: MPI may read their memory to the end.
        self._unended: list[tuple[list[Request], np.ndarray, object]] = []

    def ask(self, partner: int, samples: int) -> None:
        """Send a request for samples, or ``LEAVES``."""
        self._send_small(partner, Tag.ASK, [samples])

    def end(self, partner: int) -> None:
        """Send the end."""
        self._send_small(partner, Tag.HEAD, [END])

    def request(self) -> tuple[int, int] | None:
        """Return a partner and its request that have arrived, or None."""
        found = self._receive_small(Tag.ASK)
        if found is None:
            return None
        partner, numbers = found
        if len(numbers) != 1 or (numbers[0] < 1 and numbers[0] != LEAVES):
            raise MpidistError(
                f'{self.where} got a request of "{self.program}" that cannot be read: {numbers}'
            )
        return partner, numbers[0]

    def header(self) -> tuple[int, list[int]] | None:
        """Return a partner and the numbers of its header that have arrived, or None."""
        return self._receive_small(Tag.HEAD)

    def send(
        self, partner: int, head: Sequence[int], data: Sequence[buffer.Buffer], owner: object
    ) -> None:
        """Send a sample.

        Blocks: until the memory may be changed.

        Args:
            owner: Holds the memory of the data, and is held where it is not received in time.

        Raises:
            CommTimeout: Not received in time.
        """
        with self._explained("put"):
            numbers = np.array(head, np.int64)
            requests: list[Request] = [self._comm.Isend(numbers, partner, Tag.HEAD)]
            requests += [self._comm.Isend(part, partner, Tag.DATA) for part in data]
        try:
            self.until(lambda: _all_ended(requests), "put", "the data was not received",
                       yield_s=_TRANSFER_YIELD_S)  # fmt: skip
        except CommTimeout:
            self._unended.append((requests, numbers, owner))
            raise

    def receive(
        self, partner: int, space: Sequence[buffer.Buffer], stops: Callable[[], bool]
    ) -> bool:
        """Receive the data behind a header; return whether it is complete.

        Args:
            stops: Ends the wait.

        Raises:
            MpidistError: A message has more or fewer bytes than its part of the space.
        """
        status, rest = MPI.Status(), deque(space)
        requests: list[Request] = []

        def is_over() -> bool:
            # Matched before it is received: of a receive that is too short Open MPI crashes.
            while rest and (found := self._comm.Improbe(partner, Tag.DATA, status)) is not None:
                nbytes, announced = status.Get_count(MPI.BYTE), rest[0][1]
                if nbytes != announced:
                    raise MpidistError(
                        f'{self.where} got of process {partner} of "{self.program}" other data '
                        f"than its header announced: {nbytes} bytes, not {announced}"
                    )
                requests.append(found.Irecv(rest.popleft()))
            return (_all_ended(requests) and not rest) or stops()

        self.until(is_over, "get", "the data did not come", None, _TRANSFER_YIELD_S)
        return not requests and not rest

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

    def _send_small(self, partner: int, tag: Tag, numbers: Sequence[int]) -> None:
        with self._explained("close" if numbers[0] == END else "get"):
            memory = np.array(numbers, np.int64)
            self._small = [each for each in self._small if not each[0].Test()]
            self._small.append((self._comm.Isend(memory, partner, tag), memory))

    def _receive_small(self, tag: Tag) -> tuple[int, list[int]] | None:
        status = MPI.Status()
        message = self._comm.Improbe(MPI.ANY_SOURCE, tag, status)
        if message is None:
            return None
        numbers = np.zeros(-(-status.Get_count(MPI.BYTE) // 8), np.int64)
        message.Recv([numbers, status.Get_count(MPI.BYTE), MPI.BYTE])
        return status.Get_source(), numbers.tolist()


class _Explained:
    """Block whose MPI errors become the library's."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and mpi_errors.is_mpi_error(error):
            raise mpi_errors.translate(error, self._where) from None


def _all_ended(requests: list[Request]) -> bool:
    while requests and requests[-1].Test():
        requests.pop()
    return not requests
