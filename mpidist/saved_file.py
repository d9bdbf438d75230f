"""Files of ``torch.save``: written with the disk's own errors, read although they are untrusted.

A read returns plain data and tensors, or raises. ``weights_only=True`` excludes code. The remaining
cases are checked here: an archive whose members are compressed or reach beyond the file (a storage
longer than its member would be read past its end), objects that are not plain data, sparse tensors
whose indices are out of range. A digest stored next to the file would detect damage but not
forgery, because the same user writes both.
"""

from __future__ import annotations

import os
import stat
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path
from typing import IO, Any, Protocol, cast

import torch

_LEAVES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_LAYOUTS = (
    torch.strided,
    torch.sparse_coo,
    torch.sparse_csr,
    torch.sparse_csc,
    torch.sparse_bsr,
    torch.sparse_bsc,
)


class Writable(Protocol):
    """File that takes bytes."""

    def write(self, data: bytes | memoryview, /) -> int:
        """Write bytes; return their number."""
        ...

    def flush(self) -> None:
        """Write what is buffered."""
        ...


def write(value: object, file: Writable) -> None:
    """Write a value with ``torch.save``, and flush the file.

    Raises:
        OSError: The file's own error. torch would raise one of its archive, which reads like a
            damaged file.
    """
    remembering = _Remembering(file)
    try:
        torch.save(value, cast("IO[bytes]", remembering))
    except Exception:
        if remembering.problem is not None:
            raise remembering.problem from None
        raise
    file.flush()


class _Remembering:
    """File that remembers the first error of another one, and raises it from then on.

    Attributes:
        problem: The error.
    """

    def __init__(self, file: Writable) -> None:
        self._file = file
        self.problem: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        # torch writes on, to end its archive.
        if self.problem is not None:
            raise self.problem
        try:
            return self._file.write(data)
        except OSError as error:
            self.problem = error
            raise

    def flush(self) -> None:
        self._file.flush()


def read(path: str | os.PathLike[str], map_location: Any = None, mmap: bool = False) -> Any:
    """Return the content of a file: numbers, strings, bytes, tensors, and containers of them.

    Args:
        path: A regular file; a link is refused.
        map_location: As in ``torch.load``.
        mmap: Tensors on the CPU are mapped from the file, which must then stay unchanged; else they
            are copied.

    Raises:
        ValueError: The reason why the file is refused.
        OSError: The file cannot be read.
    """
    path = Path(path)
    if not is_regular(path):
        raise ValueError(f"{path.name} is missing, or a link or a folder, and no regular file")
    _require_archive(path)
    try:
        # Always mapped, so that a storage is a part of the mapping, whatever length a forged file
        # gives.
        with torch.sparse.check_sparse_tensor_invariants():
            found = torch.load(path, map_location=map_location, weights_only=True, mmap=True)
        return _Walk(copies=not mmap).plain(found)
    except OSError:
        raise
    except Exception as error:  # a damaged file may raise any exception
        raise ValueError(
            f"{path.name} is damaged, or holds more than plain data: {_first_line(error)}"
        ) from error


def is_regular(path: Path) -> bool:
    """Return whether a path is a regular file and not a link."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def _require_archive(path: Path) -> None:
    """Require an archive as ``torch.save`` writes it: stored members, in order, inside the file."""
    size = path.stat().st_size
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            names = {member.filename for member in members}
            is_plain = (
                not archive.comment
                and len(names) == len(members)
                and all(
                    member.compress_type == zipfile.ZIP_STORED
                    and member.file_size == member.compress_size
                    and member.header_offset >= 0
                    and member.header_offset + member.file_size <= size
                    for member in members
                )
            )
    except (
        zipfile.BadZipFile,
        NotImplementedError,
        ValueError,
        EOFError,
        LookupError,
        RuntimeError,
        OverflowError,
    ) as error:
        raise ValueError(
            f"{path.name} is damaged: it is no archive of torch.save ({error})"
        ) from error
    if not is_plain:
        raise ValueError(
            f"{path.name} is damaged: its archive is compressed, or its members reach beyond the "
            "file"
        )


class _Walk:
    """Traversal of the content of a file.

    Args:
        copies: Copy tensors on the CPU; tensors that share memory share it in the copies too.
    """

    def __init__(self, copies: bool) -> None:
        self._copies = copies
        self._storages: dict[tuple[int, int], torch.UntypedStorage] = {}

    def plain(self, value: Any, above: tuple[int, ...] = ()) -> object:
        """Return the value, or its copy.

        Raises:
            ValueError: It is, or holds, something other than plain data.
        """
        kind = type(value)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            return self._tensor(value)
        if kind in _LEAVES:
            return value
        if id(value) in above:
            raise ValueError("a container that holds itself")
        inner = (*above, id(value))
        if kind is dict or kind is OrderedDict or kind is Counter:
            # A Counter would count pairs.
            return kind(
                {self.plain(key, inner): self.plain(held, inner) for key, held in value.items()}
            )
        if kind is list or kind is tuple or kind is set:
            return kind([self.plain(held, inner) for held in value])
        raise ValueError(f"an object of class {kind.__module__}.{kind.__qualname__}")

    def _tensor(self, value: Any) -> Any:
        if (
            value.layout not in _LAYOUTS
            or not (value.is_cpu or value.is_cuda)
            or value.is_quantized
        ):
            raise ValueError(
                f"a tensor of layout {value.layout} and type {value.dtype} on {value.device}"
            )
        if not self._copies or not value.is_cpu:
            return value
        with torch.no_grad():
            own = (
                value.detach().clone()
                if value.layout is not torch.strided
                else self._moved(value.detach())
            )
        if type(value) is torch.nn.Parameter:
            return torch.nn.Parameter(own, value.requires_grad)
        return own.requires_grad_(value.requires_grad)

    def _moved(self, value: torch.Tensor) -> torch.Tensor:
        held = value.untyped_storage()
        key = (held.data_ptr(), held.nbytes())
        if key not in self._storages:
            self._storages[key] = held.clone()
        where = (value.storage_offset(), value.shape, value.stride())
        return torch.empty(0, dtype=value.dtype).set_(self._storages[key], *where)


def _first_line(error: Exception) -> str:
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
