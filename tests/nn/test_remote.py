"""``remote.execute`` with invalid arguments: refused before the module changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mpidist.rpc as rpc
from mpidist.errors import FrameError, MpidistError
from mpidist.nn import RemoteModule, remote, remote_module
from mpidist.rpc.rref import RRef
from tests.nn.nets import Named, net

pytestmark = pytest.mark.mpi(min_size=1)

WRONG = [None, 1, 1.5, b"1", [1], (1, 2), {1: 1}, torch.ones(1)]
REFUSED = (TypeError, ValueError, RuntimeError)


class Called:
    """A callable that is no function or class."""

    count = 0

    def __call__(self, *args):
        Called.count += 1
        return net()


class OtherReference(RRef):
    pass


@pytest.fixture
def module(workers):
    return remote.execute(remote.CREATE, net, (), {}, "cpu")


@pytest.fixture
def reference(module):
    return RRef(module)


@pytest.mark.parametrize(
    "operation", [*WRONG, "", "__class__", "delete", "Create", type("Text", (str,), {})("forward")]
)
def test_unknown_operations_are_refused(workers, operation):
    with pytest.raises(ValueError, match="an operation of a remote module is one of"):
        remote.execute(operation)


@pytest.mark.parametrize("reference", [*WRONG, "1"])
@pytest.mark.parametrize(
    ("operation", "rest"),
    [
        (remote.FORWARD, ("cpu", False, (), {})),
        (remote.TRAIN, (True,)),
        (remote.PARAMETERS, (True, True)),
        (remote.STATE, ()),
        (remote.LOAD, ({}, {}, False)),
    ],
)
def test_arguments_that_are_no_module_references_are_refused(workers, reference, operation, rest):
    with pytest.raises(TypeError, match="a reference to a module of this worker"):
        remote.execute(operation, reference, *rest)


@pytest.mark.parametrize(
    ("operation", "rest"),
    [
        *[
            (remote.FORWARD, (wrong, False, (), {}))
            for wrong in [*WRONG, "nowhere", "/etc/passwd", "cpu" * 9999]
        ],
        *[(remote.FORWARD, ("cpu", wrong, (), {})) for wrong in [*WRONG, "1"]],
        *[(remote.FORWARD, ("cpu", False, wrong, {})) for wrong in [*WRONG[:5], *WRONG[6:]]],
        *[(remote.FORWARD, ("cpu", False, (), wrong)) for wrong in WRONG],
        *[(remote.TRAIN, (wrong,)) for wrong in WRONG],
        *[(remote.PARAMETERS, (wrong, True)) for wrong in WRONG],
        *[(remote.PARAMETERS, (True, wrong)) for wrong in WRONG],
        *[(remote.LOAD, (wrong, {}, False)) for wrong in WRONG],
        *[(remote.LOAD, ({}, wrong, False)) for wrong in WRONG],
        *[(remote.LOAD, ({}, {"": wrong}, False)) for wrong in WRONG],
        *[(remote.LOAD, ({}, {}, wrong)) for wrong in WRONG],
        (remote.FORWARD, ()),
        (remote.TRAIN, (True, True)),
    ],
)
def test_arguments_of_another_type(reference, module, operation, rest):
    before = repr(module.state_dict()), module.training
    with pytest.raises(REFUSED):
        remote.execute(operation, reference, *rest)
    assert (repr(module.state_dict()), module.training) == before


@pytest.mark.parametrize(
    "rest",
    [
        *[(net, wrong, {}, "cpu") for wrong in [*WRONG[:5], *WRONG[6:]]],
        *[(net, (), wrong, "cpu") for wrong in WRONG],
        *[(net, (), {}, wrong) for wrong in [*WRONG, "nowhere"]],
        *[(wrong, (), {}, "cpu") for wrong in [*WRONG, "tests.nn.nets.net"]],
    ],
)
def test_modules_are_not_made_of_arguments_of_another_type(workers, rest):
    with pytest.raises(REFUSED):
        remote.execute(remote.CREATE, *rest)


class TestLoads:
    def test_a_mark_of_torchs_own_among_the_metadata(self, reference, module):
        """With this key torch would replace the parameters by the tensors of the message."""
        kept = module[0].weight
        values = {"0.weight": torch.zeros(4, 3)}
        remote.execute(
            remote.LOAD,
            reference,
            values,
            {"0": {"assign_to_params_buffers": True, "version": 1}},
            False,
        )
        assert module[0].weight is kept and not kept.any()

    def test_assigned_values_have_memory_for_each_element(self, reference, module):
        remote.execute(remote.LOAD, reference, {"0.weight": torch.zeros(1).expand(4, 3)}, {}, True)
        assert (
            module[0].weight.shape == (4, 3)
            and module[0].weight.untyped_storage().nbytes() >= 4 * 12
        )
        with torch.no_grad():
            module[0].weight[0, 0] = 5
        assert module[0].weight.sum() == 5

    def test_assigned_values_have_no_graph(self, reference, module):
        remote.execute(
            remote.LOAD,
            reference,
            {"1.running_mean": torch.ones(4, requires_grad=True) * 1},
            {},
            True,
        )
        assert not module[1].running_mean.requires_grad

    def test_a_shape_that_is_not_known_yet_is_not_taken_from_an_expanded_value(self, workers):
        reference = RRef(remote.execute(remote.CREATE, nn.LazyLinear, (2,), {}, "cpu"))
        with pytest.raises(ValueError, match="share their memory"):
            remote.execute(
                remote.LOAD, reference, {"weight": torch.zeros(1).expand(2, 1 << 40)}, {}, False
            )
        assert remote.execute(
            remote.LOAD, reference, {"weight": torch.ones(2, 3), "bias": torch.ones(2)}, {}, False
        ) == (
            [],
            [],
            [],
        )

    @pytest.mark.parametrize(
        "value", [1, "text", [torch.ones(4, 3)], torch.ones(3, 4), torch.ones(()), None]
    )
    def test_values_of_another_shape_or_type(self, reference, module, value):
        before = repr(module.state_dict())
        for assign in (False, True):
            *_, errors = remote.execute(remote.LOAD, reference, {"0.weight": value}, {}, assign)
            assert errors and repr(module.state_dict()) == before


class TestWithList:
    @pytest.fixture
    def listed(self, group):
        rpc.init_rpc(
            f"worker{group.rank}", group=group, allowed=["mpidist.nn.remote.execute", net, Named]
        )
        yield
        rpc.shutdown()

    def test_classes_and_instances_that_are_not_in_it(self, listed):
        Called.count = 0
        for made_by in (nn.Linear, Called, Called(), type, "tests.nn.nets.net"):
            with pytest.raises(MpidistError, match="is not in the list"):
                remote.execute(remote.CREATE, made_by, (), {}, "cpu")
        assert not Called.count

    def test_modules_that_were_not_made_for_it(self, listed):
        for operation, rest in [
            (remote.FORWARD, ("cpu", False, (torch.ones(1, 3),), {})),
            (remote.TRAIN, (True,)),
            (remote.PARAMETERS, (True, True)),
            (remote.STATE, ()),
            (remote.LOAD, ({}, {}, False)),
        ]:
            with pytest.raises(
                MpidistError, match=r'"torch.nn.modules.linear.Linear", .* is not in the list'
            ):
                remote.execute(operation, RRef(nn.Linear(3, 3)), *rest)
        assert remote.execute(remote.STATE, RRef(Named(3)))[0]  # its class is in the list
        made = remote.execute(remote.CREATE, net, (), {}, "cpu")
        assert remote.execute(
            remote.FORWARD, RRef(made), "cpu", False, (torch.ones(2, 3),), {}
        ).shape == (2, 2)


class TestHandles:
    def test_what_a_message_of_data_brings_is_checked(self, workers, reference):
        name = workers[0]
        assert isinstance(remote_module.from_data(name, "cpu", reference), RemoteModule)
        other = OtherReference.__new__(OtherReference)
        other.__dict__.update(vars(reference))
        for contents in [
            (),
            (name, "cpu"),
            (name, "cpu", reference, None),
            *[
                (wrong, "cpu", reference)
                for wrong in ["nobody", -1, 1000, True, *WRONG[:1], *WRONG[2:]]
            ],
            *[(name, wrong, reference) for wrong in [*WRONG, "nowhere"]],
            *[(name, "cpu", wrong) for wrong in [*WRONG, "1", other]],
        ]:
            with pytest.raises(FrameError, match="RemoteModule"):
                remote_module.from_data(*contents)
        other.__dict__.clear()
