"""``SyncBatchNorm`` against ``BatchNorm`` on the batches of all ranks in one process."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mpidist.ddp.module import DistributedDataParallel
from mpidist.nn.sync_batch_norm import SyncBatchNorm
from tests.tools.support import agree, raises_on_all

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("device")]

C = 3
EVEN, UNEVEN, EMPTY = (
    (lambda rank: 4),
    (lambda rank: 2 * rank + 2),
    (lambda rank: 0 if rank == 0 else 3),
)


def batch(rank, sizes, shape=(), dtype=torch.float32, form=torch.contiguous_format):
    made = torch.randn(
        sizes(rank), C, *shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64
    )
    return (made * 2 + 3).to(dtype).to(memory_format=form)


def near(a, b, tolerance):
    return a is b is None or torch.allclose(a.double(), b.double(), rtol=tolerance, atol=tolerance)


def compare(
    group, sizes, shape=(), dtype=torch.float32, form=torch.contiguous_format, passes=1, **options
):
    """Run the layer and a float64 reference forward and backward; return the differences."""
    torch.manual_seed(1)
    plain = [nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d][len(shape)](
        C, dtype=torch.float64, **options
    )
    kind = dtype if dtype is torch.float64 else torch.float32
    ours = SyncBatchNorm(C, process_group=group, dtype=kind, **options)
    if plain.affine:
        with torch.no_grad():
            for parameter in (plain.weight, plain.bias):
                parameter.uniform_(0.5, 2)
        ours.load_state_dict({name: value for name, value in plain.state_dict().items()})
    ranks = range(group.size)
    parts = [batch(rank, sizes, shape, dtype, form) for rank in ranks]
    own = parts[group.rank].detach().requires_grad_()
    whole = torch.cat([part.double() for part in parts]).requires_grad_()
    tolerance = (
        2e-2
        if dtype in (torch.bfloat16, torch.float16)
        else 2e-6
        if dtype is torch.float32
        else 1e-12
    )
    wrong = []
    for number in range(passes):
        got, expected = ours(own * (number + 1)), plain(whole * (number + 1))
        weights = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view(expected.shape)
        bounds = [
            sum(sizes(rank) for rank in ranks[:stop]) for stop in (group.rank, group.rank + 1)
        ]
        (got * weights[slice(*bounds)]).sum().backward()
        (expected * weights).sum().backward()
        wrong += [] if near(got, expected[slice(*bounds)], tolerance) else ["output"]
        wrong += [] if (got.dtype, got.shape) == (dtype, own.shape) else ["form of the output"]
    wrong += (
        []
        if near(own.grad, whole.grad[slice(*bounds)], tolerance * 3)
        else ["gradient of the input"]
    )
    for name, parameter in ours.named_parameters():
        total = parameter.grad.double()
        group.all_reduce(total)
        wrong += (
            []
            if near(total, plain.get_parameter(name).grad, tolerance * 10)
            else [f"gradient of {name}"]
        )
    for name, value in ours.state_dict().items():
        wrong += [] if near(value, plain.state_dict()[name], max(tolerance, 2e-6)) else [name]
    agree(group, not wrong, f"{dtype} {shape} {options}: {wrong}")
    return ours, plain


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize("sizes", [EVEN, UNEVEN, EMPTY], ids=["even", "uneven", "empty"])
def test_matches_batch_norm_of_the_whole_batch(group, sizes, dtype):
    if group.size == 1 and sizes is EMPTY:
        sizes = EVEN
    for shape in ((), (5,), (4, 5), (2, 3, 2)):
        compare(group, sizes, shape, dtype)
    compare(group, sizes, (4, 5), dtype, form=torch.channels_last)
    compare(group, sizes, (2, 3, 2), dtype, form=torch.channels_last_3d)


def test_options_evaluation_and_two_passes_in_one_backward(group):
    for options in (
        {"momentum": None},
        {"track_running_stats": False},
        {"affine": False},
        {"eps": 0.1, "momentum": 0.5},
    ):
        ours, plain = compare(group, UNEVEN, (5,), passes=3, **options)
        x = torch.randn(4, C, 5)
        with torch.no_grad():  # evaluation is each rank's own affair
            same = torch.allclose(ours.eval()(x), plain.eval().float()(x), rtol=1e-5, atol=1e-5)
            agree(group, same and ours(x[:0]).shape == (0, C, 5), f"evaluation with {options}")
    layer = SyncBatchNorm(C, process_group=group)
    x, y = (batch(group.rank, sizes).requires_grad_() for sizes in (EVEN, UNEVEN))
    (layer(x).square().sum() + layer(2 * y).pow(3).sum()).backward()
    plain = nn.BatchNorm1d(C)
    both = [
        torch.cat([batch(rank, sizes) for rank in range(group.size)]).requires_grad_()
        for sizes in (EVEN, UNEVEN)
    ]
    (plain(both[0]).square().sum() + plain(2 * both[1]).pow(3).sum()).backward()
    own = [sum(map(EVEN, range(group.rank))), sum(map(UNEVEN, range(group.rank)))]
    same = torch.allclose(x.grad, both[0].grad[own[0] :][: len(x)], atol=1e-5)
    agree(
        group,
        same and torch.allclose(y.grad, both[1].grad[own[1] :][: len(y)], atol=1e-4),
        "two uses in one backward pass",
    )
    tracked = layer.running_var.clone()
    with torch.no_grad():  # statistics are synchronised without gradients, too
        layer(x)
    agree(
        group, not torch.equal(tracked, layer.running_var) and int(layer.num_batches_tracked) == 3
    )
    rows = tracked.new_empty(group.size, C)
    group.all_gather_into_tensor(rows, tracked)
    agree(group, bool((rows == rows[0]).all()), "running statistics differ in their bits")


def test_autocast_and_inputs_that_are_not_dense(group):
    layer, linear = SyncBatchNorm(C, process_group=group), nn.Linear(4, C)
    x = batch(group.rank, EVEN)[:, :1].expand(4, 4).contiguous().requires_grad_()
    with torch.autocast(x.device.type, torch.bfloat16):
        out = layer(linear(x))
    out.float().square().sum().backward()
    agree(
        group,
        out.dtype is torch.bfloat16
        and x.grad is not None
        and layer.weight.grad.dtype is torch.float32,
    )
    agree(group, layer.running_mean.dtype is torch.float32)
    sliced = batch(group.rank, EVEN, (6, 4))[:, :, ::2].transpose(2, 3)
    dense = SyncBatchNorm(C, process_group=group)
    agree(group, torch.allclose(layer(sliced), dense(sliced.contiguous()), atol=1e-6))


def test_bad_input_is_an_error_on_all_ranks(group):
    layer = SyncBatchNorm(C, process_group=group)
    is_last = group.rank == group.size - 1
    good = batch(group.rank, EVEN)
    for bad in (torch.randn(4, C + 1), torch.randn(4), torch.ones(4, C, dtype=torch.int64)):
        text = raises_on_all(
            group, ValueError, lambda bad=bad: layer(bad if is_last else good), "SyncBatchNorm"
        )
        agree(group, ("expected" in text) == is_last, text)
    raises_on_all(group, ValueError, lambda: layer(good[: int(is_last)]), "more than 1 value")
    raises_on_all(
        group,
        TypeError,
        lambda: SyncBatchNorm(C, process_group="world"),
        "needs a group of mpidist",
    )
    if group.size > 1:
        raises_on_all(
            group,
            ValueError,
            lambda: layer(good.clone().requires_grad_(is_last)),
            f"on ranks [{group.size - 1}]",
        )
        channels = C + is_last
        wrong = SyncBatchNorm(channels, process_group=group)
        raises_on_all(
            group,
            ValueError,
            lambda: wrong(torch.randn(4, channels)),
            f"rank {group.size - 1}: {C + 1}",
        )
    agree(
        group,
        torch.isfinite(layer(good)).all()
        and int(layer.num_batches_tracked) == 1 + (group.size == 1),
    )
    if group.size > 1:
        agree(
            group,
            layer(good[:0]).shape == (0, C) and int(layer.num_batches_tracked) == 1,
            "empty on all ranks",
        )


def net():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 5),
        nn.BatchNorm1d(5),
    )


def test_conversion_keeps_parameters_and_state(group, monkeypatch):
    plain = net()
    before = copy.deepcopy(plain.state_dict())
    parameters = list(plain.parameters())
    made = SyncBatchNorm.convert_sync_batchnorm(plain, group)
    agree(
        group, made is plain and [type(part).__name__ for part in made].count("SyncBatchNorm") == 2
    )
    agree(
        group,
        all(a is b for a, b in zip(made.parameters(), parameters, strict=True)),
        "parameters were replaced",
    )
    agree(group, before.keys() == made.state_dict().keys())
    torchs = nn.SyncBatchNorm.convert_sync_batchnorm(net()).eval()
    torchs.load_state_dict(made.state_dict())
    again = SyncBatchNorm.convert_sync_batchnorm(torchs, group)
    agree(
        group,
        type(again[1]) is SyncBatchNorm
        and not again[1].training
        and again[1].process_group is group,
    )
    agree(
        group,
        type(SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(2, momentum=None), group))
        is SyncBatchNorm,
    )
    twin = copy.deepcopy(made)
    agree(group, twin[1].process_group is group and twin[1].weight is not made[1].weight)
    file = io.BytesIO()
    with pytest.warns(UserWarning, match="without its process group"):
        torch.save(made, file)
    file.seek(0)
    agree(group, torch.load(file, weights_only=False)[1].process_group is None)


def test_conversion_of_a_shared_layer_with_hooks(group):
    layer, calls = nn.BatchNorm1d(2), []
    layer.register_forward_hook(lambda *args: calls.append(0))
    module = nn.ModuleDict({"a": layer, "b": nn.Sequential(layer)})
    module.add_module("c", layer)
    SyncBatchNorm.convert_sync_batchnorm(module, group)
    agree(
        group, module["a"] is module["b"][0] is module["c"] and type(module["a"]) is SyncBatchNorm
    )
    module["a"](torch.randn(3, 2))
    agree(group, calls == [0])


def images(rank):
    return torch.randn(3, 2, 6, 6, generator=torch.Generator().manual_seed(20 + rank))


@pytest.mark.usefixtures("default_group")
def test_training_in_data_parallel_modules_matches_one_process(group, monkeypatch):
    plain = net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        plain(
            torch.cat([images(3 * step + rank) for rank in range(group.size)])
        ).square().mean().backward()
        optimizer.step()
    expected = list(plain.state_dict().values())
    cap = {"bucket_cap_mb": 0.0005}
    ways = {
        "ours": lambda module: DistributedDataParallel(module, process_group=group, **cap),
        "ours, static graph": lambda module: DistributedDataParallel(
            module, process_group=group, static_graph=True, **cap
        ),
        "torch's": lambda module: nn.parallel.DistributedDataParallel(
            module, process_group=dist.group.WORLD, **cap
        ),
    }
    for name, wrap in ways.items():
        monkeypatch.setattr(type(group), "is_single_node", name == "ours")
        got = trained_on(dist.group.WORLD if name == "torch's" else group, group, wrap)
        far = max(float((a - b).abs().max()) for a, b in zip(got, expected, strict=True))
        agree(group, far < 2e-5, f"{name}: {far}")


def trained_on(process_group, group, wrap):
    model = wrap(SyncBatchNorm.convert_sync_batchnorm(net(), process_group))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(images(3 * step + group.rank)).square().mean().backward()
        optimizer.step()
    return [value.detach().clone() for value in model.module.state_dict().values()]


class Branches(nn.Module):
    """A branch of some ranks, whose gradients are ready before a batch norm's backward pass."""

    def __init__(self, group):
        super().__init__()
        self.first, self.norm, self.last = (
            nn.Linear(4, 4),
            SyncBatchNorm(4, process_group=group),
            nn.Linear(4, 4),
        )
        self.extra = nn.Linear(4, 4)

    def forward(self, x, uses_extra):
        x = self.norm(self.first(x))
        x = self.last(x)
        return x + self.extra(x) if uses_extra else x


def test_one_order_where_ranks_use_different_parameters(group, monkeypatch):
    for between_nodes in (False, True):
        monkeypatch.setattr(type(group), "is_single_node", not between_nodes)
        torch.manual_seed(0)
        model = DistributedDataParallel(
            Branches(group), process_group=group, find_unused_parameters=True, bucket_cap_mb=0.00001
        )
        for step in range(3):
            model.zero_grad()
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(group.rank))
            model(x, (group.rank + step) % 2 == 0).square().sum().backward()
        grads = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        rows = grads.new_empty(group.size, grads.numel())
        group.all_gather_into_tensor(rows, grads)
        agree(
            group,
            bool((rows == rows[0]).all()) and bool(grads.isfinite().all()),
            "gradients differ between ranks",
        )


@pytest.mark.long
def test_compiled(group):
    """The collectives are graph breaks, also within DistributedDataParallel."""
    x = images(group.rank)
    plain, compiled = (SyncBatchNorm.convert_sync_batchnorm(net(), group) for _ in range(2))
    ddp = [DistributedDataParallel(module, process_group=group) for module in (plain, compiled)]
    for module in (ddp[0], torch.compile(ddp[1], backend="aot_eager")):
        for _ in range(2):
            module(x).square().mean().backward()
    same = all(
        torch.allclose(a.grad, b.grad, atol=1e-5)
        for a, b in zip(plain.parameters(), compiled.parameters(), strict=True)
    )
    agree(
        group,
        same and torch.allclose(plain[1].running_var, compiled[1].running_var),
        "the compiled module differs",
    )
