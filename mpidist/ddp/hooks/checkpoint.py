"""Checkpoints of PowerSGD's state: one file per rank in a folder.

As many ranks as saved the state continue with the same bits; another number of ranks gets the mean
of the errors. The file ``powersgd-<rank>-of-<W>.pt`` holds one rank's state as plain data, and the
buckets of its module.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mpidist import saved_file
from mpidist.comm.consistency import comparing
from mpidist.comm.world_group import native_group
from mpidist.ddp.hooks.powersgd_state import PowerSGDState, merged
from mpidist.file_errors import naming

if TYPE_CHECKING:
    from torch.serialization import MAP_LOCATION

    from mpidist.ddp.buckets.layout import SavedPlan

_FORMAT = "mpidist.powersgd 1"
_NAME = re.compile(r"powersgd-(\d+)-of-(\d+)\.pt")


def save(folder: str | Path, module: Any, state: PowerSGDState) -> Path:
    """Write this rank's state and its module's buckets; return the file.

    Files of another number of ranks in the folder are removed when all ranks have written.

    Collective: called by all ranks between steps, with one folder that all ranks can read later.

    Args:
        module: The ``DistributedDataParallel`` that uses the state.
    """
    group = native_group(state.process_group)
    folder = Path(folder)
    path = folder / f"powersgd-{group.rank}-of-{group.size}.pt"
    partial = path.with_suffix(".part")
    with comparing(group, "saving of the PowerSGD state"):
        folder.mkdir(parents=True, exist_ok=True)
        with naming(path), open(partial, "wb") as file:
            saved_file.write(content(module, state), file)
    partial.replace(path)
    if group.rank == 0:
        for other in folder.iterdir():
            match = _NAME.fullmatch(other.name)
            if match and int(match[2]) != group.size:
                other.unlink()
    group.barrier()
    return path


def content(module: Any, state: PowerSGDState) -> dict[str, object]:
    """Return the content of this rank's file: its state and its module's buckets."""
    with warnings.catch_warnings():
        # The state warns that its process group is not saved.
        warnings.simplefilter("ignore")
        return {"format": _FORMAT, "state": state.state_dict(), "bucket_plan": module.bucket_plan()}


def load(
    folder: str | Path, module: Any, map_location: MAP_LOCATION = None, own: Path | None = None
) -> PowerSGDState:
    """Read the files that ``save`` wrote; return this rank's state, on the module's group.

    On the number of ranks that saved, each rank gets its own state and the module its buckets, and
    training continues with the same bits. On another number all ranks get the mean of the errors,
    and the module keeps its buckets.

    Collective: called by all ranks, before the first step.

    Args:
        module: The ``DistributedDataParallel`` that will use the state; register the hook with the
            state afterwards.
        own: This rank's file, where as many ranks have saved and the folder lacks the others'.

    Raises:
        FileNotFoundError: The folder does not hold the files of all ranks of one run.
        ValueError: The files are of different steps or of another module, or a file is damaged.
        DisagreementError: Another rank could not load its part.
    """
    group = native_group(module.process_group)
    plan: SavedPlan | None = None
    with comparing(group, "loading of the PowerSGD state"):
        paths = _files(Path(folder)) if own is None else []
        if own is not None or len(paths) == group.size:
            state, plan = _read(own or paths[group.rank], map_location)
        else:
            state = merged([_read(path, map_location)[0] for path in paths])
        _require_fits(state, module.module)
    if plan is not None:
        module.use_bucket_plan(plan)
    steps = group.all_gather_object(state.iter)
    if len(set(steps)) > 1:
        raise ValueError(
            f"the files in {folder} are of different steps ({steps}): a save was cut short"
        )
    state.process_group = module.process_group
    return state


def _files(folder: Path) -> list[Path]:
    found: dict[int, dict[int, Path]] = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match:
            found.setdefault(int(match[2]), {})[int(match[1])] = path
    if len(found) != 1:
        raise FileNotFoundError(
            f"{folder} must hold the PowerSGD states of one run; found those of {len(found)}"
        )
    ((size, by_rank),) = found.items()
    absent = sorted(set(range(size)) - set(by_rank))
    if absent:
        raise FileNotFoundError(
            f"{folder} lacks the PowerSGD states of ranks {', '.join(map(str, absent))} of {size}"
        )
    return [by_rank[rank] for rank in range(size)]


def _read(path: Path, map_location: MAP_LOCATION) -> tuple[PowerSGDState, SavedPlan]:
    try:
        saved = saved_file.read(path, map_location)
        if (
            type(saved) is not dict
            or saved.get("format") != _FORMAT
            or type(saved.get("bucket_plan")) is not dict
        ):
            raise ValueError(f"it is not of format {_FORMAT!r}")
        state = PowerSGDState()
        state.load_state_dict(saved.get("state", {}))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path.name} is no PowerSGD state, or damaged: {error}") from error
    return state, saved["bucket_plan"]


def _require_fits(state: PowerSGDState, module: torch.nn.Module) -> None:
    """Require errors in the shapes of the module's parameters of the same names.

    Raises:
        ValueError: The shape of an error differs from its parameter's.
    """
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    for name, error in state.error_dict.items():
        if error.shape != shapes.get(name, error.shape):
            raise ValueError(
                "the PowerSGD state is of another module: it holds an error of shape "
                f"{tuple(error.shape)} for {name!r}, whose shape is {tuple(shapes[name])}"
            )
