"""Manifest of a checkpoint (pure): its files with sizes and digests, and the run that wrote them.

It is written last. A folder without one is a save that was cut short.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

FORMAT = "mpidist.checkpoint 1"
NAME = "manifest.json"
MOST_BYTES = 64 << 20  # of a manifest; that of 10⁵ ranks has 15 MB
MODEL = "model.pt"
OPTIMIZER = "optimizer.pt"
TRAINING = "training.pt"


@dataclass(frozen=True)
class Entry:
    """One file."""

    bytes: int
    sha256: str  # hexadecimal


@dataclass(frozen=True)
class Contents:
    """Kinds of state that a checkpoint holds."""

    optimizer: str | None = None  # "whole": in optimizer.pt; "shards": in the ranks' files
    optimizer_class: str | None = None  # of the one that steps: AdamW, for an OSS of AdamW, too
    hook: str | None = None  # "powersgd": files of its own; "state": in the ranks' files
    scheduler: bool = False
    scaler: bool = False
    sampler: bool = False
    rng: bool = False
    buffers: bool = False  # each rank's own, in its file


@dataclass(frozen=True)
class Manifest:
    """Description of one checkpoint."""

    step: int
    world_size: int
    files: dict[str, Entry]
    contents: Contents = field(default_factory=Contents)
    versions: dict[str, str] = field(default_factory=dict)  # of mpidist and torch, for the reader


def rank_file(rank: int, world_size: int) -> str:
    """Return the name of the file of one rank."""
    return f"rank-{rank}-of-{world_size}.pt"


def powersgd_file(rank: int, world_size: int) -> str:
    """Return the name of the file that ``mpidist.ddp.hooks.checkpoint`` writes for one rank."""
    return f"powersgd-{rank}-of-{world_size}.pt"


def to_json(manifest: Manifest) -> str:
    """Return the text of ``manifest.json``."""
    return json.dumps({"format": FORMAT, **asdict(manifest)}, indent=1, sort_keys=True) + "\n"


def from_json(text: str) -> Manifest:
    """Return the manifest that ``to_json`` wrote.

    Raises:
        ValueError: It is damaged, or of another version.
    """
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{NAME} is damaged: {error}") from error
    told = given.get("format") if isinstance(given, dict) else None
    if told != FORMAT:
        raise ValueError(f"{NAME} is of format {told!r}; this version of mpidist reads {FORMAT!r}")
    try:
        files = {str(name): Entry(int(row["bytes"]), str(row["sha256"])) for name, row in given["files"].items()}
        contents = Contents(**given["contents"])
        found = Manifest(int(given["step"]), int(given["world_size"]), files, contents, dict(given["versions"]))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{NAME} is damaged: {type(error).__name__} {error}") from error
    lacking = sorted(set(required(found.world_size, found.contents)) - set(files))
    if lacking:
        raise ValueError(f"{NAME} is damaged: it lists no {', '.join(lacking)}")
    return found


def has_rank_files(contents: Contents) -> bool:
    """Say whether each rank has a file of its own."""
    return contents.optimizer == "shards" or contents.hook == "state" or contents.rng or contents.buffers


def required(world_size: int, contents: Contents) -> list[str]:
    """Return the names of the files that a checkpoint of these contents has."""
    names = [MODEL, TRAINING]
    if contents.optimizer == "whole":
        names.append(OPTIMIZER)
    if has_rank_files(contents):
        names += [rank_file(rank, world_size) for rank in range(world_size)]
    if contents.hook == "powersgd":
        names += [powersgd_file(rank, world_size) for rank in range(world_size)]
    return names


def problems(expected: Mapping[str, Entry], sizes: Mapping[str, int | None], digests: Mapping[str, str]) -> list[str]:
    """Say, one text each, which files are missing or damaged.

    Args:
        expected: The files that are to be read.
        sizes: Bytes of each file; None or nothing for one that is not there.
        digests: sha256 of those whose size is right.
    """
    found = []
    for name, entry in expected.items():
        size = sizes.get(name)
        if size is None:
            found.append(f"{name} is missing")
        elif size != entry.bytes:
            found.append(f"{name} has {size} bytes, and was written with {entry.bytes}: it was cut short or overwritten")
        elif digests.get(name) != entry.sha256:
            found.append(f"{name} is damaged: its sha256 is {str(digests.get(name))[:12]}..., and was {entry.sha256[:12]}...")
    return found


def not_held(contents: Contents, asked: Mapping[str, Any]) -> list[str]:
    """Return the kinds of state that somebody wants to load and a checkpoint lacks.

    Args:
        asked: By the name of the argument of ``load``, what is to take it, or None.
    """
    held = {
        "optimizer": contents.optimizer is not None,
        "hook_state": contents.hook is not None,
        "scheduler": contents.scheduler,
        "scaler": contents.scaler,
        "sampler": contents.sampler,
    }
    return [name for name, taker in asked.items() if taker is not None and not held[name]]
