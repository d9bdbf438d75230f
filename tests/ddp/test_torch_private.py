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
    agree(group, ddp.bucket_bytes_cap == 2 << 20 and ddp.mixed_precision is None)
    ddp._set_static_graph()
    with pytest.warns(UserWarning, match="static_graph is set already"):
        ddp._set_static_graph()
    agree(group, ddp.static_graph)
    module = torch.nn.Linear(2, 2)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["bias"])
    ddp = DistributedDataParallel(module, process_group=group)
    agree(group, ddp.reducer.parameters == [module.weight])


@pytest.mark.parametrize(
    "name", ["find_unused_parameters", "bucket_bytes_cap", "_authoritative_rank"]
)
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
        after["comm_hook"] == "fp16_compress_hook" and ddp.reducer.hook[0] is fp16_compress_hook,
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
        agree(
            group,
            torch.allclose(gradients(ddp.module), averaged(group), atol=1e-6),
            "not the average",
        )


def test_a_hook_stays_when_the_graph_becomes_static(group):
    ddp = DistributedDataParallel(net(), process_group=group)
    ddp.register_comm_hook(None, noop_hook)
    ddp._set_static_graph()
    ddp(batch(group.rank)).square().sum().backward()
    agree(group, torch.equal(gradients(ddp.module), averaged(group, [group.rank])))


@pytest.mark.parametrize("chosen", [4, 2, 0])
@pytest.mark.parametrize("between_nodes", [False, True])
def test_fused_optimizer(group, monkeypatch, between_nodes, chosen):
    monkeypatch.setattr(type(group), "is_single_node", not between_nodes)
    fused, plain = (
        DistributedDataParallel(net(), process_group=group, bucket_cap_mb=0.0001) for _ in range(2)
    )
    some = None if chosen == 4 else list(fused.parameters())[:chosen]
    fused._register_fused_optim(torch.optim.SGD, 0.1, momentum=0.9, optim_params=some)
    parameters = list(plain.parameters())[:chosen] or [torch.zeros(1)]
    optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9)
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
