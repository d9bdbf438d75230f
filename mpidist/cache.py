"""What was found out once and holds for later jobs: small JSON files, one for each key, in the user's cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FORMAT = 1  # counts changes of what a file holds


def folder() -> Path:
    """Return ``$MPIDIST_CACHE``, else ``$XDG_CACHE_HOME/mpidist``, else ``~/.cache/mpidist``; it need not exist.

    Raises:
        RuntimeError: None of them is set and this user has no home.
    """
    own = os.environ.get("MPIDIST_CACHE")
    if own:
        return Path(own)
    caches = os.environ.get("XDG_CACHE_HOME")
    return Path(caches) / "mpidist" if caches else Path.home() / ".cache" / "mpidist"


def load(kind: str, key: Mapping[str, Any]) -> Any:
    """Return what was stored of this kind under this key, or None: there is nothing, or nothing that can be trusted.

    Args:
        kind: Begins the file's name.
        key: All that the value depends on; strings and numbers.
    """
    # Anything may lie there: a text cut short, another version's, a folder.
    try:
        held = json.loads(_path(kind, key).read_text(encoding="utf-8"))
        return held["value"] if held["format"] == _FORMAT and held["key"] == dict(key) else None
    except (OSError, RuntimeError, ValueError, LookupError, TypeError):
        return None


def store(kind: str, key: Mapping[str, Any], value: Any) -> bool:
    """Write a value that ``load`` returns in later jobs; say whether that could be done.

    A reader meets the old file or the new one, whole: it takes its name when it is complete.
    """
    text = json.dumps({"format": _FORMAT, "key": dict(key), "value": value}, indent=1)
    with contextlib.suppress(OSError, RuntimeError):
        path = _path(kind, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=path.stem, dir=path.parent)
        try:
            with open(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(name, path)
            return True
        except OSError:
            os.unlink(name)
    return False


def _path(kind: str, key: Mapping[str, Any]) -> Path:
    text = json.dumps(dict(key), sort_keys=True)
    return folder() / f"{kind}-{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}.json"
