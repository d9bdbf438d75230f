"""Data, net and device of train_digits.py; all ranks report the same errors."""

from __future__ import annotations

import socket
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import mpidist.comm

TEST_SHARE = 5  # every fifth sample


class Unusable(Exception):
    """Error that the user must correct, with a text for the user."""


def read(path: Path | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images (N, 1, H, W), float32 from 0 to 1, and labels (N,), int64.

    Args:
        path: An .npz file with images (N, H, W) and labels (N,); scikit-learn's digits if None.

    Raises:
        Unusable: The data cannot be read.
    """
    if path is None:
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise Unusable(
                "the digits come with scikit-learn: pip install 'mpidist[demo]', or give --data "
                "FILE.npz"
            ) from error
        digits = load_digits()
        images, labels = digits.images, digits.target
    else:
        try:
            with np.load(path) as archive:
                images, labels = archive["images"], archive["labels"]
        except KeyError as error:
            raise Unusable(
                f"--data {path}: it must hold the arrays images and labels ({error.args[0]})"
            ) from error
        except Exception as error:  # NumPy raises many types for damaged archives
            raise Unusable(f"--data {path} cannot be read as an .npz file: {error}") from error
    if (
        images.ndim != 3
        or labels.shape != images.shape[:1]
        or labels.dtype.kind not in "iu"
        or (labels.size and labels.min() < 0)
    ):
        raise Unusable(
            f"--data {path}: images must be of shape (N, H, W) and labels N whole numbers from 0 "
            f"on; got images {images.shape}, "
            f"labels {labels.shape} of {labels.dtype}"
        )
    if images.dtype.kind not in "iuf" or min(images.shape[1:], default=0) < 4:
        raise Unusable(
            f"--data {path}: images must be numbers, at least 4 x 4 of them; got {images.shape} of "
            f"{images.dtype}"
        )
    pixels = torch.from_numpy(np.asarray(images, dtype=np.float32)).unsqueeze(1)
    return pixels / pixels.max().clamp(min=1e-6) if pixels.numel() else pixels, torch.from_numpy(
        labels.astype(np.int64)
    )


def divided(images: torch.Tensor, labels: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """Return training images and labels, test images and labels.

    Raises:
        Unusable: There are too few samples for this many ranks.
    """
    is_test = torch.arange(len(labels)) % TEST_SHARE == TEST_SHARE - 1
    samples = int((~is_test).sum())
    if samples < ranks or not is_test.any():
        raise Unusable(
            f"{len(labels)} samples, {samples} of them to train with, are too few for {ranks} "
            "rank(s): start fewer ranks or give "
            "more data (at least 5 samples, and one for each rank)"
        )
    return [images[~is_test], labels[~is_test], images[is_test], labels[is_test]]


def build_net(images: torch.Tensor, classes: int) -> nn.Module:
    """Return a small convolutional net for images of this size, with dropout."""
    height, width = (size // 2 for size in images.shape[2:])
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * height * width, 64), nn.ReLU(),
        nn.Dropout(0.2), nn.Linear(64, classes),
    )  # fmt: skip


def own_device(group: Any) -> torch.device:
    """Return this rank's device, which no other rank uses.

    Collective: over the group.

    Raises:
        Unusable: Ranks share a GPU (on all ranks).
    """
    device = mpidist.comm.device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Under srun each rank may see only one GPU, always as number 0, so compare the GPUs' ids.
    own = (
        socket.gethostname(),
        str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None,
    )
    shared = [
        (node, count)
        for (node, gpu), count in Counter(group.all_gather_object(own)).items()
        if gpu and count > 1
    ]
    if shared:
        node, count = shared[0]
        raise Unusable(
            f"{count} ranks share one GPU on {node}: start one rank a GPU (srun: as many "
            "--ntasks-per-node as --gpus-per-node; "
            "mpirun: -n), or set CUDA_VISIBLE_DEVICES= to train on the CPU"
        )
    return device
