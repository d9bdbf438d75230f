"""Training on scikit-learn's digits with one communication hook: the accuracy after some epochs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

from mpidist.comm.group_types import Group
from mpidist.ddp import DistributedDataParallel

BATCH = 64  # of all ranks together


def build_net() -> nn.Module:
    """Return a small convolutional network: 152,000 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def accuracy(group: Group, seed: int, epochs: int, hook: Any, state: Any) -> float:
    """Train, and return the share of right answers on a fifth of the images.

    Collective: over the group.
    """
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    images, test_images, labels, test_labels = train_test_split(
        images, labels, test_size=0.2, random_state=seed, stratify=labels
    )
    torch.manual_seed(seed)
    net = build_net()
    model = DistributedDataParallel(net, process_group=group, bucket_cap_mb=0.2)
    model.register_comm_hook(state, hook)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    shuffle = torch.Generator().manual_seed(seed)
    own = BATCH // group.size
    for _ in range(epochs):
        order = torch.randperm(len(labels), generator=shuffle)
        for batch in order[: len(order) // BATCH * BATCH].split(BATCH):
            mine = batch[group.rank * own : (group.rank + 1) * own]
            optimizer.zero_grad()
            F.cross_entropy(model(images[mine]), labels[mine]).backward()
            optimizer.step()
    with torch.no_grad():
        return float((net(test_images).argmax(1) == test_labels).float().mean())
