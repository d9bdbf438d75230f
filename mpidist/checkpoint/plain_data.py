"""Plain data (pure): values that ``torch.load(weights_only=True)`` reads; checked before a save."""

from __future__ import annotations

from collections import Counter, OrderedDict

import torch

_LEAVES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def require_plain(where: str, value: object) -> None:
    """Require numbers, texts, bytes, tensors, and dicts, lists, tuples and sets of them.

    Args:
        where: Name of the value; a message adds the path to the part that is not plain.

    Raises:
        TypeError: A part is of another class, or the value holds itself.
    """
    _require(where, value, ())


def _require(where: str, value: object, above: tuple[int, ...]) -> None:
    if isinstance(value, torch.Tensor) or type(value) in _LEAVES:
        return
    if id(value) in above:
        raise TypeError(f"{where} holds itself")
    inner = (*above, id(value))
    # The milestones of torch's MultiStepLR are a Counter.
    if isinstance(value, dict) and type(value) in (dict, OrderedDict, Counter):
        for key, held in value.items():
            _require(f"key {key!r} of {where}", key, inner)
            _require(f"{where}[{key!r}]", held, inner)
    elif type(value) is list or type(value) is tuple:
        for place, held in enumerate(value):
            _require(f"{where}[{place}]", held, inner)
    elif type(value) is set:
        for held in value:
            _require(f"an element of {where}", held, inner)
    else:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise TypeError(
            f"{where} is a {kind}, which a checkpoint cannot hold: give numbers, texts, tensors, "
            "and dicts, lists and tuples of them (float(x) for a NumPy number, str(path) for a "
            "path)"
        )
