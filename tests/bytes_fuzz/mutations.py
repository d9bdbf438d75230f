"""Damage to valid bytes, drawn by a seeded generator."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence

MOST_BYTES = 64 << 10  # of a case

_NUMBERS = (
    0,
    1,
    2,
    127,
    128,
    255,
    256,
    0x7FFF,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
    1 << 40,
    1 << 62,
    (1 << 64) - 1,
)
_WIDTHS = (("B", 8), ("<H", 16), (">H", 16), ("<I", 32), (">I", 32), ("<Q", 64), (">Q", 64))


def _flip(rng: random.Random, case: bytearray, samples: Sequence[bytes]) -> None:
    case[rng.randrange(len(case))] ^= 1 << rng.randrange(8)


def _byte(rng: random.Random, case: bytearray, samples: Sequence[bytes]) -> None:
    case[rng.randrange(len(case))] = rng.randrange(256)


def _number(rng: random.Random, case: bytearray, samples: Sequence[bytes]) -> None:
    code, bits = _WIDTHS[rng.randrange(len(_WIDTHS))]
    written = struct.pack(code, _NUMBERS[rng.randrange(len(_NUMBERS))] & ((1 << bits) - 1))
    place = rng.randrange(len(case))
    case[place : place + len(written)] = written


def _add(rng: random.Random, case: bytearray, samples: Sequence[bytes]) -> None:
    """Change a number slightly: lengths that are off by one."""
    place = rng.randrange(len(case))
    case[place] = (case[place] + rng.choice((-2, -1, 1, 2))) & 255


def _cut(rng: random.Random, case: bytearray, samples: Sequence[bytes]) -> None:
    del case[rng.randrange(len(case)) :]


def _remove(rng: random.Random, case: bytearray, samples: Sequence[bytes]) -> None:
    place = rng.randrange(len(case))
    del case[place : place + rng.randrange(1, 9)]


def _insert(rng: random.Random, case: bytearray, samples: Sequence[bytes]) -> None:
    place = rng.randrange(len(case))
    case[place:place] = rng.randbytes(rng.randrange(1, 9))


def _repeat(rng: random.Random, case: bytearray, samples: Sequence[bytes]) -> None:
    place = rng.randrange(len(case))
    case[place:place] = case[place : place + rng.randrange(1, 33)] * rng.choice((1, 2, 30))


def _splice(rng: random.Random, case: bytearray, samples: Sequence[bytes]) -> None:
    other = samples[rng.randrange(len(samples))]
    start = rng.randrange(len(other) + 1)
    piece = other[start : start + rng.choice((4, 16, 64, len(other)))]
    place = rng.randrange(len(case))
    case[place : place + rng.choice((0, len(piece)))] = piece


_CHANGES: tuple[Callable[..., None], ...] = (
    _flip,
    _byte,
    _number,
    _number,
    _add,
    _cut,
    _remove,
    _insert,
    _repeat,
    _splice,
)


def mutated(rng: random.Random, samples: Sequence[bytes]) -> bytes:
    """Return a sample with one to four changes, at most ``MOST_BYTES`` long.

    Occasionally the sample itself, or random bytes.
    """
    choice = rng.random()
    if choice < 0.01:
        return samples[rng.randrange(len(samples))]
    if choice < 0.03:
        return rng.randbytes(rng.randrange(64))
    case = bytearray(samples[rng.randrange(len(samples))])
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        if case:
            _CHANGES[rng.randrange(len(_CHANGES))](rng, case, samples)
    return bytes(case[:MOST_BYTES])
