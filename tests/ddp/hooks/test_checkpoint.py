"""Checkpoints of a hook's state: by rank 0, by every rank, on other numbers of ranks."""

import io
import warnings

import pytest
import torch
import torch.distributed as dist

from mpidist import ddp as mddp
from mpidist.ddp.hooks import checkpoint
from mpidist.ddp.hooks.powersgd_state import PowerSGDState, merged
from mpidist.ddp.module import DistributedDataParallel
from mpidist.errors import MpidistError
from tests.ddp.nets import same_everywhere
from tests.tools.support import agree, raises_on_all

STEPS = 8


def net(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(12, 24), torch.nn.Tanh(), torch.nn.Linear(24, 12), torch.nn.Tanh()
    )


def train(group, ddp, optimizer, steps):
    for step in steps:
        x = torch.randn(4, 12, generator=torch.Generator().manual_seed(100 * step + group.rank))
        optimizer.zero_grad()
        (ddp(x) - x.roll(1, 1)).square().mean().backward()
        optimizer.step()


def sgd(ddp):
    return torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.5)


def mean_error(group, state):
    mean = {name: error.clone() for name, error in state.error_dict.items()}
    for name in sorted(mean):
        group.all_reduce(mean[name], "avg")
    return mean


def same(one, other, tolerance=1e-6):
    return set(one) == set(other) and all(
        torch.allclose(one[name], other[name], atol=tolerance) for name in one
    )


@pytest.fixture
def folder(group, tmp_path_factory):
    """One folder for all ranks."""
    made = [str(tmp_path_factory.mktemp("saved"))] if group.rank == 0 else [None]
    group.broadcast_object_list(made, 0)
    return made[0]


@pytest.mark.mpi
@pytest.mark.usefixtures("default_group")
@pytest.mark.filterwarnings("ignore:a PowerSGD state", "ignore:a loaded PowerSGD state")
@pytest.mark.parametrize(
    "hook",
    [
        mddp.powerSGD_hook,
        mddp.fp16_compress_wrapper(mddp.powerSGD_hook),
        mddp.batched_powerSGD_hook,
    ],
)
def test_rank_0_saves_and_all_rebuild(group, folder, hook):
    """The example of torch's documentation; rank 0's file holds the mean of all errors."""
    ddp = DistributedDataParallel(net(), bucket_cap_mb=0.001)
    state = PowerSGDState(None, 2, start_powerSGD_iter=1, min_compression_rate=1)
    ddp.register_comm_hook(state, hook)
    optimizer = sgd(ddp)
    train(group, ddp, optimizer, range(STEPS))
    expected = mean_error(group, state)
    whole = state.consolidated()
    if group.rank == 0:
        saved = {
            "model": ddp.state_dict(),
            "optimizer": optimizer.state_dict(),
            "hook": hook,
            "hook_state": whole,
        }
        torch.save(saved, f"{folder}/checkpoint.pt")
    dist.barrier()

    with torch.serialization.safe_globals(mddp.SAFE_GLOBALS):
        read = torch.load(f"{folder}/checkpoint.pt", weights_only=True)
    other = DistributedDataParallel(net(seed=5))  # other weights, other buckets
    other.load_state_dict(read["model"])
    its_optimizer = sgd(other)
    its_optimizer.load_state_dict(read["optimizer"])
    loaded = read["hook_state"]
    agree(group, loaded.process_group is dist.group.WORLD and loaded.iter == STEPS)
    agree(group, same(loaded.error_dict, expected), "the file holds another error than the mean")
    agree(group, same(mean_error(group, loaded), expected))
    other.register_comm_hook(loaded, read["hook"])
    train(group, ddp, optimizer, range(STEPS, STEPS + 1))
    train(group, other, its_optimizer, range(STEPS, STEPS + 1))
    agree(group, same_everywhere(group, other.module))
    # Only the mean of the errors enters the average, so that the next step is the same.
    if hook is mddp.powerSGD_hook:
        pairs = zip(ddp.module.parameters(), other.module.parameters(), strict=True)
        agree(group, all(torch.allclose(a, b, atol=1e-5) for a, b in pairs), "another step")


@pytest.mark.mpi
@pytest.mark.parametrize("stop", [1, 2, STEPS])
@pytest.mark.parametrize("hook", [mddp.powerSGD_hook, mddp.batched_powerSGD_hook])
def test_every_rank_saves_and_goes_on_with_the_same_bits(group, folder, stop, hook):
    def build():
        ddp = DistributedDataParallel(net(), process_group=group, bucket_cap_mb=0.001)
        return ddp, sgd(ddp)

    ddp, optimizer = build()
    state = PowerSGDState(group, 2, start_powerSGD_iter=1, min_compression_rate=1)
    ddp.register_comm_hook(state, hook)
    train(group, ddp, optimizer, range(stop))
    checkpoint.save(folder, ddp, state)
    file = io.BytesIO()
    torch.save([ddp.state_dict(), optimizer.state_dict()], file)
    train(group, ddp, optimizer, range(stop, stop + 4))

    file.seek(0)
    weights, momenta = torch.load(file, weights_only=True)
    other, its_optimizer = build()
    other.load_state_dict(weights)
    its_optimizer.load_state_dict(momenta)
    loaded = checkpoint.load(folder, other)
    # A file from elsewhere cannot name a class or function of mpidist.
    assert not set(mddp.SAFE_GLOBALS) & set(torch.serialization.get_safe_globals())
    other.register_comm_hook(loaded, hook)
    train(group, other, its_optimizer, range(stop, stop + 4))
    agree(group, other.bucket_plan() == ddp.bucket_plan(), "other buckets")
    pairs = zip(ddp.module.parameters(), other.module.parameters(), strict=True)
    agree(group, all(torch.equal(a, b) for a, b in pairs), "other weights")
    agree(
        group,
        same(loaded.error_dict, state.error_dict, 0)
        and same(loaded.q_memory_dict, state.q_memory_dict, 0),
    )


@pytest.mark.mpi(min_size=2)
def test_another_number_of_ranks_keeps_the_mean_error(group, world, folder):
    ddp = DistributedDataParallel(net(), process_group=group)
    state = PowerSGDState(group, 2, start_powerSGD_iter=0, min_compression_rate=1)
    ddp.register_comm_hook(state, mddp.powerSGD_hook)
    train(group, ddp, sgd(ddp), range(STEPS))
    expected = mean_error(group, state)
    checkpoint.save(folder, ddp, state)
    fewer = group.new_group(range(group.size - 1), "fewer") if group.rank < group.size - 1 else None
    if fewer is not None:
        other = DistributedDataParallel(net(), process_group=fewer, bucket_cap_mb=0.001)
        loaded = checkpoint.load(folder, other)
        agree(
            fewer,
            loaded.iter == STEPS and same(mean_error(fewer, loaded), expected),
            "the mean error changed",
        )
        other.register_comm_hook(loaded, mddp.powerSGD_hook)
        train(fewer, other, sgd(other), range(2))
        agree(fewer, same_everywhere(fewer, other.module))
        more = checkpoint.save(folder, other, loaded)
        agree(fewer, more.exists())
        fewer.close()
    world.barrier()
    back = checkpoint.load(folder, ddp)  # on more ranks than saved
    gathered = group.all_gather_object(back.error_dict)
    agree(group, all(same(errors, gathered[0], 0) for errors in gathered))


@pytest.mark.mpi
def test_missing_damaged_and_foreign_files_are_refused_on_all_ranks(group, folder):
    ddp = DistributedDataParallel(net(), process_group=group)
    raises_on_all(
        group, FileNotFoundError, lambda: checkpoint.load(folder, ddp), "one run; found those of 0"
    )
    state = PowerSGDState(group, 2)
    path = checkpoint.save(folder, ddp, state)
    other = DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group)
    raises_on_all(
        group,
        ValueError,
        lambda: checkpoint.load(folder, other),
        "each parameter of this module once",
    )
    if group.rank == group.size - 1:
        path.write_bytes(b"damaged")
    group.barrier()
    caught = None
    try:
        checkpoint.load(folder, ddp)
    except (ValueError, MpidistError) as error:
        caught = error
    expected = ValueError if group.rank == group.size - 1 else MpidistError
    agree(
        group,
        isinstance(caught, expected)
        and f"powersgd-{group.size - 1}-of-{group.size}.pt is no" in str(caught),
        repr(caught),
    )
    if group.rank == group.size - 1:
        path.rename(path.with_name(f"powersgd-{group.size}-of-{group.size + 1}.pt"))
    group.barrier()
    raises_on_all(group, FileNotFoundError, lambda: checkpoint.load(folder, ddp))


@pytest.mark.mpi
def test_a_state_of_another_module_is_refused(group):
    state = PowerSGDState(group, 2, start_powerSGD_iter=0, min_compression_rate=1)
    state.error_dict["0.weight"] = torch.zeros(3, 3)
    ddp = DistributedDataParallel(net(), process_group=group)
    ddp.register_comm_hook(state, mddp.powerSGD_hook)
    raises_on_all(
        group, ValueError, lambda: train(group, ddp, sgd(ddp), range(1)), "it is of another module"
    )


def test_merged_states_hold_the_mean_error():
    states = [PowerSGDState("group", 2) for _ in range(3)]
    for rank, state in enumerate(states):
        state.iter = 4
        state.error_dict["a"] = torch.full((2, 2), float(rank))
    states[0].error_dict["b"] = torch.full((2,), 3.0)
    mean = merged(states)
    assert torch.equal(mean.error_dict["a"], torch.ones(2, 2)) and torch.equal(
        mean.error_dict["b"], torch.ones(2)
    )
    assert mean.iter == 4 and torch.equal(states[0].error_dict["a"], torch.zeros(2, 2))
    states[1].iter = 5
    with pytest.raises(ValueError, match="different steps"):
        merged(states)
    with pytest.raises(ValueError, match="no PowerSGD state"):
        merged([])


def test_hooks_are_saved_and_loaded_by_name():
    hooks = [
        mddp.allreduce_hook,
        mddp.fp16_compress_hook,
        mddp.bf16_compress_hook,
        mddp.noop_hook,
        mddp.powerSGD_hook,
        mddp.batched_powerSGD_hook,
        mddp.bf16_compress_wrapper(mddp.fp16_compress_wrapper(mddp.allreduce_hook)),
    ]
    file = io.BytesIO()
    torch.save(hooks, file)
    file.seek(0)
    with torch.serialization.safe_globals(mddp.SAFE_GLOBALS):
        again = torch.load(file, weights_only=True)
    assert again[:-1] == hooks[:-1]
    assert (again[-1].dtype, again[-1].hook.dtype, again[-1].hook.hook) == (
        torch.bfloat16,
        torch.float16,
        mddp.allreduce_hook,
    )


def test_a_state_warns_that_its_group_stays_behind():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        file = io.BytesIO()
        torch.save(PowerSGDState("a group", 3, random_seed=7), file)
        file.seek(0)
        with torch.serialization.safe_globals(mddp.SAFE_GLOBALS):
            again = torch.load(file, weights_only=True)
    assert [str(w.message).count("process group") for w in caught] == [1, 1]
    assert again.process_group is None and (again.matrix_approximation_rank, again.random_seed) == (
        3,
        7,
    )
