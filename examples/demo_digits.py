"""Train a small convolutional net on scikit-learn's digits, data-parallel over MPI.

mpirun -n 2 python examples/demo_digits.py

This is stock torch: the only line that knows of mpidist is ``init_process_group``.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import resource
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tabulate import tabulate
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DistributedSampler
from tqdm import tqdm

SEED = 0
WANTED_ACCURACY = 0.97


def load_data() -> list[torch.Tensor]:
    """Return training images, test images, training labels, test labels; the same on every rank."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # 1797 of 1 x 8 x 8
    labels = torch.tensor(digits.target)
    return train_test_split(images, labels, test_size=0.2, random_state=SEED, stratify=labels)


def build_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.3), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 10),
    )  # fmt: skip


def mean_over_ranks(total: float, count: int) -> float:
    """Divide the sum over ranks of ``total`` by that of ``count``."""
    sums = torch.tensor([total, count], dtype=torch.float64)
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


@torch.no_grad()
def accuracy(net: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the share of right answers; each rank looks at every size-th image."""
    own = slice(dist.get_rank(), None, dist.get_world_size())
    net.eval()
    right = (net(images[own]).argmax(1) == labels[own]).sum().item()
    return mean_over_ranks(right, len(labels[own]))


def communication_share(model: DistributedDataParallel, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the part of a step's forward and backward that would be gone without communication.

    That is the step minus the same step under ``no_sync``, over the step, the two in turn. It counts what a step waits for
    (a slower rank, too), not what runs hidden behind the computation. No optimizer steps: the weights stay as they are.
    """

    def step_s(sync: bool) -> float:
        dist.barrier()
        start = time.perf_counter()
        with contextlib.nullcontext() if sync else model.no_sync():
            F.cross_entropy(model(images), labels).backward()
        return time.perf_counter() - start

    pairs = [(step_s(True), step_s(False)) for _ in range(60)][10:]  # the first ones warm up
    with_sync, without = torch.tensor(pairs).median(0).values.tolist()
    return max(mean_over_ranks(1 - without / with_sync, 1), 0.0)


def hash_of_weights(net: nn.Module) -> str:
    data = b"".join(weight.detach().numpy().tobytes() for weight in net.parameters())
    return hashlib.sha256(data).hexdigest()[:16]


def draw_curves(losses: list[float], accuracies: list[float], title: str, path: Path) -> None:
    figure = Figure(figsize=(9, 3.8), layout="constrained")  # without pyplot matplotlib draws with Agg and needs no display
    figure.suptitle(title)
    left, right = figure.subplots(1, 2)
    epochs = range(1, len(losses) + 1)
    left.plot(epochs, losses, "o-", color="tab:blue", markersize=4)
    left.set(xlabel="epoch", ylabel="training loss (cross-entropy)", yscale="log")
    right.plot(epochs, [100 * value for value in accuracies], "o-", color="tab:green", markersize=4, label="test set")
    right.axhline(100 * WANTED_ACCURACY, color="grey", linestyle="--", label=f"wanted: {WANTED_ACCURACY:.0%}")
    right.set(xlabel="epoch", ylabel="accuracy (%)")
    right.legend(loc="lower right")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder of digits.png")
    options = parser.parse_args()

    torch.manual_seed(SEED)
    torch.set_num_threads(1)  # the ranks share the node's cores
    dist.init_process_group("mpidist")
    rank, size = dist.get_rank(), dist.get_world_size()

    train_images, test_images, train_labels, test_labels = load_data()
    sampler = DistributedSampler(train_labels, seed=SEED)  # each rank gets its own share of a new shuffle per epoch
    batch_size = max(options.batch_size // size, 1)
    model = DistributedDataParallel(build_net())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    steps_per_epoch = -(-len(sampler) // batch_size)
    schedule = OneCycleLR(optimizer, max_lr=4e-3, total_steps=options.epochs * steps_per_epoch)

    losses, accuracies, training_s = [], [], 0.0
    # mpirun hands the bar on through a pipe: there a few whole lines read better than one that is rewritten.
    style = {} if sys.stderr.isatty() else {"bar_format": "{l_bar}{bar:20}{r_bar}\n", "mininterval": 2.0}
    progress = tqdm(range(options.epochs), desc=f"{size} ranks", unit="epoch", disable=rank != 0, **style)
    for epoch in progress:
        sampler.set_epoch(epoch)
        model.train()
        start, total, count = time.perf_counter(), 0.0, 0
        for chosen in torch.tensor(list(sampler)).split(batch_size):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(train_images[chosen]), train_labels[chosen])
            loss.backward()
            optimizer.step()
            schedule.step()
            total, count = total + loss.item() * len(chosen), count + len(chosen)
        training_s += time.perf_counter() - start
        losses.append(mean_over_ranks(total, count))
        accuracies.append(accuracy(model.module, test_images, test_labels))
        progress.set_postfix(loss=f"{losses[-1]:.4f}", accuracy=f"{accuracies[-1]:.2%}", refresh=False)

    share = communication_share(model, train_images[:batch_size], train_labels[:batch_size])
    reports: list[tuple[str, int]] = [("", 0)] * size
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    dist.all_gather_object(reports, (hash_of_weights(model.module), peak_kib))
    hashes = sorted({weights for weights, _ in reports})
    problem = f"the ranks ended with different weights: {hashes}" if len(hashes) > 1 else ""
    if accuracies[-1] < WANTED_ACCURACY:
        problem = problem or f"test accuracy {accuracies[-1]:.2%} is below {WANTED_ACCURACY:.0%}"
    if rank == 0:
        title = f"Digits on {size} ranks: {accuracies[-1]:.1%} of the test set right"
        draw_curves(losses, accuracies, title, options.output / "digits.png")
        rows = [
            ("test accuracy", f"{accuracies[-1]:.2%}"),
            ("speed, all ranks together", f"{options.epochs * len(train_labels) / training_s:,.0f} samples/s"),
            ("exposed communication", f"{share:.1%} of forward and backward"),
            ("peak memory of each rank", ", ".join(f"{kib / 1024:.0f} MiB" for _, kib in reports)),
            ("weights (hash)", f"{'equal' if len(hashes) == 1 else 'NOT equal'} on all ranks ({', '.join(hashes)})"),
            ("curves", options.output / "digits.png"),
        ]
        print(tabulate(rows, tablefmt="rounded_outline", disable_numparse=True), flush=True)
    dist.destroy_process_group()
    if problem:
        sys.exit(problem if rank == 0 else 1)


if __name__ == "__main__":
    main()
