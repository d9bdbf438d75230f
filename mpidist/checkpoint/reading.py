"""Reader of a checkpoint's files on one rank: checks size and digest, then reads the content.

Communicates nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mpidist import saved_file
from mpidist.checkpoint import files
from mpidist.checkpoint.dtensors import DTensorState
from mpidist.checkpoint.files import ADVICE
from mpidist.checkpoint.manifest import (
    MODEL,
    OPTIMIZER,
    TRAINING,
    Manifest,
    dtensor_file,
    rank_file,
)
from mpidist.checkpoint.training import RankState, SharedState
from mpidist.comm.consistency import describe
from mpidist.errors import CheckpointError

if TYPE_CHECKING:
    from torch.serialization import MAP_LOCATION


class Reader:
    """Files of one checkpoint.

    Args:
        path: The checkpoint's folder.
        written: Its manifest.
        map_location: Device that tensors are read to, as for ``torch.load``; the CPU if None.
    """

    def __init__(self, path: Path, written: Manifest, map_location: MAP_LOCATION) -> None:
        self.path = path
        self.manifest = written
        self.map_location = "cpu" if map_location is None else map_location

    def require_sound(self, names: Iterable[str]) -> None:
        """Refuse files that are missing, or whose size or digest is not the manifest's.

        Raises:
            CheckpointError: Names the files.
        """
        for name in names:
            files.wait_for(self.path / name)
        found = files.problems(self.path, {name: self.manifest.files[name] for name in names})
        if found:
            raise CheckpointError(f"{'; '.join(found)}; {ADVICE}")

    def shared(self) -> SharedState:
        """Return the content of ``training.pt``."""
        return cast(SharedState, self._read(TRAINING, SharedState.__annotations__))

    def model(self) -> dict[str, Any]:
        """Return the content of ``model.pt``, with tensors mapped from the file if on the CPU."""
        return self._read(MODEL, mmap=True)

    def optimizer(self) -> dict[str, Any]:
        """Return the content of ``optimizer.pt``."""
        return self._read(OPTIMIZER)

    def dtensors(self, rank: int) -> DTensorState:
        """Return what one rank held of the DTensors."""
        name = dtensor_file(rank, self.manifest.world_size)
        return cast(DTensorState, self._read(name, DTensorState.__annotations__))

    def of_rank(self, rank: int, mmap: bool = False) -> RankState:
        """Return the content of the file of one rank.

        Args:
            rank: In the group that wrote the checkpoint.
            mmap: Map tensors on the CPU from the file; else copy them.
        """
        name = rank_file(rank, self.manifest.world_size)
        return cast(RankState, self._read(name, RankState.__annotations__, mmap))

    def _read(self, name: str, keys: Iterable[str] = (), mmap: bool = False) -> dict[str, Any]:
        # A mapped file takes no memory. Tensors on a device cannot be mapped.
        mmap = mmap and str(self.map_location) == "cpu"
        try:
            found = saved_file.read(self.path / name, self.map_location, mmap)
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{name} cannot be read: {error}") from error
        if type(found) is not dict:
            raise CheckpointError(
                f"{name} holds a {type(found).__name__} in the place of its dict; {ADVICE}"
            )
        lacking = [key for key in keys if key not in found]
        if lacking:
            raise ValueError(f"{name} is damaged: it holds no {', '.join(lacking)}")
        return found


@contextmanager
def reporting_damage() -> Iterator[None]:
    """Explain errors from a file of another structure; other errors keep their texts."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, RecursionError, OverflowError) as error:
        raise CheckpointError(
            f"a file is damaged, or not as this version writes it ({describe(error)}); {ADVICE}"
        ) from error
