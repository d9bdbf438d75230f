"""Buffer hooks: location, returned futures, and ranks without inputs."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel.distributed import _BufferCommHookLocation as Location

from mpidist.ddp.module import DistributedDataParallel
from tests.tools.support import agree, raises_on_all

pytestmark = pytest.mark.mpi


class Counting(torch.nn.Module):
    """A module whose forward pass adds 1 to a buffer and uses the buffer."""

    def __init__(self, start):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.register_buffer("count", torch.tensor(float(start)))

    def forward(self, x):
        self.count += 1
        return self.weight * self.count * x


def seen_by(ddp, group, passes=3):
    """Return the buffer's value within and after each pass."""
    found = []
    for _ in range(passes):
        out = ddp(torch.ones(()))
        out.backward()
        found += [float(out), float(ddp.module.count)]
    return found


@pytest.mark.usefixtures("default_group")
@pytest.mark.parametrize("returns", ["nothing", "a future", "futures of torch"])
@pytest.mark.parametrize("location", list(Location), ids=lambda one: one.name)
def test_a_hook_that_sums_takes_the_place_of_the_broadcast(group, location, returns):
    def hook(state, buffers):
        state.append(sorted(buffers))
        if returns == "futures of torch":
            return [
                dist.all_reduce(buffer, async_op=True).get_future() for buffer in buffers.values()
            ]
        work = group.all_reduce(buffers["count"], async_op=True)
        if returns == "a future":
            return work.get_future()
        work.wait()
        return None

    if returns != "nothing" and location is Location.PRE_FORWARD:
        # Such a future is complete only after the forward pass that uses the buffer.
        return
    calls = []
    ddp = DistributedDataParallel(Counting(group.rank), process_group=group)
    ddp._register_buffer_comm_hook(calls, hook, location)
    found = seen_by(ddp, group)
    value, expected = 0.0, []  # rank 0's buffer
    for _ in range(3):
        value = value * group.size if location is Location.PRE_FORWARD else value
        value += 1
        expected.append(value)
        value = value * group.size if location is Location.POST_FORWARD else value
        expected.append(value)
    agree(group, found == expected and calls == [["count"]] * 3, f"{found} and not {expected}")
    # Under no_grad the forward pass waits for the futures, because no backward pass follows.
    with torch.no_grad():
        ddp(torch.ones(()))
    agree(group, float(ddp.module.count) in (value * group.size + 1, (value + 1) * group.size))


def test_the_broadcast_by_a_hook_is_the_default(group):
    names = {}
    for name in ("plain", "hooked"):
        ddp = DistributedDataParallel(Counting(0), process_group=group)
        # Changed after the construction, so that the forward pass synchronizes.
        ddp.module.count.fill_(10.0 * group.rank)
        if name == "hooked":
            ddp._register_buffer_comm_hook(
                ddp,
                lambda ddp, named: ddp._default_broadcast_coalesced(list(named.values())),
                "PRE_FORWARD",
            )
        names[name] = seen_by(ddp, group)
    agree(group, names["plain"] == names["hooked"] == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0], str(names))
    agree(
        group,
        ddp.will_sync_module_buffers()
        and ddp._check_sync_bufs_pre_fwd()
        and not ddp._check_sync_bufs_post_fwd(),
    )
    agree(group, list(ddp.named_module_buffers) == ["count"] and len(ddp.modules_buffers) == 1)
    ddp.broadcast_buffers = False
    agree(group, not ddp.forward_sync_buffers and not ddp.will_sync_module_buffers())


def test_ranks_without_inputs_take_part(group):
    ddp = DistributedDataParallel(Counting(0), process_group=group)
    ddp._register_buffer_comm_hook(
        None, lambda state, named: group.all_reduce(named["count"]) or None, Location.POST_FORWARD
    )
    with ddp.join():
        for _ in range(1 + group.rank):
            ddp(torch.ones(())).backward()
    rows = torch.empty(group.size)
    group.all_gather_into_tensor(rows, ddp.module.count.view(1).clone())
    agree(group, bool((rows == rows[0]).all()), str(rows))


def test_wrong_buffer_hooks_are_refused(group):
    ddp = DistributedDataParallel(Counting(0), process_group=group)
    raises_on_all(
        group, TypeError, lambda: ddp._register_buffer_comm_hook(None, 3), "needs a callable"
    )
    call = lambda: ddp._register_buffer_comm_hook(None, print, "BESIDE")  # noqa: E731
    raises_on_all(group, ValueError, call, "PRE_FORWARD or POST_FORWARD")
    ddp._register_buffer_comm_hook(None, lambda state, named: 3, "PRE_FORWARD")
    raises_on_all(group, TypeError, lambda: ddp(torch.ones(())), "must return None, a future")
