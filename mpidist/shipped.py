"""Folders shipped with the package that are not modules: job scripts, examples, benchmarks.

In a wheel they are in ``mpidist/shipped_files``, in a checkout and an editable install beside
``mpidist``.
"""

from __future__ import annotations

from pathlib import Path

from mpidist.errors import MpidistError

FOLDERS = ("benchmarks", "examples", "slurm")

_PACKAGED = Path(__file__).resolve().parent / "shipped_files"
_CHECKOUT = Path(__file__).resolve().parents[1]


def folder(name: str) -> Path:
    """Return the path of one of ``FOLDERS``.

    Raises:
        ValueError: Another name.
        MpidistError: The folder is in neither place; the installation is broken.
    """
    if name not in FOLDERS:
        raise ValueError(f"{name!r} is none of {', '.join(FOLDERS)}")
    for place in (_PACKAGED, _CHECKOUT):
        # Another package may have installed a folder of that name; ours has a README.md.
        if (place / name / "README.md").is_file():
            return place / name
    raise MpidistError(f"no folder {name} in {_PACKAGED} or {_CHECKOUT}; install mpidist again")
