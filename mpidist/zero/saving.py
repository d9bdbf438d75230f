"""State dicts of the sharded optimizer: brought together from all ranks, in the background too, or each rank's by itself."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.profiler import record_function

from mpidist.comm.consistency import comparing
from mpidist.dynamo import untraced
from mpidist.zero import groups, local_state, state_dict
from mpidist.zero.background import Background, Consolidating
from mpidist.zero.consolidation import CHUNK_BYTES, Consolidation
from mpidist.zero.first_state import first_state
from mpidist.zero.loading import Loading
from mpidist.zero.pieces import Piece
from mpidist.zero.result_memory import KeptMemory


@untraced
class Saving(Loading):
    """The part of the sharded optimizer that saves."""

    _consolidation: Consolidation
    _background: Background
    _copies: KeptMemory

    # --- the state of all ranks ---

    def consolidate_state_dict(
        self, recipient_rank: int = 0, *, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        """Bring all ranks' state to one, for its ``state_dict``. Other ranks allocate at most one chunk.

        Collective: over the group.

        Blocks: until the state has left this rank, and on the recipient until it is there.

        Args:
            recipient_rank: Rank in the group; -1 for all.
            chunk_bytes: Longest message.

        Raises:
            ValueError: ``recipient_rank`` is out of range, or ``chunk_bytes`` not positive.
            DisagreementError: Another rank refused, or ranks name different recipients.
        """
        self._require_recipient("OSS.consolidate_state_dict", recipient_rank, chunk_bytes)
        groups.sync(self.param_groups, self.optim.param_groups)
        with record_function("mpidist::oss::consolidate"):
            self._consolidation.run(self._image(), recipient_rank, chunk_bytes)

    def consolidate_async(
        self,
        recipient_rank: int = 0,
        path: str | os.PathLike[str] | None = None,
        *,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> Consolidating:
        """Bring the state as it is now to one rank while the training goes on; what later steps change is not seen.

        Each rank copies its shard, and a group and thread of the optimizer's own (``close`` ends
        them) do the rest. On Linux the thread has the lowest priority: where training keeps all
        cores busy, a save takes several steps and costs them little. A call while the last one is
        under way first waits for it.

        Collective: over the group.

        Blocks: until this rank's shard is copied.

        Args:
            recipient_rank: Rank in the group; -1 for all.
            path: File that the recipient writes the state dict to (``torch.save``). It appears
                under this name once it is
                complete: it is written beside (``.part``), brought to the disk and renamed.
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
            groups_now = state_dict.packed(self.param_groups, {})["param_groups"]
            return self._background.start(
                self._image(),
                recipient_rank,
                chunk_bytes,
                path,
                lambda state: {"state": state, "param_groups": groups_now},
            )

    def close(self) -> None:
        """Wait for the last ``consolidate_async``, and end its group.

        Collective: over the group. May be called twice.
        """
        self._background.close()

    def state_dict(self, all_ranks: bool = False) -> dict[str, Any]:
        """Return the state as ``optim`` over all parameters on one rank would.

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

    def rank_local_state_dict(self, *, copies: bool = True) -> dict[str, Any]:
        """Return this rank's state as it lies: flat tensors, for ``load_state_dict`` at the same world size and layout.

        The same bits come back, those of a wire's master copies too. Communicates nothing.

        Args:
            copies: In host memory, which later steps leave alone. Otherwise its tensors are the
                optimizer's own.
        """
        groups.sync(self.param_groups, self.optim.param_groups)
        image = self._image()
        packed = state_dict.packed(self.param_groups, {})["param_groups"]
        return local_state.packed(
            image.copied(self._copies) if copies else image, self.world_size, self._unowned, packed
        )

    # --- torch.distributed.checkpoint ---

    def sharded_state_dict(self, *, copies: bool = True) -> dict[str, Any]:
        """Return this rank's part of the state for ``torch.distributed.checkpoint``: to save, or to be filled by a load.

        It may stand beside a model's in a larger dict. Keys are those of torch's
        ``get_optimizer_state_dict``: ``state.<name>.<kind>``, ``param_groups.<place>.<setting>``;
        names are those of named parameters, else numbers. A checkpoint may be loaded at another
        world size, partition or memory format. Communicates nothing.

        What is loaded is asked for by key: trainable parameters without state ask for what a first
        step would make. A checkpoint that lacks some takes
        ``DefaultLoadPlanner(allow_partial_load=True)``; their state is then made by the next step.

        Args:
            copies: In host memory, which later steps leave alone, as ``async_save`` needs while it
                writes; a load is then complete before ``load_sharded_state_dict`` changes anything.
                Otherwise the tensors are the optimizer's own.
        """
        from mpidist.zero import checkpoint  # it loads torch.distributed.checkpoint

        groups.sync(self.param_groups, self.optim.param_groups)
        image = self._image()
        image = image.copied(self._copies) if copies else image
        return checkpoint.sharded(image, self._shards.pieces, self.param_groups, self._first_state)

    # --- what they need ---

    def _first_state(self, piece: Piece) -> dict[str, Any]:
        number = 0
        for group in self.param_groups:
            number += len(group["params"])
            if piece.number < number:
                return first_state(type(self.optim), group, self.defaults, piece)
        raise AssertionError(f"no group has parameter {piece.number}")

    def _require_recipient(
        self, where: str, recipient: Any, chunk_bytes: int, path: Any = None
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

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError(
            "OSS holds memory and a group that all ranks share, and cannot be copied: build "
            "another one on all ranks"
        )

    def __reduce__(self) -> Any:
        raise TypeError(
            "OSS cannot be pickled: save consolidate_state_dict() and state_dict(), load with "
            "load_state_dict()"
        )
