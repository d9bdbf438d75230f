"""Train with embedding tables on servers, which answer by rows, and a dense part that trainers hold in common.

mpirun -n 4 python examples/embedding_server.py
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from text_training import library_text, progress
from torch import nn

import mpidist.autograd as dist_autograd
import mpidist.comm
import mpidist.rpc as rpc
from mpidist.ddp import DistributedDataParallel
from mpidist.nn import RemoteModule
from mpidist.optim import DistributedOptimizer

WORD = re.compile(r"\w+|[^\w\s]|\n")
BEFORE = 4  # words from which the next one is guessed
WANTED = 0.75  # of the first loss, at most, after 200 steps or more

trainers: Any = None  # the group of the trainers


def words_of(text: str, vocabulary: int) -> torch.Tensor:
    """Return each word's place among the most frequent ones; 0 for all others."""
    found = WORD.findall(text)
    places = {word: place for place, (word, _) in enumerate(Counter(found).most_common(vocabulary - 1), start=1)}
    return torch.tensor([places.get(word, 0) for word in found])


def train(tables: list[RemoteModule], options: argparse.Namespace) -> list[float]:
    """Train on one of the trainers; return the loss of each step, the mean over them.

    Args:
        tables: On each server some columns of the embedding; all trainers use the same.
        options: The program's.
    """
    torch.manual_seed(1 + trainers.rank)
    words = words_of(library_text(options.characters), options.vocabulary)
    dense = nn.Sequential(nn.Linear(BEFORE * options.dim, 128), nn.ReLU(), nn.Linear(128, options.vocabulary))
    model = DistributedDataParallel(dense, process_group=trainers)
    dense_optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    table_optimizer = DistributedOptimizer(
        torch.optim.Adagrad, [rref for table in tables for rref in table.remote_parameters()], lr=0.1
    )
    losses = []
    steps = progress(options.steps, f"{trainers.size} trainers, {len(tables)} servers") if trainers.rank == 0 else None
    for _ in steps or range(options.steps):
        starts = torch.randint(len(words) - BEFORE, (options.batch_size, 1))
        chosen = words[starts + torch.arange(BEFORE + 1)]
        with dist_autograd.context() as context_id:
            rows = [table.forward_async(chosen[:, :-1]) for table in tables]
            embedded = torch.cat([row.wait() for row in rows], dim=-1)
            # The dense part has a backward pass of its own, which averages its gradients over the trainers.
            inputs = embedded.detach().requires_grad_()
            dense_optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs.flatten(1)), chosen[:, -1])
            loss.backward()
            dense_optimizer.step()
            # This scalar's gradient for the embedding is the loss's: the pass goes on to the servers.
            dist_autograd.backward(context_id, [(embedded * inputs.grad).sum()])
            table_optimizer.step(context_id)
        mean = loss.detach() / trainers.size
        trainers.all_reduce(mean)
        losses.append(mean.item())
        if steps is not None:
            steps.set_postfix(loss=f"{losses[-1]:.2f}", refresh=False)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--servers", type=int, default=0, help="ranks that hold tables; half of them if 0")
    parser.add_argument("--batch-size", type=int, default=128, help="of each trainer")
    parser.add_argument("--vocabulary", type=int, default=2000)
    parser.add_argument("--dim", type=int, default=64, help="columns of all tables together")
    parser.add_argument("--characters", type=int, default=1_000_000, help="so much of the sources of Python's library")
    options = parser.parse_args()

    warnings.filterwarnings("ignore", "Sparse invariant checks")  # torch's Adagrad makes sparse tensors
    torch.set_num_threads(1)  # the ranks share the node's cores
    torch.manual_seed(0)
    group = mpidist.comm.init()
    servers = min(options.servers or max(group.size // 2, 1), max(group.size - 1, 1))
    training = range(max(group.size - servers, 1))
    global trainers
    trainers = group.new_group(list(training))
    rpc.init_rpc(f"worker{group.rank}")
    problem = None
    if group.rank == 0:
        widths = [len(columns) for columns in torch.arange(options.dim).chunk(servers)]
        tables = [
            RemoteModule(f"worker{group.size - servers + k}", nn.Embedding, (options.vocabulary, width), {"sparse": True})
            for k, width in enumerate(widths)
        ]
        calls = [rpc.rpc_async(trainer, train, args=(tables, options), timeout=0) for trainer in training]
        losses = torch.futures.wait_all(calls)[0]
        first, last = losses[0], sum(losses[-10:]) / len(losses[-10:])
        print(f"{len(training)} trainer(s), {servers} server(s), {options.steps} steps: loss {first:.2f} -> {last:.2f}")
        if options.steps >= 200 and last > WANTED * first:
            problem = f"the loss fell from {first:.2f} to {last:.2f} only"
    rpc.shutdown()
    sys.exit(problem)


if __name__ == "__main__":
    main()
