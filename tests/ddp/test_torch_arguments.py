"""torch's arguments: their effect, their refusal, and its error on all ranks."""

import inspect
import warnings

import pytest
import torch
from torch.torch_version import TorchVersion

from mpidist.ddp import torch_arguments
from mpidist.ddp.module import DistributedDataParallel
from mpidist.errors import DisagreementError
from tests.tools.support import agree, raises_on_all


def test_every_argument_of_torch_is_accepted():
    theirs = inspect.signature(torch.nn.parallel.DistributedDataParallel.__init__).parameters
    ours = inspect.signature(DistributedDataParallel.__init__).parameters
    assert set(theirs) <= set(ours), set(theirs) - set(ours)
    places = [name for name, p in ours.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert places[: len(theirs)] == list(theirs), "arguments given by place must mean the same"
    differing = {name for name, p in theirs.items() if p.default != ours[name].default}
    # Before torch 2.13 the second default was True.
    assert differing <= {"gradient_as_bucket_view", "broadcast_buffers"}


REFUSED = {
    "two devices": ({"device_ids": [0, 1]}, "one rank, one device"),
    "a device for the CPU": ({"device_ids": [0]}, "leave them out"),
    "an output device": ({"output_device": 0}, "leave them out"),
    "mixed precision": ({"mixed_precision": object()}, "torch.autocast"),
    "delayed": (
        {"delay_all_reduce_named_params": [], "param_to_hook_all_reduce": None},
        "bucket_cap_mb_list",
    ),
    "no bytes": ({"bucket_cap_mb": 0}, "must be positive"),
    "no buckets": ({"most_buckets": 0}, "at least 1"),
    "negative": ({"bucket_cap_mb_list": [1, -1]}, "must be positive"),
}


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("arguments", "match"),
    [({"bucket_cap_mb": "25"}, "a number of MiB"), ({"device_mesh": 3}, "DeviceMesh; got int")],
)
def test_arguments_of_another_type_are_refused_on_all_ranks(group, arguments, match):
    options = arguments if "device_mesh" in arguments else {"process_group": group, **arguments}
    raises_on_all(
        group, TypeError, lambda: DistributedDataParallel(torch.nn.Linear(2, 2), **options), match
    )


@pytest.mark.mpi
@pytest.mark.parametrize("name", REFUSED)
def test_values_that_cannot_work_are_refused_on_all_ranks(group, name):
    arguments, match = REFUSED[name]
    raises_on_all(
        group,
        ValueError,
        lambda: DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group, **arguments),
        match,
    )


MODULES = {
    "lazy": (lambda: torch.nn.LazyLinear(2), "no shape yet"),
    "two types of device": (
        lambda: torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1, device="meta")),
        "one type",
    ),
}


@pytest.mark.mpi
@pytest.mark.parametrize("name", MODULES)
def test_modules_that_cannot_be_averaged_are_refused_on_all_ranks(group, name):
    make, match = MODULES[name]
    raises_on_all(
        group, ValueError, lambda: DistributedDataParallel(make(), process_group=group), match
    )


@pytest.mark.mpi
def test_a_refusal_on_one_rank_reaches_all(group):
    last = group.size - 1
    caught = None
    try:
        DistributedDataParallel(
            torch.nn.Linear(2, 2),
            process_group=group,
            bucket_cap_mb=-1 if group.rank == last else None,
        )
    except (ValueError, DisagreementError) as error:
        caught = error
    expected = ValueError if group.rank == last else DisagreementError
    agree(group, isinstance(caught, expected) and "must be positive" in str(caught), repr(caught))


@pytest.mark.mpi
def test_sparse_gradients_of_a_users_own_are_refused(group):
    class Sparse(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Parameter(torch.zeros(4, 2))

        def forward(self, chosen):
            return torch.nn.functional.embedding(chosen, self.table, sparse=True)

    for view in (True, False):
        ddp = DistributedDataParallel(Sparse(), process_group=group, gradient_as_bucket_view=view)
        raises_on_all(
            group, RuntimeError, lambda ddp=ddp: ddp(torch.tensor([1])).sum().backward(), "sparse"
        )


@pytest.mark.mpi
def test_torchs_arguments_by_place_have_torchs_meaning(group):
    with warnings.catch_warnings(record=True) as warned_of:
        warnings.simplefilter("always")
        ddp = DistributedDataParallel(
            torch.nn.Linear(2, 2),
            [],
            None,
            0,
            True,
            True,
            group,
            1,
            False,
            True,
            False,
            batched_grad_copy=True,
            lazy_bucket_allocation=True,
        )
    texts = [str(w.message) for w in warned_of]
    agree(group, any("check_reduction" in text for text in texts), str(texts))
    agree(group, any("lazy_bucket_allocation has no effect" in text for text in texts), str(texts))
    agree(
        group,
        ddp.device_ids is None
        and ddp.broadcast_buffers
        and not ddp.settings.gradient_as_bucket_view,
    )


@pytest.mark.parametrize(
    ("broadcast", "forward", "expected"),
    [
        (None, None, (True, True)),
        (True, None, (True, True)),
        (False, None, (False, False)),
        (None, False, (True, False)),
        (False, True, (True, True)),
        (True, False, (True, False)),
    ],
)
def test_when_buffers_are_synchronised(broadcast, forward, expected):
    assert torch_arguments.buffer_syncing(broadcast, forward) == expected


class Counting(torch.nn.Module):
    def __init__(self, start):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.register_buffer("seen", torch.tensor([float(start)]))
        self.register_buffer("own", torch.tensor([float(start)]))

    def forward(self, x):
        self.seen += 1
        return self.linear(x)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "rank 0"),
        ({"forward_sync_buffers": False}, "init"),
        ({"broadcast_buffers": False}, "own"),
    ],
)
def test_buffers_are_broadcast_as_the_options_say(group, options, expected):
    module = Counting(10 * group.rank)
    module._ddp_params_and_buffers_to_ignore = ["own"]
    ddp = DistributedDataParallel(module, process_group=group, **options)
    for _ in range(2):
        ddp(torch.ones(1, 2)).sum().backward()
        module.seen += group.rank  # differs between ranks
    drift = {"rank 0": group.rank, "init": 2 * group.rank, "own": 12 * group.rank}[expected]
    agree(group, float(module.seen) == 2 + drift, f"{module.seen}")
    agree(group, float(module.own) == 10 * group.rank, "an ignored buffer was touched")


@pytest.mark.mpi
def test_buffers_are_broadcast_before_the_first_evaluation(group):
    module = Counting(0)
    ddp = DistributedDataParallel(module, process_group=group)
    ddp(torch.ones(1, 2)).sum().backward()
    module.seen += group.rank
    with torch.no_grad():
        ddp(torch.ones(1, 2))
        agree(group, float(module.seen) == 2, f"{module.seen}")
        module.seen += group.rank
        ddp(torch.ones(1, 2))
    agree(group, float(module.seen) == 3 + group.rank, "the second evaluation communicates no more")


@pytest.mark.mpi
def test_ignored_parameters_are_each_ranks_own(group):
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    torch.nn.init.constant_(module[1].bias, float(group.rank))
    module._ddp_params_and_buffers_to_ignore = ["1.bias"]
    ddp = DistributedDataParallel(module, process_group=group)
    (ddp(torch.ones(1, 2)) * (group.rank + 1)).sum().backward()
    agree(
        group,
        bool((module[1].bias == group.rank).all())
        and bool((module[1].bias.grad == group.rank + 1).all()),
    )
    agree(group, bool((module[1].weight.grad[0] == module[1].weight.grad[1]).all()))


@pytest.mark.mpi
@pytest.mark.usefixtures("default_group")
def test_a_mesh_or_one_of_torchs_groups_names_the_ranks(group):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (group.size,), mesh_dim_names=("dp",))
    for arguments in ({"device_mesh": mesh}, {"process_group": mesh.get_group()}, {}):
        ddp = DistributedDataParallel(torch.nn.Linear(1, 1), **arguments)
        (ddp(torch.ones(1, 1)) * (group.rank + 1)).sum().backward()
        mean = (group.size + 1) / 2
        agree(group, float(ddp.module.bias.grad) == mean, str(ddp.module.bias.grad))
    both = {"device_mesh": mesh, "process_group": mesh.get_group()}
    # torch's class and text.
    wanted = "Cannot specify both process_group and device_mesh arguments."
    raises_on_all(
        group, RuntimeError, lambda: DistributedDataParallel(torch.nn.Linear(1, 1), **both), wanted
    )
    wide = {"device_mesh": init_device_mesh("cpu", (1, group.size))}
    raises_on_all(
        group,
        RuntimeError,
        lambda: DistributedDataParallel(torch.nn.Linear(1, 1), **wide),
        "Only 1D device mesh is supported,",
    )


@pytest.mark.mpi
def test_another_backends_group_is_refused(group):
    raises_on_all(
        group,
        TypeError,
        lambda: DistributedDataParallel(torch.nn.Linear(1, 1), process_group=object()),
        "needs a group",
    )


@pytest.mark.mpi
def test_a_module_with_nothing_to_average_is_refused_on_all_ranks(group):
    """As in torch; if one rank alone has no such parameter, the others raise, too."""
    frozen = torch.nn.Linear(1, 1).requires_grad_(False)
    call = lambda: DistributedDataParallel(frozen, process_group=group)  # noqa: E731
    raises_on_all(group, RuntimeError, call, "a parameter that requires a gradient")
    module = frozen if group.rank == 0 else torch.nn.Linear(1, 1)
    raises_on_all(
        group,
        RuntimeError,
        lambda: DistributedDataParallel(module, process_group=group),
        "a parameter that requires a gradient",
    )


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"bucket_cap_mb": float("inf")}, ValueError, "must be finite"),
        ({"bucket_cap_mb": float("nan")}, ValueError, "must be finite"),
        ({"bucket_cap_mb": True}, TypeError, "number of MiB; got bool"),
        ({"bucket_cap_mb_list": 5}, TypeError, "bucket_cap_mb_list must be a list"),
        ({"most_buckets": 1.5}, TypeError, "number of buckets must be an int; got 1.5"),
        ({"most_buckets": True}, TypeError, "number of buckets must be an int"),
    ],
)
def test_numbers_that_are_no_sizes_are_refused_on_all_ranks(group, options, error, match):
    def call():
        DistributedDataParallel(torch.nn.Linear(1, 1), process_group=group, **options)

    raises_on_all(group, error, call, match)


@pytest.mark.mpi
def test_broadcast_buffers_is_deprecated_where_it_is_in_torch(group):
    def warned(**options) -> bool:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            DistributedDataParallel(torch.nn.Linear(3, 2), process_group=group, **options)
        return any(
            issubclass(w.category, FutureWarning) and "broadcast_buffers" in str(w.message)
            for w in caught
        )

    is_deprecated = TorchVersion(torch.__version__) >= "2.13"
    agree(group, warned(broadcast_buffers=True) is is_deprecated)
    agree(group, not warned() and not warned(forward_sync_buffers=False))


def test_which_modules_communicate_in_the_backward_pass():
    class Own(torch.nn.Linear):
        communicates_in_backward = True

    class Refusing(torch.nn.Linear):
        communicates_in_backward = False

    for part, expected in (
        (torch.nn.BatchNorm1d(2), False),
        (torch.nn.SyncBatchNorm(2), True),
        (Own(2, 2), True),
        (Refusing(2, 2), False),
    ):
        module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(part))
        assert torch_arguments.communicates_in_backward(module) is expected, part
