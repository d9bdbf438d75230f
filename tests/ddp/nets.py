"""A net with the cases that once failed, its data, and its training on one or all ranks."""

import torch
from torch.utils.checkpoint import checkpoint

BATCH = 4


class Net(torch.nn.Module):
    """Shared, frozen, double and batch-dependent parameters; ``with_extra`` uses the extra one."""

    def __init__(self, checkpointing=None, with_unused=False):
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(6, 16)
        self.shared = torch.nn.Linear(16, 16)
        self.frozen = torch.nn.Linear(16, 16)
        self.frozen.requires_grad_(False)
        self.conv = torch.nn.Conv2d(1, 2, 3, padding=1).to(memory_format=torch.channels_last)
        self.wide = torch.nn.Linear(32, 3).double()
        self.extra = torch.nn.Linear(6, 3).double() if with_unused else None
        self.register_buffer("seen", torch.zeros(1))
        self.checkpointing = checkpointing

    def body(self, x):
        return torch.tanh(self.shared(torch.tanh(self.shared(x))))

    def forward(self, x, with_extra=False):
        h = torch.tanh(self.first(x))
        h = h + torch.tanh(self.frozen(h))
        h = (
            self.body(h)
            if self.checkpointing is None
            else checkpoint(self.body, h, use_reentrant=self.checkpointing)
        )
        image = self.conv(h.view(-1, 1, 4, 4))
        y = self.wide(image.flatten(1).double())
        if with_extra:
            y = y + self.extra(x.double())
        return {"y": y, "h": h}


def data(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(BATCH, 6, generator=generator), torch.randn(
        BATCH, 3, generator=generator
    ).double()


def loss_of(output, target):
    return (output["y"] - target).square().mean() + output["h"].mean()


def backward(net, rank, step, weight=1.0):
    x, target = data(rank, step)
    (loss_of(net(x), target) * weight).backward()


def sgd(net):
    return torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)


def reference(size, steps, extra_ranks=(), **options):
    """Train in one process on the data of all ranks."""
    net = Net(**options)
    optimizer = sgd(net)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(size):
            x, target = data(rank, step)
            (loss_of(net(x, rank in extra_ranks), target) / size).backward()
        optimizer.step()
    return net


def train(group, ddp, steps, set_to_none=True, extra_ranks=()):
    optimizer = sgd(ddp)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        x, target = data(group.rank, step)
        loss_of(ddp(x, group.rank in extra_ranks), target).backward()
        optimizer.step()
    return ddp.module


def same_everywhere(group, net):
    flat = torch.cat([p.detach().double().flatten() for p in net.parameters()])
    all_flat = torch.empty(group.size * flat.numel(), dtype=flat.dtype)
    group.all_gather_into_tensor(all_flat, flat)
    return all(torch.equal(row, flat) for row in all_flat.view(group.size, -1))


def close(net, expected, tolerance=1e-5):
    return all(
        torch.allclose(a, b, rtol=10 * tolerance, atol=tolerance)
        for a, b in zip(net.parameters(), expected.parameters(), strict=True)
    )
