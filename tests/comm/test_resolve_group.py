"""Resolution of a ``process_group`` argument: a native group, torch's group, or None."""

import pytest
import torch.distributed as dist

from mpidist.comm.group import ProcessGroup
from mpidist.comm.resolve_group import default_group, native_group
from tests.tools.support import agree

pytestmark = pytest.mark.mpi


def test_ours_stays_and_none_is_the_world(group, world):
    assert native_group(group) is group
    assert not dist.is_initialized()
    agree(group, native_group(None) is world and default_group() is world)


def test_torchs_group_is_the_one_it_wraps(default_group, world):
    from mpidist.comm import resolve_group as module

    native = native_group(dist.group.WORLD)
    assert isinstance(native, ProcessGroup) and native is dist.group.WORLD.native
    # After torch's init_process_group, None is torch's default group.
    assert module.default_group() is dist.group.WORLD and native_group(None) is native
    part = dist.new_group()
    agree(world, native_group(part) is part.native and part.native is not native)
    dist.destroy_process_group(part)


@pytest.mark.parametrize("other", ["world", 3, object()], ids=["text", "number", "object"])
def test_another_groups_type_is_named(world, other):
    with pytest.raises(TypeError, match=f"needs a group of mpidist.*got {type(other).__name__}"):
        native_group(other)
