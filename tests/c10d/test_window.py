"""torch's names for windows: ``_new_window`` and an object with the methods of torch's Window."""

import inspect
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from mpidist.c10d.native import native_of
from mpidist.errors import CommTimeout, MpidistError
from tests.tools.support import agree, raises_on_all

of_214 = pytest.mark.skipif(not hasattr(c10d, "Window"), reason="torch has windows from 2.14 on")
pytestmark = pytest.mark.usefixtures("default_group")


@of_214
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("is_mapped", [True, False], ids=["mapped", "plain"])
def test_torch_s_names_work(world, default_group, is_mapped):
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    assert dist._supports_window() and default_group.supports_window
    native = native_of(default_group)
    own = native.allocate(10, torch.float32).zero_() if is_mapped else torch.zeros(10)
    window = dist._new_window(own)
    works = [
        window.put(torch.full((3,), 2.0), right, 4, False),
        window.put(torch.full((1,), 3.0), right, 9, async_op=True, opts=c10d.PutOptions()),
        window.signal(right, False),
        window.signal(right, async_op=True),
        window.wait_signal(left, False),
        window.wait_signal(left, True, c10d.WaitSignalOptions()),
    ]
    ok = all(isinstance(work, dist.Work) and work.wait() and work.is_success() for work in works)
    ok = ok and works[-1].get_future().wait() == [] and works[1].get_future().wait() == []
    ok = ok and own.tolist() == [0, 0, 0, 0, 2, 2, 2, 0, 0, 3]
    access = window.get_attr(right)
    ok = ok and isinstance(access, c10d.WindowAttr)
    kinds = c10d.WindowAccessType
    if is_mapped and native.is_single_node:
        ok = ok and access.access_type == kinds.UNIFIED
        ok = ok and window.map_remote_tensor(right)[4].item() == 2
    else:
        ok = ok and access.access_type == kinds.SEPARATE
        with pytest.raises(RuntimeError, match="map_remote_tensor"):
            window.map_remote_tensor(right)
    options = c10d.WaitSignalOptions()
    options.timeout = timedelta(seconds=0.05)
    raises_on_all(world, CommTimeout, lambda: window.wait_signal(left, False, options), "0.05")
    window.tensor_deregister()
    later = default_group.new_window()
    raises_on_all(world, MpidistError, lambda: later.put(torch.ones(1), right, 0, False))
    later.tensor_register(torch.zeros(2), owning=False)
    later.put(torch.ones(2), right, 0, False)
    later.tensor_deregister()
    agree(world, ok)


@of_214
@pytest.mark.mpi(min_size=1)
def test_the_window_has_the_methods_and_arguments_of_torch_s():
    from mpidist.c10d.window import TorchWindow

    for name, member in vars(c10d.Window).items():
        if name.startswith("_"):
            continue
        signature = member.__doc__.split("(", 1)[1].rsplit(" ->", 1)[0]
        for argument in inspect.signature(getattr(TorchWindow, name)).parameters:
            assert f"{argument}:" in signature or argument == "self", (name, argument)


@pytest.mark.mpi(min_size=2)
def test_every_version_of_torch_has_the_native_window(world, default_group):
    native = native_of(default_group)
    right = (world.rank + 1) % world.size
    window = native.window(size=3)
    window.put(torch.ones(3), right)
    native.barrier()
    agree(world, window.tensor.tolist() == [1, 1, 1])
    window.tensor_deregister()
