"""Folders that travel with the package and are no modules of it: job scripts, examples, benchmarks.

In a wheel they lie below ``mpidist/shipped_files``, in a checkout and an editable install beside
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
        MpidistError: It is in neither place; the installation is broken.
    """
    if name not in FOLDERS:
        raise ValueError(f"{name!r} is none of {', '.join(FOLDERS)}")
    for place in (_PACKAGED, _CHECKOUT):
        # A folder of that name may lie beside any site-packages; ours says so.
        if (place / name / "README.md").is_file():
            return place / name
    raise MpidistError(f"no folder {name} in {_PACKAGED} or {_CHECKOUT}; install mpidist again")
