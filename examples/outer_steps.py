"""Outer steps: each rank trains alone on its part of a text, and all average every H steps.

mpirun -n 2 python examples/outer_steps.py
"""

from __future__ import annotations

import argparse

import torch
from command_line import parse, positive
from text_training import Words, library_text, progress

import mpidist.comm
from mpidist.ddp import DiLoCo, bf16_compress_hook

CONTEXT, BATCH = 4, 64


class NextWord(torch.nn.Module):
    """Scores of the word that follows a few others."""

    def __init__(self, words: int, width: int = 32) -> None:
        super().__init__()
        self.tables = torch.nn.Embedding(words, width)
        self.body = torch.nn.Sequential(
            torch.nn.Linear(CONTEXT * width, 128), torch.nn.ReLU(), torch.nn.Linear(128, words)
        )

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.body(self.tables(words).flatten(1))
        return scores


def batch(
    numbers: torch.Tensor, generator: torch.Generator, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``size`` beginnings of CONTEXT words, and the word that follows each."""
    starts = torch.randint(len(numbers) - CONTEXT, (size, 1), generator=generator)
    windows = numbers[starts + torch.arange(CONTEXT + 1)]
    return windows[:, :-1], windows[:, -1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=positive, default=400, help="inner steps of each rank")
    parser.add_argument("--every", type=positive, default=50, help="H, inner steps of a round")
    parser.add_argument("--fragments", type=positive, default=2, help="parts averaged in turn")
    world = mpidist.comm.init()
    options = parse(parser, world.rank)
    torch.manual_seed(0)
    words = Words(library_text(300_000), 500)
    numbers, held_out = words.numbers[:-5000], words.numbers[-5000:]
    model = NextWord(len(words))
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # The only line that makes this training one of several ranks.
    diloco = DiLoCo(
        model, inner, every=options.every, fragments=options.fragments, hook=bf16_compress_hook
    )
    test = batch(held_out, torch.Generator().manual_seed(1), 1000)
    first = float(torch.nn.functional.cross_entropy(model(test[0]), test[1]).detach())
    generator = torch.Generator().manual_seed(100 + world.rank)
    steps = range(options.steps) if world.rank else progress(options.steps, "steps")
    for _ in steps:
        x, y = batch(numbers, generator, BATCH)
        inner.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        inner.step()
    diloco.sync()
    last = float(torch.nn.functional.cross_entropy(model(test[0]), test[1]).detach())
    losses = world.all_gather_object(last)
    if world.rank == 0:
        print(
            f"{world.size} rank(s), {options.steps} steps, averaged every {options.every}: loss on "
            f"other text {first:.2f} -> {last:.2f}"
        )
        if len(set(losses)) > 1:
            raise SystemExit(f"the ranks ended with different models: {losses}")


if __name__ == "__main__":
    main()
