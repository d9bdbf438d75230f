"""Module of a model's description, its data, and its training in one process as the reference.

Letters: W ranks.
"""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from tests.fuzz.models import Model, Pass

BATCH = 3
WORDS = 5  # embeddings
LEARNING_RATE = 0.05

Gradients = dict[str, torch.Tensor | None]


class Net(torch.nn.Module):
    """Blocks of a model in sequence, in fp64 except for blocks of kind "single"."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(model.seed)
        self.blocks = torch.nn.ModuleList(
            [_Part(block.kind, model.width, generator) for block in model.blocks]
        )
        for place, block in enumerate(model.blocks):
            if block.kind == "shared":
                self.blocks[place] = self.blocks[block.of]
        self.described = model.blocks

    def forward(self, x: torch.Tensor, words: torch.Tensor, uses: bool) -> torch.Tensor:
        h = x
        for block, part in zip(self.described, self.blocks, strict=True):
            if block.kind == "unused" or (block.kind == "sometimes" and not uses):
                continue
            if block.checkpoint:
                h = checkpoint(part, h, words, use_reentrant=block.checkpoint == "reentrant")
            else:
                h = part(h, words)
        return h


class _Part(torch.nn.Module):
    def __init__(self, kind: str, width: int, generator: torch.Generator) -> None:
        super().__init__()
        self.kind = kind

        def new(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
            return torch.randn(*shape, dtype=dtype, generator=generator) * 0.5

        if kind in ("linear", "frozen", "unused", "sometimes"):
            self.weight = torch.nn.Parameter(new(width, width), requires_grad=kind != "frozen")
            self.bias = torch.nn.Parameter(new(width), requires_grad=kind != "frozen")
        elif kind == "transposed":
            self.weight = torch.nn.Parameter(new(width, width).t())
        elif kind == "scalar":
            self.weight = torch.nn.Parameter(new(1).squeeze())
        elif kind == "one":
            self.weight = torch.nn.Parameter(new(4)[::4])
        elif kind == "empty":
            self.weight = torch.nn.Parameter(new(0))
        elif kind == "conv":
            self.weight = torch.nn.Parameter(
                new(2, 1, 1, 3).contiguous(memory_format=torch.channels_last)
            )
        elif kind == "norm":
            self.weight, self.bias = (
                torch.nn.Parameter(1 + new(width)),
                torch.nn.Parameter(new(width)),
            )
        elif kind == "complex":
            self.weight = torch.nn.Parameter(new(width, dtype=torch.complex128))
        elif kind == "single":
            self.weight = torch.nn.Parameter(new(width, dtype=torch.float32))
        elif kind in ("embedding", "sparse"):
            self.table = torch.nn.Embedding(
                WORDS, width, sparse=kind == "sparse", _weight=new(WORDS, width)
            )
        elif kind == "counter":
            self.register_buffer("passes", torch.zeros(()))

    def forward(self, h: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        kind = self.kind
        if kind in ("linear", "frozen", "unused", "sometimes"):
            return torch.tanh(torch.nn.functional.linear(h, self.weight, self.bias))
        if kind == "transposed":
            return h + torch.tanh(h @ self.weight)
        if kind in ("scalar", "one"):
            return h * self.weight
        if kind == "empty":
            return h + self.weight.sum()
        if kind == "conv":
            image = torch.nn.functional.conv2d(
                h.view(len(h), 1, 1, -1), self.weight, padding=(0, 1)
            )
            return torch.tanh(image).sum((1, 2))
        if kind == "norm":
            return torch.nn.functional.layer_norm(h, h.shape[1:], self.weight, self.bias)
        if kind == "complex":
            return h + (h * self.weight * (1 + 2j)).real
        if kind == "single":
            return h + self.weight.double()
        if kind in ("embedding", "sparse"):
            return h + self.table(words)
        self.passes += 1
        return h


def loss_of(net: torch.nn.Module, model: Model, rank: int, number: int, uses: bool) -> torch.Tensor:
    """Return the loss of a rank's batch ``number``."""
    generator = torch.Generator().manual_seed((model.seed * 1000 + rank) * 1000 + number)
    x = torch.randn(BATCH, model.width, dtype=torch.float64, generator=generator)
    target = torch.randn(BATCH, model.width, dtype=torch.float64, generator=generator)
    words = torch.randint(WORDS, (BATCH,), generator=generator)
    return (net(x, words, uses) * target).sum()


def numbers_of(place: int, micro: int) -> int:
    """Return the batch number of a pass's ``micro``-th batch."""
    return place * 10 + micro


def lossy(hook: str) -> float:
    """Return a hook's relative error."""
    if "fp16" in hook:
        return 1e-2
    if "bf16" in hook:
        return 5e-2
    return 1e-6 if hook == "powersgd" else 0.0


class Reference:
    """Training of W ranks in one process: one net, and gradients by rank.

    Attributes:
        error: Allowed relative error so far.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self.net = Net(model)
        self._parameters = {name: p for name, p in self.net.named_parameters() if p.requires_grad}
        self.gradients: list[Gradients] = [
            dict.fromkeys(self._parameters) for _ in range(model.size)
        ]
        self.error = 1e-6 if any(block.kind == "single" for block in model.blocks) else 1e-9
        self._hook = ""

    def add(self, rank: int, number: int, uses: bool) -> None:
        """Add the gradients of one batch to a rank's gradients."""
        own = self.gradients[rank]
        loss = loss_of(self.net, self._model, rank, number, uses)
        self.net.zero_grad()
        loss.backward()
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                grad = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                before = own[name]
                own[name] = grad.clone() if before is None else before + grad

    def average(self, ranks: list[int], divisor: int) -> None:
        """Average the gradients of the ranks that have inputs."""
        for name, parameter in self._parameters.items():
            gradients = [self.gradients[rank][name] for rank in ranks]
            present = [gradient for gradient in gradients if gradient is not None]
            if not present:
                continue
            total = torch.zeros_like(parameter, requires_grad=False)
            for gradient in present:
                total += gradient
            for rank in ranks:
                self.gradients[rank][name] = total / divisor
        self.error += lossy(self._hook)

    def take_hook(self, hook: str) -> None:
        """Record the registration of a hook."""
        self._hook = hook or self._hook

    def step(self, rank: int) -> None:
        """Step the optimizer with a rank's gradients."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                gradient = self.gradients[rank][name]
                if gradient is not None:
                    parameter -= LEARNING_RATE * gradient

    def zero(self, rank: int) -> None:
        """Run zero_grad on a rank."""
        own = self.gradients[rank]
        for name, gradient in own.items():
            own[name] = (
                None if self._model.set_to_none or gradient is None else torch.zeros_like(gradient)
            )

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return the values of the trained parameters."""
        return self._parameters

    def pass_of(self, place: int, step: Pass) -> None:
        """Run one pass on all ranks, up to the averaged gradients."""
        ranks = list(range(self._model.size))
        for rank in ranks:
            for micro in range(step.micro + step.forwards):
                self.add(rank, numbers_of(place, micro), step.uses[rank])
        self.average(ranks, len(ranks))
