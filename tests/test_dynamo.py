"""Marks for Dynamo: which functions have them, and that no wrapper is added."""

import pytest
import torch

from mpidist.dynamo import untraced


@untraced
class Marked:
    """Has each kind of member that contains a function."""

    def method(self, x):
        return self.called(x)

    @property
    def value(self):
        return self.inner()

    @staticmethod
    def static(x):
        return compiled(x)

    @classmethod
    def of_class(cls, x):
        return compiled(x)

    def called(self, x):
        return compiled(x)

    def inner(self):
        return compiled(torch.ones(2))


@untraced
def function(x):
    return compiled(x)


def compiled(x):
    """Return ``x``, plus twice ``x`` if Dynamo traces this function."""
    return x * 2 if torch.compiler.is_compiling() else x


def test_nothing_that_is_marked_is_traced_nor_what_it_calls():
    torch._dynamo.reset()
    one, x = Marked(), torch.ones(2)
    calls = {
        "method": lambda x: one.method(x),
        "property": lambda x: one.value * x,
        "static": lambda x: Marked.static(x),
        "class": lambda x: Marked.of_class(x),
        "function": lambda x: function(x),
    }
    for name, call in calls.items():

        def summed(x, call=call):
            return call(x * 3).sum() + compiled(x).sum()

        traced = torch.compile(summed, backend="eager")(x)
        assert traced.item() == 6 + 4, name
    with pytest.raises(Exception, match="cannot be traced"):
        torch.compile(lambda x: function(x), backend="eager", fullgraph=True)(x)
    torch._dynamo.reset()


def test_the_calls_that_users_make_are_marked():
    from mpidist.autograd.api import backward
    from mpidist.c10d.process_group import TorchProcessGroup
    from mpidist.comm.execution.work import Work
    from mpidist.comm.group import ProcessGroup
    from mpidist.ddp.reducer import Reducer
    from mpidist.future import Future
    from mpidist.optim.distributed_optimizer import DistributedOptimizer
    from mpidist.rpc.api import remote, rpc_async, rpc_sync
    from mpidist.rpc.rref import RRef
    from mpidist.zero.optimizer import OSS

    groups = (
        TorchProcessGroup.broadcast,
        TorchProcessGroup.split_group,
        ProcessGroup.all_reduce,
        ProcessGroup.isend,
    )
    waits = Work.wait, Future.wait, RRef.to_here
    steps = Reducer.arm, DistributedOptimizer.step, OSS.step, backward
    found = {
        call.__qualname__: getattr(call, "_torchdynamo_disable", False)
        for call in (*groups, *waits, *steps)
    }
    found |= {
        call.__name__: getattr(call, "_torchdynamo_disable", False)
        for call in (remote, rpc_async, rpc_sync)
    }
    assert all(found.values()), found


def test_a_mark_is_no_wrapper():
    def plain():
        return 1

    assert untraced(plain) is plain
    assert plain() == 1
