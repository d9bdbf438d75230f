"""Resumable sampler: continues an epoch at its position, on any number of ranks.

All ranks use one order of the data set: rank r of W takes every W-th sample from the r-th on. After
k samples of each rank the first k · W of the order are done, whatever W is, so this number and the
epoch are the whole state.

Letters: W ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized

import torch
from torch.utils.data import Sampler

from mpidist.comm.group_types import AnyGroup
from mpidist.comm.world_group import native_group


class ResumableSampler(Sampler[int]):
    """``torch.utils.data.DistributedSampler`` with a position in the epoch.

    A ``DataLoader`` fetches samples ahead of the training, so the training loop moves the position:
    ``advance(len(batch))`` after each step. Give the ``DataLoader`` a ``generator`` of its own:
    without one each pass draws from torch's generator, and an interrupted run has one pass more.

    Communicates nothing.

    Args:
        dataset: A data set, or its length.
        num_replicas: W; the size of ``group`` if None.
        rank: This process's rank; its rank in ``group`` if None.
        shuffle: Draw a new order for each epoch.
        seed: Of the orders; the same on all ranks.
        drop_last: Leave the last samples out if too few for all ranks; else repeat samples from the
            beginning of the order.
        group: Native group, or torch group on the backend ``mpidist``; the default group if None.

    Attributes:
        epoch: The current epoch.
        consumed: Samples of this epoch that all ranks together have done, repeated ones included.

    Raises:
        ValueError: A rank out of range, or a data set without samples.
    """

    def __init__(
        self,
        dataset: Sized | int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        group: AnyGroup = None,
    ) -> None:
        if num_replicas is None or rank is None:
            native = native_group(group)
            num_replicas = native.size if num_replicas is None else num_replicas
            rank = native.rank if rank is None else rank
        if num_replicas < 1 or not 0 <= rank < num_replicas:
            raise ValueError(
                f"ResumableSampler needs a rank from 0 to {num_replicas - 1} of {num_replicas}; "
                f"got {rank}"
            )
        self.length = dataset if isinstance(dataset, int) else len(dataset)
        if self.length < 1:
            raise ValueError(
                "ResumableSampler needs a data set of at least one sample; got an empty one"
            )
        self.num_replicas = num_replicas
        self.rank = rank
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self.consumed = 0

    def __iter__(self) -> Iterator[int]:
        return iter(
            share(self._order(), self.consumed, self.rank, self.num_replicas, self.drop_last)
        )

    def __len__(self) -> int:
        """Return the number of samples left for this rank in this epoch; equal on all ranks."""
        return left(self.length, self.consumed, self.num_replicas, self.drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch.

        The position does not change if the epoch is the current one, so after a load it continues.
        """
        if epoch != self.epoch:
            self.epoch, self.consumed = epoch, 0

    def advance(self, samples: int) -> None:
        """Count samples of this rank as done; all ranks pass the same number.

        Raises:
            ValueError: Fewer samples are left for this rank in this epoch.
        """
        if not 0 <= samples <= len(self):
            raise ValueError(
                f"ResumableSampler.advance: {samples} samples of rank {self.rank}, of which "
                f"{len(self)} are left in epoch {self.epoch}; it takes the number of this rank's "
                "own samples, once a step, and set_epoch begins the next epoch"
            )
        self.consumed += samples * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """Return the position, and the settings that must be equal where it is loaded."""
        return {
            "epoch": self.epoch,
            "consumed": self.consumed,
            "length": self.length,
            "shuffle": self.shuffle,
            "seed": self.seed,
        }

    def require_fits(self, state: object) -> None:
        """Refuse a position in another order.

        Raises:
            ValueError: A setting differs; names it.
        """
        own = self.state_dict()
        if not isinstance(state, Mapping) or set(state) != set(own):
            raise ValueError("the sampler's state is none of ResumableSampler")
        for name, words in (
            ("length", "of another data set: its number of samples"),
            ("seed", "of another seed"),
            ("shuffle", "of another order: shuffle"),
        ):
            if state[name] != own[name]:
                raise ValueError(
                    f"the sampler's state is {words} was {state[name]}, and is {own[name]} here"
                )

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Load a position saved by any number of ranks.

        Raises:
            ValueError: The position is of another data set, seed or order.
        """
        self.require_fits(state)
        self.epoch, self.consumed = int(state["epoch"]), int(state["consumed"])

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(self.length))
        drawn: list[int] = torch.randperm(
            self.length, generator=torch.Generator().manual_seed(self.seed + self.epoch)
        ).tolist()
        return drawn


def left(length: int, consumed: int, replicas: int, drop_last: bool) -> int:
    """Return the number of samples left for each rank, of a data set of ``length`` (pure)."""
    rest = max(length - consumed, 0)
    return rest // replicas if drop_last else -(-rest // replicas)


def share(
    order: Sequence[int], consumed: int, rank: int, replicas: int, drop_last: bool
) -> list[int]:
    """Return the samples left for one rank (pure).

    Args:
        order: All samples of the epoch.
        consumed: Number of samples done.
    """
    each = left(len(order), consumed, replicas, drop_last)
    ahead = list(order[consumed : consumed + each * replicas])
    missing = each * replicas - len(ahead)
    if missing:
        ahead += (list(order) * -(-missing // len(order)))[:missing]
    return ahead[rank::replicas]
