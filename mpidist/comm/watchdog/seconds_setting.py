"""Settings of the watchdog in seconds: variables that hold a number from 0 on (pure)."""

from __future__ import annotations

import math
from collections.abc import Mapping


def seconds(environ: Mapping[str, str], variable: str, otherwise: float, zero: str) -> float:
    """Return the seconds of a variable.

    Args:
        environ: Usually ``os.environ``.
        variable: Its name.
        otherwise: The seconds if it is unset or empty.
        zero: Meaning of 0, for the error.

    Raises:
        ValueError: It is no number of seconds from 0 on.
    """
    text = environ.get(variable, "").strip()
    if not text:
        return otherwise
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise ValueError(f"{variable} needs a number of seconds, {zero}; got {environ[variable]!r}")
    return value
