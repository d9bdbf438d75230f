"""torch.compile inside and outside our DistributedDataParallel: the gradients are those of the model that was not compiled."""

import shutil

import pytest
import torch
from torch.utils._triton import has_triton

from mpidist import ddp as mddp
from tests.integration.training import STEPS, assert_trained, loss, net, reference, sgd, share
from tests.support import missing

pytestmark = pytest.mark.mpi(min_size=2)


# Dynamo takes seconds to start.
@pytest.fixture(
    params=[pytest.param(("cpu", "eager"), marks=pytest.mark.long), pytest.param(("cuda", "inductor"), marks=pytest.mark.gpu)],
    ids=" ".join,
)
def place(request):
    """Where the model is, and torch.compile's backend: on the host the graphs are captured and not translated, to be quick."""
    device, backend = request.param
    if backend == "inductor":
        if not has_triton():
            missing("Triton, which inductor writes its kernels in, is not installed")
        if not any(map(shutil.which, ("cc", "gcc", "clang"))):
            missing("Triton needs a C compiler")
    torch._dynamo.reset()
    yield torch.device(device), backend
    torch._dynamo.reset()


def train(world, device, model):
    update = sgd(model.parameters())
    for step in range(STEPS):
        update.zero_grad()
        x, y = (part.to(device) for part in share(step, world.rank, world.size))
        loss(model(x), y).backward()
        update.step()


def test_compiled_inside(world, group, place):
    device, backend = place
    model = net().to(device)
    train(world, device, mddp.DistributedDataParallel(torch.compile(model, backend=backend), process_group=group))
    assert_trained(world, (weight.cpu() for weight in model.parameters()), reference(world.size))


def test_compiled_outside(world, group, place):
    device, backend = place
    model = mddp.DistributedDataParallel(net().to(device), process_group=group)
    train(world, device, torch.compile(model, backend=backend))
    assert_trained(world, (weight.cpu() for weight in model.parameters()), reference(world.size))
