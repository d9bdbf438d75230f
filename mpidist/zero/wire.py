"""Wire formats (placeholder until merged)."""

from typing import Any


def wire_of(name: Any) -> Any:
    """Return None."""
    return None
