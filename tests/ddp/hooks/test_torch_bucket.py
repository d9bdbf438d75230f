"""Every hook of ours on torch's DistributedDataParallel, compared with the same hook on ours."""

from __future__ import annotations

import inspect
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import mpidist.ddp as ours
from mpidist.ddp.hooks import default
from mpidist.ddp.hooks.registry import DDPCommHookType, register_ddp_comm_hook
from mpidist.ddp.module import DistributedDataParallel
from mpidist.optim import OSS, ZeroRedundancyOptimizer, hook_with_zero_step
from tests.tools.support import agree, raises_on_all

pytestmark = [
    pytest.mark.mpi(min_size=1),
    pytest.mark.usefixtures("default_group", "device", "in_thread"),
]

STEPS = 4


@pytest.fixture(params=[False, True], ids=["on one node", "between nodes"])
def in_thread(request, group, monkeypatch):
    """Between nodes hooks reduce on the group's thread."""
    monkeypatch.setattr(type(group), "is_single_node", not request.param)


def net():
    """Return a module with a parameter in channels_last, and gradients of several sizes."""
    torch.manual_seed(2)
    return torch.nn.Sequential(
        torch.nn.Conv2d(2, 8, 3, padding=1).to(memory_format=torch.channels_last),
        torch.nn.Flatten(),
        torch.nn.Linear(8 * 9, 24),
        torch.nn.Tanh(),
        torch.nn.Linear(24, 3),
    )


def wrapped(kind):
    return kind(net(), bucket_cap_mb=0.004)


def backward(ddp, step):
    source = torch.Generator().manual_seed(100 * step + dist.get_rank())
    ddp(torch.randn(5, 2, 3, 3, generator=source)).square().mean().backward()


def gradients(ddp, steps=STEPS):
    found = []
    for step in range(steps):
        ddp.zero_grad()
        backward(ddp, step)
        found += [parameter.grad.clone() for parameter in ddp.parameters()]
    return found


# Of each hook: how far it may be from itself on our module. Scales of whole buckets differ, because
# torch's buckets hold other gradients.
HOOKS = {
    "allreduce": (ours.allreduce_hook, 1e-6),
    "fp16": (ours.fp16_compress_hook, 1e-6),
    "bf16": (ours.bf16_compress_hook, 1e-6),
    "noop": (ours.noop_hook, 1e-6),
    "per tensor": (ours.quantization_pertensor_hook, 0.02),
    "per channel": (ours.quantization_perchannel_hook, 0.02),
    "fp16 around allreduce": (ours.fp16_compress_wrapper(ours.allreduce_hook), 1e-6),
    "bf16 around per tensor": (ours.bf16_compress_wrapper(ours.quantization_pertensor_hook), 0.04),
}


def test_the_gradients_are_those_of_our_module(group):
    wrong = []
    for name, (hook, tolerance) in HOOKS.items():
        found = []
        for kind in (TorchDDP, DistributedDataParallel):
            ddp = wrapped(kind)
            ddp.register_comm_hook(None, hook)
            found.append(gradients(ddp))
        wrong += [
            f"{name}: gradient {place}"
            for place, (one, other) in enumerate(zip(*found, strict=True))
            if not torch.allclose(one, other, atol=tolerance * float(other.abs().max()) + 1e-7)
        ]
    agree(group, not wrong, str(wrong))


@pytest.mark.parametrize("batched", [False, True])
def test_powersgd_learns_what_it_left_out(group, batched):
    """Ranks agree, errors are kept by parameter over rebuilt buckets, and training goes on."""
    hook = ours.batched_powerSGD_hook if batched else ours.powerSGD_hook
    state = ours.PowerSGDState(None, 2, start_powerSGD_iter=1, min_compression_rate=1)
    ddp = wrapped(TorchDDP)
    ddp.register_comm_hook(state, hook)
    first = {}
    for step in range(6):
        ddp.zero_grad()
        backward(ddp, step)
        first = first or dict.fromkeys(state.error_dict)
    flat = torch.cat([parameter.grad.flatten() for parameter in ddp.parameters()])
    rows = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, flat)
    agree(group, all(torch.equal(row, flat) for row in rows), "ranks differ")
    agree(group, state.iter == 6 and state.compression_stats()[0] > 1, str(state.iter))
    shapes = sorted(tuple(error.shape) for error in state.error_dict.values())
    wanted = sorted(tuple(p.shape) for p in ddp.parameters() if batched or p.dim() > 1)
    agree(group, first.keys() == state.error_dict.keys(), f"{list(first)}")
    agree(group, shapes == wanted, f"{shapes} and not {wanted}")


def test_powersgd_of_full_rank_averages(group):
    """At full rank the approximation is the gradient: nothing may be left out, or misplaced."""
    state = ours.PowerSGDState(
        None, 72, start_powerSGD_iter=0, min_compression_rate=1e-3, warm_start=False
    )
    ddp, plain = wrapped(TorchDDP), wrapped(TorchDDP)
    ddp.register_comm_hook(state, ours.powerSGD_hook)
    pairs = zip(gradients(ddp), gradients(plain), strict=True)
    wrong = [
        place
        for place, (one, other) in enumerate(pairs)
        if not torch.allclose(one, other, atol=1e-4 * float(other.abs().max()))
    ]
    agree(group, not wrong and len(state.error_dict) == 3, f"{wrong} {list(state.error_dict)}")


@pytest.mark.parametrize(
    "hook",
    [ours.bf16_compress_hook, ours.fp16_compress_wrapper(ours.allreduce_hook), None],
    ids=["bf16", "fp16 around allreduce", "allreduce to owners"],
)
@pytest.mark.parametrize("completes", [False, True])
def test_steps_within_the_backward_pass(group, hook, completes):
    plain, sharded = wrapped(TorchDDP), wrapped(TorchDDP)
    its = torch.optim.Adam(plain.parameters(), lr=0.01)
    if completes:
        oss = ZeroRedundancyOptimizer(
            sharded.parameters(), torch.optim.Adam, overlap_with_ddp=True, lr=0.01
        )
    else:
        oss = OSS(sharded.parameters(), torch.optim.Adam, lr=0.01)
    inner = ours.to_owners(oss.bounds()) if hook is None else hook
    plain.register_comm_hook(None, hook or ours.allreduce_hook)
    stepping = hook_with_zero_step(inner, sharded, oss) if completes else oss.stepping_hook(inner)
    sharded.register_comm_hook(None, stepping)
    for step in range(STEPS):
        for ddp, optimizer in ((plain, its), (sharded, oss)):
            ddp.zero_grad()
            backward(ddp, step)
            if ddp is plain or not completes:
                optimizer.step()
    wrong = [
        name
        for (name, one), other in zip(plain.named_parameters(), sharded.parameters(), strict=True)
        if not torch.allclose(one, other, atol=1e-6)
    ]
    agree(group, not wrong, f"{wrong}")


def test_the_registry_takes_torchs_module(group):
    plain = gradients(wrapped(TorchDDP), 2)
    for kind in DDPCommHookType:
        ddp = wrapped(TorchDDP)
        register_ddp_comm_hook(kind, ddp)
        if kind is not DDPCommHookType.NOOP:
            pairs = zip(gradients(ddp, 2), plain, strict=True)
            far = [float((one - other).abs().max()) for one, other in pairs]
            agree(group, max(far) < 0.02, f"{kind.name}: {far}")


def test_an_error_of_a_hook_reaches_the_backward_pass(group):
    """The state is of another module: all ranks raise, and the group goes on."""
    state = ours.PowerSGDState(None, 2, start_powerSGD_iter=0, min_compression_rate=1e-3)
    state.error_dict = {f"parameter {place}": torch.zeros(1, 1) for place in range(9)}
    ddp = wrapped(TorchDDP)
    ddp.register_comm_hook(state, ours.powerSGD_hook)
    raises_on_all(group, Exception, lambda: backward(ddp, 0), "of another module")
    dist.barrier()


def test_hooks_are_saved_by_name_and_show_torch_no_annotation(group):
    for name in (*(one for one in ours.__all__ if one.endswith("_hook")), "noop_hook"):
        hook = getattr(ours, name, None)
        if hook is None or name == "register_ddp_comm_hook":
            continue
        assert pickle.loads(pickle.dumps(hook)) is hook and hook.is_in_order
        signature = inspect.signature(hook)
        assert signature.parameters["bucket"].annotation is inspect.Parameter.empty
        assert signature.return_annotation is inspect.Signature.empty
    compressed = default.Compressed(ours.allreduce_hook, torch.bfloat16)
    assert compressed.__name__ == "allreduce_hook in bfloat16"
    agree(group, pickle.loads(pickle.dumps(compressed)).hook is ours.allreduce_hook)
