"""Train embedding tables on servers, accessed by rows, and a data-parallel dense part on trainers.

mpirun -n 3 python examples/embedding_server.py          # 2 trainers, 1 server
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
import warnings

import torch
import torch.nn.functional as F
from hybrid_options import parse_options
from hybrid_report import Result, text, write
from text_training import RARE, Words, library_text, progress
from torch import nn

import mpidist.autograd as dist_autograd
import mpidist.comm
import mpidist.rpc as rpc
from mpidist.ddp import DistributedDataParallel
from mpidist.nn import RemoteModule
from mpidist.optim import DistributedOptimizer

# Number of preceding words from which the model predicts the next.
BEFORE = 4
# Largest final loss relative to the first, after 200 steps or more.
WANTED = 0.75
PROMPTS = ("for i in range", "if not isinstance(", "def __init__(self", "raise ValueError('")
PROMPTS += ("with self._lock:\n",)

trainers: mpidist.comm.ProcessGroup


def train(tables: list[RemoteModule], options: argparse.Namespace) -> Result:
    """Train on one of the trainers.

    Args:
        tables: Columns of the embedding on each server, shared by all trainers.
        options: The program's options.
    """
    torch.manual_seed(1 + trainers.rank)
    words = Words(library_text(options.characters), options.vocabulary)
    dense = nn.Sequential(
        nn.Linear(BEFORE * options.dim, 128), nn.ReLU(), nn.Linear(128, options.vocabulary)
    )
    model = DistributedDataParallel(dense, process_group=trainers)
    groups = [
        {"params": [table.get_module_rref() for table in tables]},
        {"params": [rpc.RRef(model)], "lr": 0.02},  # owned by this trainer
    ]
    optimizer = DistributedOptimizer(torch.optim.Adagrad, groups, lr=0.1)
    losses, start = [], time.perf_counter()
    title = f"{trainers.size} trainer(s), {len(tables)} server(s)"
    steps = progress(options.steps, title) if trainers.rank == 0 else None
    for _ in steps or range(options.steps):
        starts = torch.randint(len(words.numbers) - BEFORE, (options.batch_size, 1))
        chosen = words.numbers[starts + torch.arange(BEFORE + 1)]
        with dist_autograd.context() as context_id:
            rows = look_up(tables, chosen[:, :-1])
            loss = F.cross_entropy(model(rows.flatten(1)), chosen[:, -1])
            # Gradients of the dense part are averaged over the trainers; the others go to servers.
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        mean = loss.detach() / trainers.size
        trainers.all_reduce(mean)
        losses.append(mean.item())
        if steps is not None:
            steps.set_postfix(loss=f"{losses[-1]:.2f}", refresh=False)
    seconds = time.perf_counter() - start
    weights = b"".join(weight.detach().numpy().tobytes() for weight in dense.parameters())
    prompts = PROMPTS if trainers.rank == 0 else ()
    return Result(
        losses=losses,
        samples=[(prompt, continued(prompt, tables, dense, words)) for prompt in prompts],
        weights=hashlib.sha256(weights).hexdigest(),
        by_frequency=words.entropy(),
        steps_per_s=len(losses) / seconds,
        numbers_bytes=chosen[:, :-1].nbytes,
        rows_bytes=rows.nbytes,
        dense_bytes=len(weights),
    )


def look_up(tables: list[RemoteModule], numbers: torch.Tensor) -> torch.Tensor:
    """Query all servers concurrently; return the rows of words, (…, dim)."""
    futures = [table.forward_async(numbers) for table in tables]
    return torch.cat([columns.wait() for columns in futures], dim=-1)


@torch.no_grad()
def continued(
    prompt: str, tables: list[RemoteModule], dense: nn.Module, words: Words, more: int = 8
) -> str:
    """Return the most likely continuation of a prompt."""
    found = [RARE] * BEFORE + words.encode(prompt)
    for _ in range(more):
        chances = dense(look_up(tables, torch.tensor(found[-BEFORE:])).flatten())[: len(words)]
        found.append(int(chances[RARE + 1 :].argmax()) + RARE + 1)
    return words.decode(found[-more:])


def main() -> None:
    group = mpidist.comm.init()
    options = parse_options(group)
    servers = options.servers or max(group.size // 2, 1)

    # torch's Adagrad makes sparse tensors.
    warnings.filterwarnings("ignore", "Sparse invariant checks")
    # The ranks share the cores of the node.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    training = range(max(group.size - servers, 1))
    global trainers
    trainers = group.new_group(list(training))
    rpc.init_rpc(f"worker{group.rank}")
    problem = None
    if group.rank == 0:
        widths = [len(columns) for columns in torch.arange(options.dim).chunk(servers)]
        tables = []
        for k, width in enumerate(widths, group.size - servers):
            arguments = (options.vocabulary, width), {"sparse": True}
            tables.append(RemoteModule(f"worker{k}", nn.Embedding, *arguments))
        given = (tables, options)
        calls = [rpc.rpc_async(trainer, train, args=given, timeout=0) for trainer in training]
        results = [call.wait() for call in calls]
        print(text(results[0], len(training), servers), flush=True)
        if options.output:
            write(results[0], len(training), servers, options.output)
            print(f"Curve: {options.output / 'hybrid.png'}", flush=True)
        if len({result.weights for result in results}) > 1:
            problem = "the trainers ended with different dense parts"
        elif options.steps >= 200 and results[0].last > WANTED * results[0].first:
            problem = f"the loss fell from {results[0].first:.2f} to {results[0].last:.2f} only"
    rpc.shutdown()
    sys.exit(problem)


if __name__ == "__main__":
    main()
