"""Train a net on scikit-learn's digits, data-parallel, with checkpoints for interrupted jobs.

python examples/train_digits.py
mpirun -n 2 python examples/train_digits.py --checkpoint run --save-every 20
srun python examples/train_digits.py --checkpoint run --optimizer oss --hook powersgd
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from command_line import parse, positive
from digits_data import Unusable, build_net, divided, own_device, read
from evaluation import accuracy, mean_over_ranks
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, TensorDataset

import mpidist.comm
from mpidist.checkpoint import REQUEUE_EXIT_CODE, Preemption, ResumableSampler, load, save
from mpidist.comm.mpi import runtime
from mpidist.ddp import (
    AdaptiveState,
    DistributedDataParallel,
    PowerSGDState,
    adaptive_hook,
    bf16_compress_hook,
    powerSGD_hook,
)
from mpidist.errors import CheckpointError, DisagreementError
from mpidist.optim import OSS


class Metrics:
    """File of JSON lines on rank 0: one per step, and one with the final accuracy."""

    def __init__(self, path: Path | None, step: int) -> None:
        """Open the file and keep the lines up to ``step``; a resumed run rewrites later ones."""
        self._file = None
        if path is None:
            return
        lines = path.read_text(errors="replace").splitlines() if step and path.exists() else []
        kept = [
            line
            for line in lines
            if line.startswith('{"step"') and line.endswith("}") and '"loss"' in line
        ]
        kept = [line for line in kept if json.loads(line)["step"] <= step]
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.part")
        part.write_text("".join(f"{line}\n" for line in kept))
        part.replace(path)
        self._file = path.open("a", buffering=1)

    def add(self, **row: Any) -> None:
        if self._file is not None:
            self._file.write(json.dumps(row) + "\n")


def train(group: Any, options: argparse.Namespace, preemption: Preemption) -> int:
    """Train and return the exit code.

    Collective: over the group.
    """
    start_s = time.monotonic()

    def report(text: str) -> None:
        if group.rank == 0:
            print(text, flush=True)

    device = own_device(group)
    # The data is equal on all ranks; the sampler assigns each its share.
    images, labels, test_images, test_labels = with_all(
        group, lambda: divided(*read(options.data), group.size)
    )
    sampler = ResumableSampler(len(labels), seed=options.seed, group=group)
    # DataLoader uses its own generator: otherwise each start, also of a resumed run, would draw
    # from torch's.
    loader = DataLoader(
        TensorDataset(images, labels), options.batch, sampler=sampler, generator=torch.Generator()
    )

    torch.manual_seed(options.seed)
    model = DistributedDataParallel(
        build_net(images, int(labels.max()) + 1).to(device), process_group=group
    )
    torch.manual_seed(options.seed + 1 + group.rank)  # dropout differs by rank
    hook_state: Any = None
    if options.hook == "powersgd":
        hook_state = PowerSGDState(group, 2, start_powerSGD_iter=10, min_compression_rate=1)
        model.register_comm_hook(hook_state, powerSGD_hook)
    elif options.hook == "adaptive":
        hook_state = AdaptiveState(group, min_compression_rate=1)
        model.register_comm_hook(hook_state, adaptive_hook)
    elif options.hook == "bf16":
        model.register_comm_hook(group, bf16_compress_hook)
    optimizer: Any = (
        OSS(model.parameters(), torch.optim.AdamW, group, lr=2e-3)
        if options.optimizer == "oss"
        else torch.optim.AdamW(model.parameters(), lr=2e-3)
    )
    scheduler = LinearLR(optimizer, start_factor=0.1, total_iters=20)

    # State of a run, for save and load.
    state = {
        "model": model,
        "optimizer": optimizer,
        "hook_state": hook_state,
        "sampler": sampler,
        "scheduler": scheduler,
    }
    resumed = load(options.checkpoint, **state) if options.checkpoint else None
    step, losses = (resumed.step, resumed.extra["losses"]) if resumed else (0, [])
    saved = step if resumed else None
    if resumed:
        report(
            f"resumed from {resumed.path}: step {step}, epoch {sampler.epoch + 1}, saved by "
            f"{resumed.saved_by} rank(s)"
        )
    first = step
    metrics = with_all(group, lambda: Metrics(options.metrics if group.rank == 0 else None, step))

    for epoch in range(sampler.epoch, options.epochs):
        sampler.set_epoch(epoch)
        for batch, wanted in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch.to(device)), wanted.to(device))
            loss.backward()
            optimizer.step()
            scheduler.step()
            step += 1
            sampler.advance(len(wanted))
            losses.append(mean_over_ranks(group, loss.item(), 1))
            metrics.add(step=step, epoch=epoch + 1, loss=losses[-1])

            # All ranks get the same answer, because a signal or a limit may reach one rank first.
            over = (
                step - first == options.max_steps
                or time.monotonic() - start_s > options.max_seconds
            )
            stop = preemption.requested(over)
            if options.checkpoint and (stop or step % options.save_every == 0):
                save(options.checkpoint, step, **state, extra={"losses": losses})
                saved = step
            if stop:
                why = ", ".join(preemption.received) or "a limit, or a signal to another rank"
                report(
                    f"stopped after step {step} ({why}); "
                    f"{f'saved in {options.checkpoint}' if saved else 'nothing was saved'}"
                )
                return REQUEUE_EXIT_CODE if saved else 1
        if losses:
            report(
                f"epoch {epoch + 1} of {options.epochs}: {step} steps, loss "
                f"{sum(losses) / len(losses):.4f}"
            )
        losses = []
    if options.checkpoint and saved != step:
        save(options.checkpoint, step, **state, extra={"losses": losses})

    share = accuracy(group, model.module, test_images.to(device), test_labels.to(device))
    metrics.add(step=step, accuracy=share)
    if options.hook == "adaptive":
        report(str(hook_state))
    report(
        f"accuracy {share:.2%} on {len(test_labels)} images, after {step} steps on {group.size} "
        "rank(s)"
    )
    return 0


def with_all(group: Any, call: Any) -> Any:
    """Return ``call()``; after a failure on any rank, raise the first such rank's error on all.

    Collective: over the group.
    """
    result, problem = None, None
    try:
        result = call()
    except (Unusable, OSError) as error:
        problem = str(error)
    problems = [text for text in group.all_gather_object(problem) if text is not None]
    if problems:
        raise Unusable(problems[0])
    return result


def options_of(rank: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="Exit codes: 0 done, 75 saved and to be started again.",
    )
    parser.add_argument(
        "--optimizer",
        choices=["adamw", "oss"],
        default="adamw",
        help="oss: AdamW with sharded state",
    )
    parser.add_argument(
        "--hook",
        choices=["none", "bf16", "powersgd", "adaptive"],
        default="none",
        help="compression of the gradients; adaptive: measured and decided in the first steps",
    )
    parser.add_argument("--epochs", type=positive, default=10)
    parser.add_argument("--batch", type=positive, default=32, help="samples of a rank in a step")
    parser.add_argument(
        "--checkpoint", type=Path, metavar="FOLDER", help="save there, and go on from what is there"
    )
    parser.add_argument("--save-every", type=positive, default=50, metavar="STEPS")
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help=".npz with images (N, H, W) and labels (N,); default: the digits",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--metrics",
        type=Path,
        metavar="FILE",
        help="JSON lines: step and loss, at the end the accuracy",
    )
    parser.add_argument(
        "--max-seconds",
        type=float,
        default=float("inf"),
        help="stop then, as if the scheduler had asked",
    )
    parser.add_argument(
        "--max-steps",
        type=positive,
        help="stop after so many steps of this start, as if the scheduler had asked",
    )
    return parse(parser, rank)


def main() -> int:
    group = mpidist.comm.init()
    options = options_of(group.rank)
    # The ranks share the cores of the node.
    torch.set_num_threads(1)
    try:
        # From here on signals are recorded, also while the run is loaded.
        with Preemption(group) as preemption:
            code = train(group, options, preemption)
    except (Unusable, CheckpointError, DisagreementError) as error:
        code = 2 if isinstance(error, Unusable) else 1
        if group.rank == 0:
            print(f"train_digits.py: {error}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        if group.size > 1:
            # Other ranks may wait for this one.
            runtime.abort("interrupted; the next start goes on from the last checkpoint", 130)
        code = 130
    # mpirun ends all ranks after one has failed.
    group.barrier()
    return code


if __name__ == "__main__":
    sys.exit(main())
