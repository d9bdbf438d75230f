"""Private names of torch on our module, used as torch's tests and the frameworks use them."""

import pytest
import torch
import torch.distributed as dist

from mpidist.ddp.hooks.default import fp16_compress_hook, noop_hook
from mpidist.ddp.module import DistributedDataParallel
from tests.tools.support import agree, raises_on_all

pytestmark = pytest.mark.mpi


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))


def batch(rank):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))


def gradients(module):
    return torch.cat([p.grad.flatten() for p in module.parameters()])


def averaged(group, members=None):
    """Return the mean over ranks of the gradients of ``net``."""
    found = []
    for rank in members or range(group.size):
        module = net()
        module(batch(rank)).square().sum().backward()
        found.append(gradients(module))
    return torch.stack(found).mean(0)


def test_settings_by_torchs_names(group):
    ddp = DistributedDataParallel(
        net(), process_group=group, find_unused_parameters=True, bucket_cap_mb_list=[1, 2]
    )
    agree(
        group,
        ddp.find_unused_parameters
        and not ddp.static_graph
        and ddp.gradient_as_bucket_view
        and ddp.broadcast_buffers,
    )
    agree(group, (ddp.bucket_bytes_cap, ddp.bucket_bytes_cap_list) == (2 << 20, [1 << 20, 2 << 20]))
    agree(
        group,
        ddp.device_type == "cpu"
        and ddp._distributed_rank == group.rank
        and ddp.mixed_precision is None,
    )
    agree(
        group,
        len(ddp._module_parameters) == len(list(ddp._get_data_parallel_params(ddp.module))) == 4,
    )
    ddp._set_static_graph()
    with pytest.warns(UserWarning, match="static_graph is set already"):
        ddp._set_static_graph()
    agree(group, ddp.static_graph and ddp._comm_hooks == [])
    ddp._set_ddp_sink_clone(False)
    ddp._set_ddp_runtime_logging_sample_rate(2)
    raises_on_all(
        group,
        ValueError,
        lambda: ddp._set_ddp_runtime_logging_sample_rate(0),
        "equal or greater than 1",
    )
    module = torch.nn.Linear(2, 2)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["bias"])
    agree(
        group,
        [name for name, _ in DistributedDataParallel._get_data_parallel_params(module, True)]
        == ["weight"],
    )


@pytest.mark.parametrize("name", ["find_unused_parameters", "device_type", "_authoritative_rank"])
def test_what_the_module_decides_is_not_assigned(group, name):
    ddp = DistributedDataParallel(net(), process_group=group)
    with pytest.raises(AttributeError):
        setattr(ddp, name, None)


def test_logging_data_has_torchs_fields(group):
    ddp = DistributedDataParallel(net().double(), process_group=group)
    before = ddp._get_ddp_logging_data()
    agree(group, before.get("comm_hook") is None)
    agree(
        group,
        (before["world_size"], before["rank"], before["backend_name"])
        == (group.size, group.rank, "mpidist"),
    )
    sizes = sum(p.numel() for p in ddp.parameters()) * 8
    agree(
        group,
        (before["total_parameter_size_bytes"], before["dtypes"], before["has_rebuilt_buckets"])
        == (sizes, "double", 0),
    )
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    ddp(batch(group.rank).double()).sum().backward()
    after = ddp._get_ddp_logging_data()
    agree(
        group,
        after["comm_hook"] == "fp16_compress_hook" and ddp._comm_hooks[0][0] is fp16_compress_hook,
        str(after),
    )
    agree(
        group,
        after["has_rebuilt_buckets"] == 1 and after["rebuilt_bucket_sizes"] == str(sizes),
        str(after),
    )
    raises_on_all(
        group, TypeError, lambda: ddp._register_builtin_comm_hook("fp16"), "BuiltinCommHookType"
    )


def test_training_within_the_forward_pass_as_lightning_does(group):
    """Lightning's manual optimization: backward passes within forward arm the reducer."""

    class Manual(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = net()

        def forward(self, x):
            ddp.require_backward_grad_sync = True
            for _ in range(2):
                self.inner.zero_grad()
                loss = self.inner(x).square().sum()
                ddp.require_forward_param_sync = True
                ddp.reducer._rebuild_buckets()
                ddp.reducer.prepare_for_backward([])
                loss.backward()
                ddp.reducer._delay_all_reduce()
            ddp.require_backward_grad_sync = False

    ddp = DistributedDataParallel(Manual(), process_group=group)
    for _ in range(2):
        ddp(batch(group.rank))
        ddp.require_backward_grad_sync = True
        ddp._check_reducer_finalized()
        agree(
            group,
            torch.allclose(gradients(ddp.module), averaged(group), atol=1e-6),
            "not the average",
        )


def test_hooks_removed_and_passes_interrupted(group):
    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise KeyError("broken")

    first, last = torch.nn.Linear(6, 5), torch.nn.Linear(5, 2)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = first, last

        def forward(self, x):
            return self.last(Breaks.apply(self.first(x)))

    ddp = DistributedDataParallel(Net(), process_group=group)
    with pytest.raises(KeyError, match="broken"):
        ddp(batch(group.rank)).sum().backward()
    raises_on_all(group, RuntimeError, ddp._check_reducer_finalized, "begun and not ended")
    other = DistributedDataParallel(net(), process_group=group)
    other._remove_autograd_hooks()
    other.module(batch(group.rank)).square().sum().backward()
    agree(
        group,
        torch.allclose(gradients(other.module), averaged(group, [group.rank]), atol=1e-6),
        "averaged all the same",
    )


def test_another_group(group):
    ddp = DistributedDataParallel(net(), process_group=group)
    ddp.register_comm_hook(
        None, lambda state, bucket: fp16_compress_hook(ddp.process_group, bucket)
    )
    members = [rank for rank in range(group.size) if rank % 2 == group.rank % 2]
    part = group.new_group(members)
    ddp._update_process_group(part)
    ddp._update_process_group(dist.GroupMember.NON_GROUP_MEMBER)
    ddp(batch(group.rank)).square().sum().backward()
    want = averaged(group, members)
    agree(
        group,
        torch.allclose(gradients(ddp.module), want, atol=1e-2) and ddp.process_group is part,
        "not the part's average",
    )
    agree(
        group,
        len(ddp._comm_hooks) == 1 and not torch.equal(gradients(ddp.module), want),
        "the hook was lost",
    )
    raises_on_all(
        group, TypeError, lambda: ddp._update_process_group(3), "needs a group of mpidist"
    )
    part.close()


def test_a_hook_stays_when_the_graph_becomes_static(group):
    ddp = DistributedDataParallel(net(), process_group=group)
    ddp.register_comm_hook(None, noop_hook)
    ddp._set_static_graph()
    ddp(batch(group.rank)).square().sum().backward()
    agree(group, torch.equal(gradients(ddp.module), averaged(group, [group.rank])))


def test_fused_optimizer(group):
    fused = DistributedDataParallel(net(), process_group=group)
    fused._register_fused_optim(torch.optim.SGD, 0.1, momentum=0.9)
    plain = DistributedDataParallel(net(), process_group=group)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9)
    for step in range(3):
        for module in (fused, plain):
            module.zero_grad()
            module(batch(group.rank + step)).square().sum().backward()
        optimizer.step()
    both = list(zip(fused.parameters(), plain.parameters(), strict=True))
    agree(
        group,
        all(torch.allclose(a, b, atol=1e-6) for a, b in both),
        "differs from a step behind the backward pass",
    )


@pytest.mark.mpi(min_size=4)
@pytest.mark.usefixtures("default_group")
def test_data_parallel_over_tensor_parallel(group):
    """A mesh of one dimension sliced from two; the module's parameters lie on the other."""
    if group.size != 4:
        pytest.skip("a mesh of 2 × 2")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    raises_on_all(
        group,
        RuntimeError,
        lambda: DistributedDataParallel(net(), device_mesh=mesh),
        "slice it first",
    )
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    whole = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    whole.load_state_dict(module.state_dict())
    parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    ddp = DistributedDataParallel(module, device_mesh=mesh["dp"])
    row = group.rank // 2
    for step in range(2):
        out = ddp(batch(2 * step + row))
        out.square().mean().backward()
    for step in range(2):
        torch.stack(
            [whole(batch(2 * step + rank)).square().mean() for rank in range(2)]
        ).mean().backward()
    agree(group, ddp.device_mesh == mesh["dp"])
    shard = whole[0].weight.grad.chunk(2)[group.rank % 2]
    found = next(
        parameter for parameter in ddp.reducer.parameters if parameter.shape == shard.shape
    ).grad
    agree(group, torch.allclose(found, shard, atol=1e-6), f"{found} and not {shard}")
