"""Remote references of one worker: owned values, held references, and calls of ``remote``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from mpidist.comm.memory.stream import Device, device_of, events_here
from mpidist.comm.transport.incoming import Incoming
from mpidist.errors import FrameError
from mpidist.rpc import message
from mpidist.rpc.calls.pending import PendingCalls
from mpidist.rpc.calls.reader import Reader
from mpidist.rpc.calls.wire import Wire
from mpidist.rpc.message import PAIR, TO_REMOTE, Kind
from mpidist.rpc.names import callee
from mpidist.rpc.rref_store import ID_SHIFT, Entry, RRefStore, require_own
from mpidist.rpc.threads.call import Call, Creation
from mpidist.rpc.threads.log import logger
from mpidist.rpc.threads.polling import Polling
from mpidist.rpc.values import codec
from mpidist.rpc.values.codec import Args, Kwargs
from mpidist.rpc.values.pickles import Reference
from mpidist.rpc.worker import Workers

_MAX_PAIRS = 1000  # (reference, fork) in one message


class References:
    """Owned values and held references of one worker.

    Args:
        workers: All workers.
        wire: Sends announcements and deletes.
        reader: Gets its ``make_reference`` from here.
        calls: Starts the calls of ``remote``.
        polling: Polls while a thread waits for a value.
        make: Makes a reference from (reference, fork, owner's rank).
        devices: On their current streams values may be computed.

    Attributes:
        store: The owned values, with their forks.
        deletes: (owner, reference, fork) of deleted references that the owner does not know yet.
    """

    def __init__(
        self,
        workers: Workers,
        wire: Wire,
        reader: Reader,
        calls: PendingCalls,
        polling: Polling,
        make: Callable[[int, int, int], Reference],
        devices: Sequence[Device] = (),
    ) -> None:
        self.store = RRefStore(workers.me.id)
        self.deletes: deque[tuple[int, int, int]] = deque()
        # Held references to other workers' values: (owner, reference) by fork. Numbers, which the
        # garbage collector does not scan; a weak reference to each holder it would.
        self._held: dict[int, tuple[int, int]] = {}
        self._workers = workers
        self._wire = wire
        self._reader = reader
        self._calls = calls
        self._polling = polling
        self._make = make
        self._devices = devices
        reader.make_reference = self._make_checked
        wire.announce = self.announce

    def _make_checked(self, reference: int, fork: int, owner: int) -> Reference:
        self._require_worker(owner)
        return self._make(reference, fork, owner)

    def _require_worker(self, owner: int) -> None:
        if owner >= len(self._workers.infos):
            raise FrameError(
                f"a reference to a value of rank {owner}, of {len(self._workers.infos)} workers"
            )

    # References held here to values of other workers.

    def register_user(self, owner: int, reference: int, fork: int) -> None:
        """Register a held reference to another worker's value."""
        self._held[fork] = owner, reference

    def is_held(self, fork: int) -> bool:
        """Return whether a held reference is registered and not deleted."""
        return fork in self._held

    def delete_user(self, fork: int) -> None:
        """Delete a held reference. Idempotent; safe in finalizers."""
        held = self._held.pop(fork, None)
        if held is not None:
            self.queue_delete(*held, fork)

    def delete_users(self) -> None:
        """Delete all held references to other workers' values."""
        for fork in list(self._held):
            self.delete_user(fork)

    def queue_delete(self, owner: int, reference: int, fork: int) -> None:
        """Queue the delete of a fork; the polling thread sends it. Safe in finalizers."""
        self.deletes.append((owner, reference, fork))

    def flush_deletes(self) -> None:
        """Send the queued deletes to the owners, on the polling thread."""
        pairs: dict[int, list[tuple[int, int]]] = {}
        while self.deletes:
            owner, reference, fork = self.deletes.popleft()
            pairs.setdefault(owner, []).append((reference, fork))
        for owner, gone in pairs.items():
            if owner == self._workers.me.id:
                for reference, fork in gone:
                    self.store.delete_fork(reference, fork)
            else:
                try:
                    self._post_deletes(owner, gone)
                except Exception:
                    # An owner that cannot be reached must not keep deletes from the others.
                    logger.exception(
                        "%s: %d deletes to rank %d were lost", self._workers.me, len(gone), owner
                    )

    def announce(self, owner: int, holder: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Send an owner the (reference, fork) pairs of a new holder, ahead of the message to it."""
        if owner in self._workers.left:
            return
        for start in range(0, len(pairs), _MAX_PAIRS):
            header = message.pack_forks(holder, pairs[start : start + _MAX_PAIRS])
            self._wire.post_one_way(owner, Kind.RREF_FORK, header)

    def _post_deletes(self, owner: int, pairs: Sequence[tuple[int, int]]) -> None:
        if owner in self._workers.left:
            return
        for start in range(0, len(pairs), _MAX_PAIRS):
            header = b"".join([PAIR.pack(*pair) for pair in pairs[start : start + _MAX_PAIRS]])
            self._wire.post_one_way(owner, Kind.RREF_USER_DELETE, header)

    def drop(self, incoming: Incoming) -> None:
        """Delete the references in a message that is not decoded."""
        for reference, fork, owner in self._reader.references_in(incoming):
            if owner < len(self._workers.infos):
                self.queue_delete(owner, reference, fork)

    # Values owned here. Forks are counted on the polling thread, in the order of messages.

    def count_forks(self, source: int, rows: Sequence[message.ReferenceRow]) -> None:
        """Count the forks of this worker's values that are in a message.

        Raises:
            FrameError: An owner is not a worker, or the sender has not made one of the forks;
                none is counted.
        """
        me, size = self.store.rank, len(self._workers.infos)
        if any([owner >= size or fork >> ID_SHIFT != source for _, fork, owner in rows]):
            self._require_worker(max([owner for _, _, owner in rows]))
            require_own(source, [fork for _, fork, _ in rows])
        if own := [(reference, fork) for reference, fork, owner in rows if owner == me]:
            self.store.add_forks(own, me)

    def add_announced_forks(self, incoming: Incoming) -> None:
        """Count the forks that another worker announces.

        Raises:
            FrameError: The holder is not a worker, or the sender has not made one of them; none is
                counted.
        """
        holder, pairs = message.unpack_forks(incoming.data, incoming.start, incoming.end)
        if holder >= len(self._workers.infos):
            raise FrameError(f"forks of rank {holder}, of {len(self._workers.infos)} workers")
        require_own(incoming.source, [fork for _, fork in pairs])
        self.store.add_forks(pairs, holder)
        if holder in self._workers.left:
            # It has died before the reference came, or will never take it up.
            self.store.delete_forks_of(holder)

    def delete_forks(self, incoming: Incoming) -> None:
        """Delete the forks that a message names."""
        for reference, fork in message.unpack_pairs(incoming.data, incoming.start, incoming.end):
            self.store.delete_fork(reference, fork)

    def set_value(self, entry: Entry, value: object) -> None:
        """Set a value, behind the work on the calling thread's current streams (pytorch 54932)."""
        devices = self._devices
        if isinstance(value, torch.Tensor):
            own = device_of((value,))
            if own is not None and own not in devices:
                devices = (*devices, own)
        entry.set(value, events=events_here(devices) if devices else ())

    def wait_for_entry(self, entry: Entry, timeout_s: float, creation: Creation | None) -> None:
        """Wait until a value of this worker is set, or its creation is lost.

        Blocks: at most ``timeout_s`` seconds; 0 for no limit.

        Raises:
            CommTimeout: The value was not set in time.
        """
        what = f"the value of reference {entry.reference:#x}"
        call = Call(self._workers.me.id, what, timeout_s)
        entry.when_set(lambda _: call.finish())
        if creation is not None:
            creation.future().add_done_callback(
                lambda future: call.finish() if creation.is_lost and not call.done else None
            )
        self._polling.wait(call)
        if not call.done:
            raise call.timed_out(what)

    def create(
        self, to: int, function: object, args: Args, kwargs: Kwargs, timeout_s: float
    ) -> tuple[int, int, Entry | None, Creation]:
        """Call a function on a worker, which keeps the result.

        Returns:
            The reference, the caller's fork, the entry if this worker is the owner, and the call.
        """
        kind, name = callee.wire_name(function)
        content = codec.encode_function(function, name, args, kwargs, self._wire.data_only[to])
        store = self.store
        reference, fork = store.make_id(), store.make_id()
        entry, on_answer = None, None
        if to == self._workers.me.id:
            entry = store.create(reference, fork)

            def on_answer() -> None:
                store.delete_fork(reference, fork)

        creation = self._calls.creation(to, name, timeout_s, on_answer, function)
        try:
            self._calls.start(
                creation, int(kind) + TO_REMOTE, PAIR.pack(reference, fork) + name, content
            )
        except BaseException:
            if on_answer is not None:
                on_answer()
            raise
        self._calls.pace()
        return reference, fork, entry, creation
