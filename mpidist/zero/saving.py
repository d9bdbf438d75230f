"""State dicts of the sharded optimizer: consolidated, in the background too, or rank-local."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

import torch
from torch.profiler import record_function

from mpidist.comm.consistency import comparing
from mpidist.comm.group_types import AnyGroup
from mpidist.comm.resolve_group import native_group
from mpidist.dynamo import untraced
from mpidist.zero import local_state, state_dict
from mpidist.zero.background import Background, Consolidating
from mpidist.zero.consolidation import CHUNK_BYTES, Consolidation
from mpidist.zero.first_state import first_state
from mpidist.zero.flat_state import FlatState
from mpidist.zero.loading import Loading
from mpidist.zero.local_state import RankLocalState
from mpidist.zero.pieces import Piece
from mpidist.zero.result_memory import KeptMemory
from mpidist.zero.state_dict import ParamState
from mpidist.zero.unowned_state import UnownedState

if TYPE_CHECKING:
    from torch.optim.optimizer import StateDict


@untraced
class Saving(Loading):
    """State dicts of the sharded optimizer."""

    def _init_state(self, process_group: AnyGroup) -> None:
        # On the instance: a class attribute would hide it in wrappers that derive from the class
        # and delegate to the object, as Fabric's does.
        self._is_constructed = False
        self.group = native_group(process_group)
        self.rank = self.group.rank
        self.world_size = self.group.size
        self._state = FlatState()
        self._unowned = UnownedState()
        self._consolidation = Consolidation(self.group)
        self._background = Background(self.group)
        self._copies = KeptMemory()

    # --- the state of all ranks ---

    def consolidate_state_dict(
        self, recipient_rank: int = 0, *, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        """Send all ranks' state to one rank, for its ``state_dict``.

        Other ranks allocate at most one chunk.

        Collective: over the group.

        Blocks: until this rank has sent its state; on the recipient until all state has arrived.

        Args:
            recipient_rank: Rank in the group; -1 for all.
            chunk_bytes: Longest message.

        Raises:
            ValueError: ``recipient_rank`` is out of range, or ``chunk_bytes`` not positive.
            DisagreementError: Another rank refused, or ranks name different recipients.
        """
        self._require_recipient("OSS.consolidate_state_dict", recipient_rank, chunk_bytes)
        with record_function("mpidist::oss::consolidate"):
            self._consolidation.run(self._image().with_masters(), recipient_rank, chunk_bytes)

    def consolidate_async(
        self,
        recipient_rank: int = 0,
        path: str | os.PathLike[str] | None = None,
        *,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> Consolidating:
        """Send all ranks' state to one rank while training continues.

        The state is that of the call: each rank copies its shard, and a group and thread of the
        optimizer's own (``close`` ends them) send the copies. On Linux the thread has the lowest
        priority: where training keeps all cores busy, a save takes several steps and slows them
        little. A call first waits for the previous one.

        Collective: over the group.

        Blocks: until this rank's shard is copied.

        Args:
            recipient_rank: Rank in the group; -1 for all.
            path: File for the state dict, written by the recipient (``torch.save``) under
                another name, synced to the disk, then renamed: what has the name is complete.
            chunk_bytes: Longest message.

        Returns:
            A handle: ``wait``, ``done``, and ``result``, the state dict in torch's format, on the
            recipient.

        Raises:
            ValueError: As ``consolidate_state_dict``; ``path`` with all ranks as recipients.
            TypeError: ``path`` is no path.
            DisagreementError: Another rank refused, or ranks give different arguments.
        """
        self._require_recipient("OSS.consolidate_async", recipient_rank, chunk_bytes, path)
        with record_function("mpidist::oss::consolidate_async"):
            groups_now = state_dict.packed_groups(self.param_groups, itertools.count())
            return self._background.start(
                self._image().with_masters(),
                recipient_rank,
                chunk_bytes,
                path,
                lambda state: state_dict.assembled(state, groups_now),
            )

    def close(self) -> None:
        """Wait for the last ``consolidate_async``, and end its group.

        Collective: over the group. May be called twice.
        """
        self._background.close()

    def state_dict(self, all_ranks: bool = False) -> StateDict:
        """Return the state as ``optim`` over all parameters on one rank would.

        With a wire there is also ``"masters"``, by parameter number, which torch's optimizers do
        not read: ``"value"``, the master copy, and ``"seen"`` with a wire of int8, what all ranks
        saw beside it; both in the parameter's shape and dtype.

        Args:
            all_ranks: First consolidate on all ranks; collective over the group. Otherwise it is
                the state of the last ``consolidate_state_dict``, on its recipient.

        Raises:
            RuntimeError: The state was not consolidated on this rank.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        if all_ranks:
            self.consolidate_state_dict(-1)
        result = state_dict.packed(self.param_groups, self._consolidation.result(self.rank))
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            changed = post_hook(self, result)
            if changed is not None:
                result = changed
        return result

    # --- the state of one rank ---

    def rank_local_state_dict(self, *, copies: bool = True) -> RankLocalState:
        """Return this rank's state as flat tensors, for the same world size and layout.

        ``load_state_dict`` restores the same bits, those of a wire's master copies too.
        Communicates nothing.

        Args:
            copies: Return copies in host memory, unchanged by later steps; else the optimizer's own
                tensors.
        """
        image = self._image()
        return local_state.packed(
            image.copied(self._copies) if copies else image,
            self.world_size,
            self._unowned,
            state_dict.packed_groups(self.param_groups, itertools.count()),
        )

    # --- torch.distributed.checkpoint ---

    def sharded_state_dict(self, *, copies: bool = True, masters: bool = True) -> StateDict:
        """Return this rank's state for ``torch.distributed.checkpoint``, to save or to load.

        The dict may be part of a larger one, with a model's state. Keys are those of torch's
        ``get_optimizer_state_dict``: ``state.<name>.<kind>``, ``param_groups.<place>.<setting>``;
        names are those of named parameters, else numbers. A checkpoint may be loaded at another
        world size, partition or memory format. Communicates nothing.

        A load fills the keys of this dict. A trainable parameter without state has the keys that
        its first step would make; for a checkpoint without them pass
        ``DefaultLoadPlanner(allow_partial_load=True)``, and the next step makes that state.

        Args:
            copies: Return copies in host memory, unchanged by later steps, as ``async_save`` needs;
                a load is then complete before ``load_sharded_state_dict`` changes anything. Else
                return the optimizer's own tensors.
            masters: With a wire, include its master copies: ``masters.<name>.value``, and
                ``masters.<name>.seen`` of int8. Else a load needs a checkpoint without them, and
                masters start from the parameters.
        """
        from mpidist.zero import checkpoint  # late: imports torch.distributed.checkpoint

        image = self._image()
        image = image.with_masters() if masters else replace(image, masters=(), seen=())
        image = image.copied(self._copies) if copies else image
        return checkpoint.sharded(image, self._shards.pieces, self.param_groups, self._first_state)

    # --- arguments and parts ---

    def _first_state(self, piece: Piece) -> ParamState:
        number = 0
        for group in self.param_groups:
            number += len(group["params"])
            if piece.number < number:
                return first_state(self.optim, group, piece)
        raise AssertionError(f"no group has parameter {piece.number}")

    def _require_recipient(
        self, where: str, recipient: object, chunk_bytes: int, path: object = None
    ) -> None:
        """Compare the arguments of all ranks. Collective: over the group."""
        with comparing(self.group, where) as rows:
            if (
                isinstance(recipient, bool)
                or not isinstance(recipient, int)
                or not -1 <= recipient < self.world_size
            ):
                raise ValueError(
                    f"recipient_rank is a rank from 0 to {self.world_size - 1}, or -1 for all; got "
                    f"{recipient!r}"
                )
            if chunk_bytes < 1:
                raise ValueError(f"chunk_bytes must be positive; got {chunk_bytes}")
            if path is not None and recipient == -1:
                raise ValueError(
                    "path= needs one recipient, which writes the file; got recipient_rank=-1"
                )
            if not isinstance(path, (str, os.PathLike, type(None))):
                raise TypeError(f"path must be a str or os.PathLike; got {type(path).__name__}")
            rows += [
                ("recipient_rank", recipient),
                ("chunk_bytes", chunk_bytes),
                ("has path", path is not None),
            ]

    def local_state_bytes(self) -> int:
        """Return the bytes of the state that this rank holds."""
        return sum(
            value.nbytes
            for held in self.optim.state.values()
            for value in held.values()
            if isinstance(value, torch.Tensor)
        )

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError(
            "OSS holds memory and a group that all ranks share, and cannot be copied: build "
            "another one on all ranks"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "OSS cannot be pickled: save consolidate_state_dict() and state_dict(), load with "
            "load_state_dict()"
        )
