"""Train a small convolutional net on scikit-learn's digits, data-parallel over MPI, with one communication hook or several.

mpirun -n 2 python examples/demo_digits.py
mpirun -n 2 python examples/demo_digits.py --hook powersgd-2
mpirun -n 2 python examples/demo_digits.py --hook allreduce --optimizer oss
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
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
from command_line import parse, positive
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DistributedSampler
from tqdm import tqdm

import mpidist.comm
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
UNCOMPRESSED_SHARE = 0.1  # of the steps: PowerSGD starts when the first, large gradients are over


@dataclass(frozen=True)
class Method:
    """A way to reduce gradients."""

    hook: Callable[..., Any]
    bytes_per_element: int
    rank: int | None = None  # of PowerSGD's approximation

    def state(self, group: Any, steps: int) -> Any:
        """Return what the hook gets beside the bucket: for PowerSGD its state, else the group."""
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
    """What came of training with one method."""

    method: str
    seed: int
    losses: list[float]  # one for each epoch, mean over ranks
    accuracies: list[float]  # on the test set
    steps: int
    compressed_steps: int
    bytes_per_step: float  # what a rank hands to the reduction in a compressed step
    uncompressed_bytes: int  # the same in fp32
    exposed_ms: float  # of a step's forward and backward
    samples_per_s: float  # all ranks together
    state_bytes: list[int]  # of each rank's optimizer
    peak_mib: float  # of this rank's memory
    weights: str  # hash


def load_data(seed: int) -> list[torch.Tensor]:
    """Return training images, test images, training labels, test labels; the same on every rank."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # 1797 of 1 x 8 x 8
    labels = torch.tensor(digits.target)
    return train_test_split(images, labels, test_size=0.2, random_state=seed, stratify=labels)


def build_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.3), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 10),
    )  # fmt: skip


def train(
    group: Any, name: str, optimizer_name: str, seed: int, epochs: int, batch_size: int
) -> Result:
    """Train once. Collective over the group."""
    torch.manual_seed(seed)
    train_images, test_images, train_labels, test_labels = load_data(seed)
    # Each rank gets its own share of a new shuffle per epoch.
    sampler = DistributedSampler(train_labels, group.size, group.rank, seed=seed)
    own_batch = max(batch_size // group.size, 1)
    steps = epochs * -(-len(sampler) // own_batch)

    method = METHODS[name]
    state = method.state(group, steps)
    model = DistributedDataParallel(build_net(), process_group=group)
    model.register_comm_hook(state, method.hook)
    # The same bits either way; OSS keeps on each rank the state of its share of the parameters.
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
        _, _, elements = state.compression_stats()  # of the compressed steps alone
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
        exposed_ms=exposed_ms(group, model, train_images[:own_batch], train_labels[:own_batch]),
        samples_per_s=epochs * len(train_labels) / training_s,
        state_bytes=group.all_gather_object(state_bytes(optimizer)),
        peak_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        weights=hash_of_weights(model.module),
    )


def progress(epochs: range, title: str, rank: int) -> Any:
    # mpirun hands the bar on through a pipe: there a few whole lines read better than one that is
    # rewritten.
    style = (
        {}
        if sys.stderr.isatty()
        else {"bar_format": "{l_bar}{bar:20}{r_bar}\n", "mininterval": 5.0}
    )
    return tqdm(epochs, desc=title, unit="epoch", disable=rank != 0, **style)


def mean_over_ranks(group: Any, total: float, count: int) -> float:
    """Divide the sum over ranks of ``total`` by that of ``count``."""
    sums = torch.tensor([total, count], dtype=torch.float64)
    group.all_reduce(sums)
    return (sums[0] / sums[1]).item()


@torch.no_grad()
def accuracy(group: Any, net: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the share of right answers; each rank looks at every size-th image."""
    own = slice(group.rank, None, group.size)
    net.eval()
    right = (net(images[own]).argmax(1) == labels[own]).sum().item()
    return mean_over_ranks(group, right, len(labels[own]))


def exposed_ms(group: Any, model: Any, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Return what would be gone of a step's forward and backward without communication.

    That is the step minus the same step under ``no_sync``, the two in turn. It counts what a step
    waits for (a slower rank, too) and the compression, not what runs hidden behind the computation.
    No optimizer steps: the weights stay as they are.
    """

    def step_s(sync: bool) -> float:
        model.zero_grad()
        group.barrier()
        start = time.perf_counter()
        with contextlib.nullcontext() if sync else model.no_sync():
            F.cross_entropy(model(images), labels).backward()
        return time.perf_counter() - start

    pairs = [(step_s(True), step_s(False)) for _ in range(60)][10:]  # the first ones warm up
    with_sync, without = torch.tensor(pairs).median(0).values.tolist()
    return mean_over_ranks(group, 1e3 * (with_sync - without), 1)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of optimizer state that this rank holds."""
    return sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )


def hash_of_weights(net: nn.Module) -> str:
    data = b"".join(weight.detach().numpy().tobytes() for weight in net.parameters())
    return hashlib.sha256(data).hexdigest()[:16]


def problems_of(results: list[Result], told: list[list[str]], epochs: int) -> list[str]:
    """Return what went wrong: ranks that ended with different weights, too few right answers, too little compression."""
    problems = []
    for place, result in enumerate(results):
        if len({weights[place] for weights in told}) > 1:
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
        help="folder of digits.png and digits.json",
    )
    group = mpidist.comm.init()
    options = parse(parser, group.rank)

    torch.set_num_threads(1)  # the ranks share the node's cores
    first, *others = options.optimizer
    pairs = [(name, first) for name in options.hook] + [
        (options.hook[0], other) for other in others
    ]
    runs = [(*pair, seed) for pair in pairs for seed in range(options.seeds)]
    results = [train(group, *run, options.epochs, options.batch_size) for run in runs]
    told = group.all_gather_object([result.weights for result in results])
    peaks_mib = group.all_gather_object(results[-1].peak_mib)
    problems = problems_of(results, told, options.epochs)
    if group.rank == 0:
        options.output.mkdir(parents=True, exist_ok=True)
        rows = [asdict(result) for result in results]
        (options.output / "digits.json").write_text(json.dumps(rows, indent=1) + "\n")
        demo_report.draw(rows, group.size, WANTED_ACCURACY, options.output / "digits.png")
        print(demo_report.table(rows), flush=True)
        print(
            f"Weights: {'NOT ' * any('weights' in p for p in problems)}equal on all ranks after "
            "each run."
        )
        print(f"Peak memory of each rank: {', '.join(f'{mib:.0f} MiB' for mib in peaks_mib)}.")
        print(f"Curves: {options.output / 'digits.png'}", flush=True)
    group.close()
    if problems:
        sys.exit("\n".join(problems) if group.rank == 0 else 1)


if __name__ == "__main__":
    main()
