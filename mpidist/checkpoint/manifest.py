"""Manifest of a checkpoint: its files with sizes and digests, and the run that wrote them.

The manifest is written last, so a folder without one is an unfinished save. All but
``read`` is pure.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FORMAT = "mpidist.checkpoint 1"
NAME = "manifest.json"
MOST_BYTES = 64 << 20  # of a manifest; 10⁵ ranks need 15 MB
MODEL = "model.pt"
OPTIMIZER = "optimizer.pt"
TRAINING = "training.pt"
_SUM64_DIGITS = 16


@dataclass(frozen=True)
class Entry:
    """One file."""

    bytes: int
    digest: str  # hexadecimal: 64 digits of a SHA-256, or 16 of a sum (a file in memory)


@dataclass(frozen=True)
class Contents:
    """Kinds of state that a checkpoint holds."""

    # "whole": in optimizer.pt; "shards": an OSS's in the ranks' files; "dtensors": in those of
    # DTensors.
    optimizer: str | None = None
    optimizer_class: str | None = None  # the class that steps: AdamW also for an OSS of AdamW
    hook: str | None = None  # "powersgd": files of its own; "state": in the ranks' files
    scheduler: bool = False
    scaler: bool = False
    sampler: bool = False
    rng: bool = False
    buffers: bool = False  # each rank's own, in its file
    dtensors: bool = False  # the model has some, of which each rank has its part in a file


@dataclass(frozen=True)
class Manifest:
    """Description of one checkpoint."""

    step: int
    world_size: int
    files: dict[str, Entry]
    contents: Contents = field(default_factory=Contents)
    versions: dict[str, str] = field(default_factory=dict)  # of mpidist and torch, for the reader


def read(path: Path) -> str:
    """Return the text of the manifest in a checkpoint's folder.

    Raises:
        ValueError: The file is longer than any manifest.
        OSError: The file cannot be read.
    """
    handle = os.open(path / NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(handle, "rb") as file:
        text = file.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise ValueError(f"{NAME} has more than {MOST_BYTES} bytes")
    return text.decode("utf-8", errors="replace")


def rank_file(rank: int, world_size: int) -> str:
    """Return the name of the file of one rank."""
    return f"rank-{rank}-of-{world_size}.pt"


def powersgd_file(rank: int, world_size: int) -> str:
    """Return the name of the file that ``mpidist.ddp.hooks.checkpoint`` writes for one rank."""
    return f"powersgd-{rank}-of-{world_size}.pt"


def dtensor_file(rank: int, world_size: int) -> str:
    """Return the name of the file of what one rank holds of the DTensors."""
    return f"dtensors-{rank}-of-{world_size}.pt"


def is_of_rank(name: str) -> bool:
    """Return whether a file holds what one rank alone has."""
    return name not in (MODEL, OPTIMIZER, TRAINING)


def to_json(manifest: Manifest) -> str:
    """Return the text of ``manifest.json``."""
    files = {
        name: {"bytes": entry.bytes, digest_name(entry.digest): entry.digest}
        for name, entry in manifest.files.items()
    }
    given = {"format": FORMAT, **asdict(manifest), "files": files}
    return json.dumps(given, indent=1, sort_keys=True) + "\n"


def digest_name(digest: str) -> str:
    """Return the name of a digest's algorithm, by its length."""
    return "sum64" if len(digest) == _SUM64_DIGITS else "sha256"


def from_json(text: str) -> Manifest:
    """Return the manifest that ``to_json`` wrote.

    Raises:
        ValueError: The text is damaged, or of another version.
    """
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{NAME} is damaged: {error}") from error
    version = given.get("format") if isinstance(given, dict) else None
    if version != FORMAT:
        raise ValueError(
            f"{NAME} is of format {repr(version)[:80]}; this version of mpidist reads {FORMAT!r}"
        )
    try:
        files = {
            name: Entry(_count(row["bytes"]), _digest(row)) for name, row in given["files"].items()
        }
        contents = _contents(given["contents"])
        versions = {str(name): str(version) for name, version in given["versions"].items()}
        found = Manifest(
            _count(given["step"]), _count(given["world_size"], 1), files, contents, versions
        )
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{NAME} is damaged: {type(error).__name__} {error}") from error
    # Checked before the names are listed: a forged number of ranks would take all memory.
    if found.world_size > len(files) and len(required(1, contents)) > len(required(0, contents)):
        raise ValueError(
            f"{NAME} is damaged: it lists {len(files)} files, too few for {found.world_size} ranks"
        )
    own = set(required(found.world_size, found.contents))
    lacking, foreign = sorted(own - set(files)), sorted(set(files) - own)
    if lacking:
        raise ValueError(f"{NAME} is damaged: it lists no {', '.join(lacking)}")
    if foreign:  # no name but these is ever opened
        raise ValueError(
            f"{NAME} is damaged: it lists {', '.join(map(repr, foreign[:4]))}, no file of a "
            "checkpoint"
        )
    return found


def _count(value: object, least: int = 0) -> int:
    if type(value) is not int or not least <= value < 1 << 63:
        raise ValueError(f"a number is {str(value)[:80]}")
    return value


def _digest(row: Mapping[str, object]) -> str:
    name, digits = ("sum64", _SUM64_DIGITS) if "sum64" in row else ("sha256", 64)
    value = row[name]
    if type(value) is not str or re.fullmatch(f"[0-9a-f]{{{digits}}}", value) is None:
        raise ValueError(f"a {name} is {str(value)[:80]}")
    return value


def _contents(given: dict[str, Any]) -> Contents:
    found = Contents(**given)
    texts = (found.optimizer, found.hook)
    flags = (found.scheduler, found.scaler, found.sampler, found.rng, found.buffers, found.dtensors)
    if texts[0] not in (None, "whole", "shards", "dtensors") or texts[1] not in (
        None,
        "powersgd",
        "state",
    ):
        raise ValueError(
            f"the optimizer's state is {str(texts[0])[:80]}, the hook's {str(texts[1])[:80]}"
        )
    if type(found.optimizer_class) not in (str, type(None)) or not all(
        type(flag) is bool for flag in flags
    ):
        raise ValueError("its contents are of other types")
    return found


def has_rank_files(contents: Contents) -> bool:
    """Return whether each rank has a file of its own."""
    return (
        contents.optimizer == "shards"
        or contents.hook == "state"
        or contents.rng
        or contents.buffers
    )


def required(world_size: int, contents: Contents) -> list[str]:
    """Return the names of the files of a checkpoint with these contents."""
    names = [MODEL, TRAINING]
    if contents.optimizer == "whole":
        names.append(OPTIMIZER)
    if has_rank_files(contents):
        names += [rank_file(rank, world_size) for rank in range(world_size)]
    if contents.hook == "powersgd":
        names += [powersgd_file(rank, world_size) for rank in range(world_size)]
    if contents.dtensors:
        names += [dtensor_file(rank, world_size) for rank in range(world_size)]
    return names


def problems(
    expected: Mapping[str, Entry], sizes: Mapping[str, int | None], digests: Mapping[str, str]
) -> list[str]:
    """Return one text for each missing or damaged file.

    Args:
        expected: The files to be read.
        sizes: Bytes of each file; None or no entry if missing.
        digests: Of the files with the right size.
    """
    found = []
    for name, entry in expected.items():
        size = sizes.get(name)
        if size is None:
            found.append(f"{name} is missing")
        elif size != entry.bytes:
            found.append(
                f"{name} has {size} bytes, and was written with {entry.bytes}: it was cut short or "
                "overwritten"
            )
        elif digests.get(name) != entry.digest:
            found.append(
                f"{name} is damaged: its {digest_name(entry.digest)} is "
                f"{str(digests.get(name))[:12]}..., and was {entry.digest[:12]}..."
            )
    return found


def not_held(contents: Contents, asked: Mapping[str, object]) -> list[str]:
    """Return the kinds of requested state that a checkpoint lacks.

    Args:
        asked: The object to load, or None, by the argument's name in ``load``.
    """
    held = {
        "optimizer": contents.optimizer is not None,
        "hook_state": contents.hook is not None,
        "scheduler": contents.scheduler,
        "scaler": contents.scaler,
        "sampler": contents.sampler,
    }
    return [name for name, taker in asked.items() if taker is not None and not held[name]]
