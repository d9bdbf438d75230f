"""Train a small convolutional net on scikit-learn's digits, data-parallel, with several hooks.

mpirun -n 2 python examples/demo_digits.py
mpirun -n 2 python examples/demo_digits.py --hook powersgd-2
mpirun -n 2 python examples/demo_digits.py --hook allreduce --optimizer oss
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import demo_report
import torch
import torch.nn.functional as F
from command_line import parse, positive, require_folder
from evaluation import accuracy, exposed_ms, mean_over_ranks
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DistributedSampler
from tqdm import tqdm

import mpidist.comm
from mpidist import whole_file
from mpidist.ddp import (
    DistributedDataParallel,
    PowerSGDState,
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    powerSGD_hook,
)
from mpidist.optim import OSS

WANTED_ACCURACY = 0.97
# Share of the steps before PowerSGD starts: the first gradients are large.
UNCOMPRESSED_SHARE = 0.1


@dataclass(frozen=True)
class Method:
    """Way to reduce gradients."""

    hook: Callable[..., Any]
    bytes_per_element: int
    rank: int | None = None  # rank of PowerSGD's approximation

    def state(self, group: Any, steps: int) -> Any:
        """Return the hook's state: PowerSGD's state, or else the group."""
        if self.rank is None:
            return group
        return PowerSGDState(
            group,
            self.rank,
            start_powerSGD_iter=int(UNCOMPRESSED_SHARE * steps),
            min_compression_rate=1,
        )


METHODS = {
    "allreduce": Method(allreduce_hook, 4),
    "fp16": Method(fp16_compress_hook, 2),
    "bf16": Method(bf16_compress_hook, 2),
    "powersgd-1": Method(powerSGD_hook, 4, 1),
    "powersgd-2": Method(powerSGD_hook, 4, 2),
    "powersgd-4": Method(powerSGD_hook, 4, 4),
}
COMPARED = ["allreduce", "fp16", "powersgd-1", "powersgd-2", "powersgd-4"]


@dataclass(frozen=True)
class Result:
    """Result of training with one method."""

    method: str
    seed: int
    losses: list[float]  # per epoch, mean over ranks
    accuracies: list[float]  # on the test set
    steps: int
    compressed_steps: int
    # Bytes that a rank passes to the reduction in a compressed step.
    bytes_per_step: float
    uncompressed_bytes: int  # the same in fp32
    exposed_ms: float  # of forward and backward pass
    samples_per_s: float  # over all ranks
    state_bytes: list[int]  # optimizer state by rank
    peak_mib: float  # of this rank
    weights: str  # hash


def load_data(seed: int) -> list[torch.Tensor]:
    """Return training images, test images, training labels, test labels; equal on all ranks."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # 1797 of 1 x 8 x 8
    labels = torch.tensor(digits.target)
    return train_test_split(images, labels, test_size=0.2, random_state=seed, stratify=labels)


def build_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.3), nn.Linear(64 * 4 * 4, 128), nn.ReLU(),
        nn.Dropout(0.3), nn.Linear(128, 10),
    )  # fmt: skip


def train(
    group: Any, name: str, optimizer_name: str, seed: int, epochs: int, batch_size: int
) -> Result:
    """Train once.

    Collective: over the group.
    """
    torch.manual_seed(seed)
    train_images, test_images, train_labels, test_labels = load_data(seed)
    # Each rank has its share of a new shuffle in each epoch.
    sampler = DistributedSampler(train_labels, group.size, group.rank, seed=seed)
    own_batch = max(batch_size // group.size, 1)
    steps = epochs * -(-len(sampler) // own_batch)

    method = METHODS[name]
    state = method.state(group, steps)
    model = DistributedDataParallel(build_net(), process_group=group)
    model.register_comm_hook(state, method.hook)
    # Both give the same bits; with OSS each rank stores the state of its share of the parameters.
    is_sharded = optimizer_name == "oss"
    optimizer: torch.optim.Optimizer = (
        OSS(model.parameters(), torch.optim.Adam, group, partition="flat", lr=1e-3)
        if is_sharded
        else torch.optim.Adam(model.parameters(), lr=1e-3)
    )
    schedule = OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps)

    losses, accuracies, training_s = [], [], 0.0
    title = f"{name}, OSS" if is_sharded else name
    for epoch in progress(range(epochs), f"{title} on {group.size} ranks", group.rank):
        sampler.set_epoch(epoch)
        model.train()
        start, total, count = time.perf_counter(), 0.0, 0
        for chosen in torch.tensor(list(sampler)).split(own_batch):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(train_images[chosen]), train_labels[chosen])
            loss.backward()
            optimizer.step()
            schedule.step()
            total, count = total + loss.item() * len(chosen), count + len(chosen)
        training_s += time.perf_counter() - start
        losses.append(mean_over_ranks(group, total, count))
        accuracies.append(accuracy(group, model.module, test_images, test_labels))

    numel = sum(p.numel() for p in model.parameters())
    compressed, sent = steps if method.bytes_per_element < 4 else 0, float(numel)
    if isinstance(state, PowerSGDState):
        compressed = steps - state.start_powerSGD_iter
        _, _, elements = state.compression_stats()  # of the compressed steps only
        sent = elements / compressed
    return Result(
        method=title,
        seed=seed,
        losses=losses,
        accuracies=accuracies,
        steps=steps,
        compressed_steps=compressed,
        bytes_per_step=sent * method.bytes_per_element,
        uncompressed_bytes=4 * numel,
        exposed_ms=exposed_ms(
            group, model, train_images[:own_batch], train_labels[:own_batch], min(50, 2 * epochs)
        ),
        samples_per_s=epochs * len(train_labels) / training_s,
        state_bytes=group.all_gather_object(state_bytes(optimizer)),
        peak_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        weights=hash_of_weights(model.module),
    )


def progress(epochs: range, title: str, rank: int) -> Any:
    # mpirun forwards the bar through a pipe, where a few whole lines read better than rewritten
    # ones.
    style = (
        {}
        if sys.stderr.isatty()
        else {"bar_format": "{l_bar}{bar:20}{r_bar}\n", "mininterval": 5.0}
    )
    return tqdm(epochs, desc=title, unit="epoch", disable=rank != 0, **style)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of optimizer state on this rank."""
    return sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )


def hash_of_weights(net: nn.Module) -> str:
    data = b"".join(weight.detach().numpy().tobytes() for weight in net.parameters())
    return hashlib.sha256(data).hexdigest()[:16]


def problems_of(results: list[Result], hashes: list[list[str]], epochs: int) -> list[str]:
    """Return problems: different weights on the ranks, low accuracy, or too little compression."""
    problems = []
    for place, result in enumerate(results):
        if len({weights[place] for weights in hashes}) > 1:
            problems.append(f"{result.method}: the ranks ended with different weights")
        if epochs >= 20 and result.accuracies[-1] < WANTED_ACCURACY:
            problems.append(
                f"{result.method}: accuracy {result.accuracies[-1]:.2%} is below "
                f"{WANTED_ACCURACY:.0%}"
            )
        if (
            METHODS[result.method.removesuffix(", OSS")].rank is not None
            and result.compressed_steps < 0.8 * result.steps
        ):
            problems.append(
                f"{result.method}: only {result.compressed_steps} of {result.steps} steps were "
                "compressed"
            )
    by_run = {(result.method, result.seed): result for result in results}
    for (method, seed), result in by_run.items():
        other = by_run.get((method.removesuffix(", OSS"), seed))
        if other is not None and other.weights != result.weights:
            problems.append(f"{method}: other weights than with Adam's whole state on each rank")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--hook",
        nargs="+",
        choices=list(METHODS),
        default=COMPARED,
        metavar="HOOK",
        help=", ".join(METHODS),
    )
    parser.add_argument(
        "--optimizer", nargs="+", choices=["adam", "oss"], default=["adam", "oss"],
        help="all hooks train with the first, the first hook with the others; oss is Adam with "
             "sharded state",
    )  # fmt: skip
    parser.add_argument("--epochs", type=positive, default=30)
    parser.add_argument("--batch-size", type=positive, default=64, help="of all ranks together")
    parser.add_argument(
        "--seeds", type=positive, default=1, help="train so many times with each hook"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("demo-output"),
        help="folder of digits.png, digits.json and link.png",
    )
    group = mpidist.comm.init()
    options = parse(parser, group.rank)
    require_folder(group, options.output)

    # The ranks share the cores of the node.
    torch.set_num_threads(1)
    first, *others = options.optimizer
    pairs = [(name, first) for name in options.hook] + [
        (options.hook[0], other) for other in others
    ]
    runs = [(*pair, seed) for pair in pairs for seed in range(options.seeds)]
    results = [train(group, *run, options.epochs, options.batch_size) for run in runs]
    hashes = group.all_gather_object([result.weights for result in results])
    peaks_mib = group.all_gather_object(results[-1].peak_mib)
    problems = problems_of(results, hashes, options.epochs)
    is_one_node = len(set(group.all_gather_object(platform.node()))) == 1
    if group.rank == 0:
        rows = [asdict(result) for result in results]
        with whole_file.replacing(options.output / "digits.json") as file:
            file.write(f"{json.dumps(rows, indent=1)}\n".encode())
        demo_report.draw(rows, group.size, WANTED_ACCURACY, options.output / "digits.png")
        demo_report.draw_link(options.output / "link.png")
        print(demo_report.table(rows), flush=True)
        print(
            f"Weights: {'NOT ' * any('weights' in p for p in problems)}equal on all ranks after "
            "each run."
        )
        print(f"Peak memory of each rank: {', '.join(f'{mib:.0f} MiB' for mib in peaks_mib)}.")
        print(demo_report.explanation(rows, is_one_node))
        print(f"This run: {options.output / 'digits.png'}")
        print(f"Recorded steps on a slow link: {options.output / 'link.png'}", flush=True)
    group.close()
    if problems:
        sys.exit("\n".join(problems) if group.rank == 0 else 1)


if __name__ == "__main__":
    main()
