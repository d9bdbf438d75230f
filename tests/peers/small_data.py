"""Small random data sets where programs look for their own."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np

_IMAGES = 64  # of MNIST's form
_TEXT = "It was generated: nobody wrote it, and nobody will read it.\n" * 200


def mnist(folder: Path) -> None:
    """Write images and labels in MNIST's format to ``../data``, where torchvision looks."""
    raw = folder.parent / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    random = np.random.default_rng(0)
    for part in ("train", "t10k"):
        images = random.integers(0, 256, (_IMAGES, 28, 28), dtype=np.uint8)
        labels = random.integers(0, 10, _IMAGES, dtype=np.uint8)
        head = struct.pack(">iiii", 2051, *images.shape)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(head + images.tobytes())
        head = struct.pack(">ii", 2049, len(labels))
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(head + labels.tobytes())


def characters(folder: Path) -> None:
    """Write a text as numbers of its characters, in nanoGPT's format."""
    import pickle

    data = folder / "data" / "small"
    data.mkdir(parents=True)
    letters = sorted(set(_TEXT))
    numbers = np.array([letters.index(letter) for letter in _TEXT], dtype=np.uint16)
    for part in ("train", "val"):
        numbers.tofile(data / f"{part}.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(letters)}))


def images(folder: Path) -> None:
    """Write images of six classes as folders of files: the accuracy looks at the best five."""
    from PIL import Image

    random = np.random.default_rng(0)
    for part in ("train", "val"):
        for name in "abcdef":
            place = folder / "images" / part / name
            place.mkdir(parents=True)
            for number in range(3):
                pixels = random.integers(0, 256, (40, 40, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"{number}.png")


WRITERS: dict[str, Callable[[Path], None]] = {
    "mnist": mnist,
    "characters": characters,
    "images": images,
}
