"""Train a transformer in pipeline stages on several ranks, with micro-batches.

mpirun -n 4 python examples/pipeline_transformer.py
"""

from __future__ import annotations

import argparse
import sys
import threading

import torch
import torch.nn.functional as F
from command_line import parse, positive
from text_training import add_characters, library_text, progress
from torch import nn

import mpidist.autograd as dist_autograd
import mpidist.comm
import mpidist.rpc as rpc
from mpidist.nn import RemoteModule
from mpidist.optim import DistributedOptimizer

BYTES = 256  # vocabulary
HEADS = 4
HELD_OUT = 0.1  # share of the text, at its end
WANTED = 0.75  # largest final loss relative to the first, after 100 steps or more


class Stage(nn.Module):
    """Layers on one worker; the first stage reads bytes, the last stage returns the loss."""

    def __init__(self, layers: int, is_first: bool, is_last: bool, dim: int, context: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, dim) if is_first else None
        self.places = nn.Parameter(0.02 * torch.randn(context, dim)) if is_first else None
        settings = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        made = (nn.TransformerEncoderLayer(dim, HEADS, 4 * dim, **settings) for _ in range(layers))
        self.layers = nn.ModuleList(made)
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, BYTES)) if is_last else None
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context))
        self._lock = threading.Lock()

    def forward(self, source: rpc.RRef, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Fetch the previous stage's output and apply this stage.

        Args:
            source: A micro-batch: bytes (samples, context), or activations (samples, context, dim).
            targets: Next byte of each position, for the last stage.
        """
        x = source.to_here()
        with self._lock:  # one micro-batch at a time
            if self.bytes is not None:
                x = self.bytes(x) + self.places
            for layer in self.layers:
                x = layer(x, src_mask=self.mask, is_causal=True)
            if self.head is None:
                return x
            return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Pipeline:
    """Stages on one worker each, controlled by worker 0."""

    def __init__(self, workers: int, layers: int, dim: int, context: int) -> None:
        shares = [layers // workers + (k < layers % workers) for k in range(workers)]
        self.stages = [
            RemoteModule(f"worker{k}", Stage, (share, k == 0, k == workers - 1, dim, context))
            for k, share in enumerate(shares)
        ]

    def loss(self, samples: torch.Tensor, micro_batches: int) -> torch.Tensor:
        """Return the mean loss of (samples, context + 1) bytes; all stages run in parallel."""
        losses = []
        for part in samples.chunk(micro_batches):
            # Workers pass references; activations travel directly from stage to stage.
            flow = rpc.RRef(part[:, :-1])
            for stage in self.stages[:-1]:
                flow = stage.get_module_rref().remote().forward(flow)
            losses.append(self.stages[-1].forward_async(flow, part[:, 1:]))
        return torch.stack([loss.wait() for loss in losses]).mean()

    def parameters(self) -> list[rpc.RRef]:
        return [parameter for stage in self.stages for parameter in stage.remote_parameters()]


def train(pipeline: Pipeline, options: argparse.Namespace) -> list[float]:
    """Return the loss of each step, and at the end the loss of held-out text."""
    text = torch.tensor(list(library_text(options.characters).encode())[: options.characters])
    end = int(len(text) * (1 - HELD_OUT))
    optimizer = DistributedOptimizer(torch.optim.AdamW, pipeline.parameters(), lr=options.lr)
    losses = []
    bar = progress(options.steps, f"{len(pipeline.stages)} stages")
    for _ in bar:
        with dist_autograd.context() as context_id:
            loss = pipeline.loss(batch(text[:end], options), options.micro_batches)
            dist_autograd.backward(context_id, [loss])
            optimizer.clip_grad_norm_(context_id, 1.0)
            optimizer.step(context_id)
        losses.append(loss.item())
        bar.set_postfix(loss=f"{losses[-1]:.2f}", refresh=False)
    with torch.no_grad():
        samples = [batch(text[end:], options) for _ in range(4)]
        held_out = [pipeline.loss(part, options.micro_batches).item() for part in samples]
    return [*losses, sum(held_out) / len(held_out)]


def batch(text: torch.Tensor, options: argparse.Namespace) -> torch.Tensor:
    starts = torch.randint(len(text) - options.context - 1, (options.batch_size, 1))
    return text[starts + torch.arange(options.context + 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=positive, default=150)
    parser.add_argument("--batch-size", type=positive, default=16)
    parser.add_argument("--micro-batches", type=positive, default=4)
    for name, value in {"--layers": 4, "--dim": 64, "--context": 64}.items():
        parser.add_argument(name, type=positive, default=value)
    parser.add_argument("--lr", type=float, default=3e-3)
    add_characters(parser)
    group = mpidist.comm.init()
    options = parse(parser, group.rank, problem_of)
    torch.set_num_threads(1)  # the ranks share the cores
    torch.manual_seed(0)
    rpc.init_rpc(f"worker{group.rank}")
    first = last = held_out = 0.0
    if group.rank == 0:
        pipeline = Pipeline(group.size, options.layers, options.dim, options.context)
        *losses, held_out = train(pipeline, options)
        first, last = losses[0], sum(losses[-10:]) / len(losses[-10:])
        text = f"{group.size} stage(s), {options.steps} steps: loss {first:.2f} -> {last:.2f}"
        print(f"{text}, on other text {held_out:.2f}")
    rpc.shutdown()
    if options.steps >= 100 and last > WANTED * first:
        sys.exit(f"the loss fell from {first:.2f} to {last:.2f} only")


def problem_of(options: argparse.Namespace) -> str | None:
    if options.dim % HEADS:
        return f"--dim {options.dim}: no multiple of {HEADS}, the number of attention heads"
    if options.characters * HELD_OUT < options.context + 2:
        text = f"their last tenth has no room for a sample of {options.context} bytes"
        return f"--characters {options.characters}: {text}"
    return None


if __name__ == "__main__":
    main()
