"""Checkpoint files and manifests: valid ones, and damaged archives, pickles and texts."""

from __future__ import annotations

import copy
import io
import json
import os
import random
import struct
import tempfile
import warnings
import zipfile
from collections import OrderedDict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from mpidist import saved_file
from mpidist.checkpoint import manifest, rng
from mpidist.checkpoint.manifest import Contents, Entry, Manifest
from mpidist.checkpoint.plain_data import require_plain

# torch's reader of plain data imports parts of torch if a file names classes that it allows;
# zipfile imports the codec of member names outside ASCII.
IMPORTS = ("torch.", "encodings.")
_SHA = "0123456789abcdef" * 4
_numbers = st.integers(0, 300) | st.sampled_from(
    [1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, (1 << 64) - 1]
)


def samples() -> list[bytes]:
    """Return files of ``torch.save``: state of a model, of an optimizer, of generators."""
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sparse = {
            "coo": torch.eye(4).to_sparse(),
            "csr": torch.eye(3).to_sparse_csr(),
            "view": torch.arange(12.0).view(3, 4).t(),
        }
        return [
            _saved(held)
            for held in (
                model.state_dict(),
                optimizer.state_dict(),
                rng.state(),
                sparse,
                [1, "x", (2.5, None)],
            )
        ]


def _saved(held: Any) -> bytes:
    file = io.BytesIO()
    torch.save(held, file)
    return file.getvalue()


def rewritten(data: bytes, change: Any, compression: int = zipfile.ZIP_STORED) -> bytes:
    """Return an archive with members changed by ``change``, a function of a dict by name.

    The archive's checksums are valid.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return made.getvalue()


@st.composite
def cases(draw: Any, valid: tuple[bytes, ...] = ()) -> bytes:
    """Draw a file with a damaged archive, or with a damaged pickle in a valid archive."""
    data = draw(st.sampled_from(valid or tuple(samples())))

    def damaged(content: bytes) -> bytes:
        case = bytearray(content)
        for _ in range(draw(st.integers(1, 4))):
            place = draw(st.integers(0, len(case)))
            change = draw(
                st.binary(min_size=1, max_size=4)
                | _numbers.map(lambda number: struct.pack("<Q", number))
                | _numbers.map(lambda number: b"\x8a\x08" + struct.pack("<Q", number))  # LONG1
                | st.sampled_from(
                    [
                        b"csys\nexit\n",
                        b"cbuiltins\nbytearray\n",
                        b"R",
                        b"b",
                        b"Q",
                        b"h\x00",
                        b"J\xff\xff\xff\x7f",
                    ]
                )
            )
            end = place + len(change) if draw(st.booleans()) else place + draw(st.integers(0, 8))
            case[place:end] = change
        return bytes(case)

    if draw(st.booleans()):
        return damaged(data)
    number = draw(st.integers(0, 20))

    def change(members: dict[str, bytes]) -> None:
        pickles = [name for name in members if name.endswith("data.pkl")]
        name = pickles[0] if number < 16 else sorted(members)[number % len(members)]
        members[name] = damaged(members[name])

    return rewritten(data, change)


_names = st.sampled_from(
    ["../x", "/etc/passwd", "model.pt", "rank-0-of-2.pt", _SHA, "whole", "shards"]
)
# Copied, because a drawn one may be changed, and may come to hold itself.
_containers = st.sampled_from([[], {}, [[]], {"bytes": 1, "sha256": _SHA}]).map(copy.deepcopy)
_scalars = st.none() | st.booleans() | _numbers | st.integers(-5, 5) | st.floats()
_values = _scalars | st.text(max_size=5) | _names | _containers


@st.composite
def manifests(draw: Any) -> str:
    """Draw the text of a manifest with values in wrong places, or truncated."""
    contents = Contents(
        draw(st.sampled_from([None, "whole", "shards"])),
        "Adam",
        draw(st.sampled_from([None, "state", "powersgd"])),
    )
    files = {name: Entry(3, _SHA) for name in manifest.required(2, contents)}
    given = {"format": manifest.FORMAT, **asdict(Manifest(7, 2, files, contents, {"torch": "2"}))}
    for _ in range(draw(st.integers(0, 3))):
        place: Any = given
        for _ in range(draw(st.integers(0, 2))):
            inner = (
                [held for held in place.values() if isinstance(held, dict) and held]
                if isinstance(place, dict)
                else []
            )
            place = draw(st.sampled_from(inner)) if inner else place
        if isinstance(place, dict):
            key = (
                draw(
                    st.sampled_from(sorted(place))
                    | st.sampled_from(["../x", "/etc/passwd", "rank-1-of-3.pt"])
                )
                if place
                else "x"
            )
            place[key] = draw(_values)
    text = json.dumps(given)
    return text[: draw(st.integers(0, len(text)))] if draw(st.integers(0, 9)) == 0 else text


def check(case: bytes) -> bool:
    """Read a file: plain data that can be used completely, or ``ValueError``.

    Returns:
        Whether it was read.
    """
    handle, path = tempfile.mkstemp(suffix=".pt")
    try:
        with open(handle, "wb") as file:
            file.write(case)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found = saved_file.read(path)
                mapped = saved_file.read(path, "cpu", mmap=True)
            except ValueError:
                return False
            require_plain("the file", found)
            for held in (found, mapped):
                _use(held)
            _restore(found)
            return True
    finally:
        os.unlink(path)


def check_manifest(text: str) -> bool:
    """Read a manifest: one whose files are in its folder, or ``ValueError``."""
    try:
        found = manifest.from_json(text)
    except ValueError:
        return False
    assert all(Path(name).name == name and name not in ("..", ".") for name in found.files)
    assert (
        found.step >= 0
        and found.world_size >= 1
        and manifest.from_json(manifest.to_json(found)) == found
    )
    return True


def _use(held: Any) -> None:
    if isinstance(held, torch.Tensor):
        if held.numel() < 1 << 20:
            (held if held.layout is torch.strided else held.to_dense()).detach().clone()
    elif isinstance(held, (dict, OrderedDict)):
        for value in held.values():
            _use(value)
    elif isinstance(held, (list, tuple, set)):
        for value in held:
            _use(value)


def _restore(found: Any) -> None:
    """Set the generators to the state read, draw from them, and restore them."""
    if not isinstance(found, dict) or "numpy" not in found:
        return
    before = rng.state()
    try:
        rng.restore(found)
        random.random(), np.random.rand(700), torch.rand(700)
    except (ValueError, TypeError, KeyError, RuntimeError):
        pass
    finally:
        rng.restore(before)
