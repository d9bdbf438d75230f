"""torch.compile of models and collectives: same gradients as eager mode, also when recompiled."""

import json
import os
import shutil
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._triton import has_triton

from mpidist import ddp as mddp
from mpidist import torch_version
from mpidist.optim import OSS
from tests.integration.training import STEPS, assert_trained, loss, net, reference, sgd, share
from tests.tools.support import agree, job, missing, printed

TRANSLATORS = ("c++", "g++", "clang++")  # what Inductor looks for on the host
MOST_RANKS = 3  # each rank compiles for itself, and holds a core while it does


@pytest.fixture(autouse=True)
def _fresh(request):
    """Reset Dynamo's caches before and after the test."""
    if request.node.get_closest_marker("mpi") is None:
        yield
        return
    if request.getfixturevalue("world").size > MOST_RANKS:
        pytest.skip(f"2 and {MOST_RANKS} ranks compile what more would")
    if "mpich" in os.environ.get("MPI4PY_LIBMPI", ""):
        pytest.skip("compiled on Open MPI; what compiled code then calls is run on MPICH elsewhere")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def cache(world):
    """A separate folder for Inductor's cache."""
    folder = world.broadcast_object(
        tempfile.mkdtemp(prefix="inductor-") if world.rank == 0 else None, 0
    )
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    yield folder
    os.environ.pop("TORCHINDUCTOR_CACHE_DIR")
    if before is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = before
    world.barrier()
    if world.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)


def require_translator(*names):
    if not any(map(shutil.which, names)):
        missing(f"Inductor needs a compiler: one of {', '.join(names)}")


@pytest.fixture(params=["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def backend(request):
    """Backends of torch.compile on the CPU; the first only captures and differentiates graphs."""
    if request.param == "inductor":
        require_translator(*TRANSLATORS)
        request.getfixturevalue("cache")
    return request.param


def train(world, device, model):
    update = sgd(model.parameters())
    for step in range(STEPS):
        update.zero_grad()
        x, y = (part.to(device) for part in share(step, world.rank, world.size))
        loss(model(x), y).backward()
        update.step()
    return [getattr(weight, "full_tensor", weight.cpu)() for weight in model.parameters()]


def graphs():
    """Return the number of graphs that Dynamo has passed to the backend."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


# --- models ---


def sharded():
    model = net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model.first, model.side, model.last):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


WRAPPED = {
    "torch's DDP": lambda: DistributedDataParallel(net()),
    "torch's DDP, static graph": lambda: DistributedDataParallel(net(), static_graph=True),
    "our DDP": lambda: mddp.DistributedDataParallel(net()),
    "FSDP2": sharded,
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("wrapped", WRAPPED)
def test_compiled_around(world, default_group, backend, wrapped):
    expected = reference(world.size)
    for _ in range(2 if backend == "inductor" else 1):
        before = graphs()
        model = torch.compile(WRAPPED[wrapped](), backend=backend)
        weights = train(world, torch.device("cpu"), model)
        agree(world, graphs() > before, "nothing was compiled")
        assert_trained(world, weights, expected)
        torch._dynamo.reset()


@pytest.fixture(
    params=[
        pytest.param(("cpu", "eager"), marks=pytest.mark.long),
        pytest.param(("cuda", "inductor"), marks=pytest.mark.gpu),
    ],
    ids=" ".join,
)
def place(request):
    """Device and backend of torch.compile; CPU graphs are only captured, to save time."""
    device, backend = request.param
    if backend == "inductor":
        if not has_triton():
            missing("Triton, which inductor writes its kernels in, is not installed")
        require_translator("cc", "gcc", "clang")
    return torch.device(device), backend


@pytest.mark.mpi(min_size=2)
def test_compiled_inside(world, group, place):
    device, backend = place
    model = net().to(device)
    wrapped = mddp.DistributedDataParallel(
        torch.compile(model, backend=backend), process_group=group
    )
    assert_trained(world, train(world, device, wrapped), reference(world.size))


@pytest.mark.mpi(min_size=2)
def test_compiled_outside(world, group, place):
    device, backend = place
    model = mddp.DistributedDataParallel(net().to(device), process_group=group)
    assert_trained(
        world, train(world, device, torch.compile(model, backend=backend)), reference(world.size)
    )


@pytest.mark.mpi(min_size=2)
def test_a_whole_step_with_a_sharded_optimizer(world, default_group, place):
    device, backend = place
    trained = []
    for compiles in (False, True):
        model = mddp.DistributedDataParallel(net().to(device))
        update = OSS(model.parameters(), optim=torch.optim.SGD, lr=0.1, momentum=0.9)

        def step(x, y, model=model, update=update):
            update.zero_grad()
            loss(model(x), y).backward()
            update.step()

        wanted = "aot_eager" if device.type == "cpu" else backend
        call = torch.compile(step, backend=wanted) if compiles else step
        for number in range(STEPS):
            call(*(part.to(device) for part in share(number, world.rank, world.size)))
        trained.append(model.cpu())
    assert_trained(world, trained[1].parameters(), trained[0])


# --- collectives ---

IS_211 = torch_version.numbers(torch.__version__) == (2, 11)


def gathered(x, dim):
    # before torch 2.13
    call = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
    if dim and torch_version.numbers(torch.__version__) < (2, 13):
        # torch.compile does not trace the view that another dimension needs.
        return torch.cat(call(x, 0, dist.group.WORLD).chunk(dist.get_world_size()), dim)
    return call(x, dim, dist.group.WORLD)


def every_functional(x):
    """Call all functional collectives on ``x`` of W rows, and two columns."""
    group, ranks, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    to_next = [(rank + 1) % size for rank in range(size)]
    scattered = (
        getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor
    )
    uneven = [ranks + 1] * size, [rank + 1 for rank in range(size)]
    rows = sum(uneven[1])
    return [
        functional.all_reduce(x, "sum", group),
        functional.all_reduce(x, "avg", group),
        functional.all_reduce(x, "max", group),
        gathered(x, 0),
        gathered(x, 1),
        scattered(x, "sum", 0, group),
        scattered(gathered(x, 1), "sum", 1, group),
        functional.all_to_all_single(x, None, None, group),
        functional.all_to_all_single(x.repeat(rows, 1)[:rows], *uneven, group),
        functional.broadcast(x, size - 1, group),
        # torch.compile of 2.11 traces its own class of groups alone in there.
        *([] if IS_211 else [functional.permute_tensor(x.reshape(-1), to_next, group)]),
        *functional.all_reduce_coalesced([x, x[0]], "sum", group),
        *functional.all_gather_into_tensor_coalesced([x, x[0] * 2], group),
        *functional.reduce_scatter_tensor_coalesced([x, x * 2], "sum", [0, 0], group),
    ]


def differentiable(x):
    """Return a loss of ``x`` through differentiable functional collectives and redistributions."""
    group, size = dist.group.WORLD, dist.get_world_size()
    gather = (
        getattr(functional, "all_gather_single_autograd", None)
        or functional.all_gather_tensor_autograd
    )
    scatter = (
        getattr(functional, "reduce_scatter_single_autograd", None)
        or functional.reduce_scatter_tensor_autograd
    )
    total = scatter(gather(x, 0, group).cos(), "sum", 0, group).square().sum()
    total = (
        total + functional.all_to_all_single_autograd(x, [1] * size, [1] * size, group).sin().sum()
    )
    mesh = MESHES[size]
    rows = DTensor.from_local(x, mesh, [Shard(0)])
    moved = rows.redistribute(mesh, [Replicate()]).sin().redistribute(mesh, [Shard(1)]).to_local()
    summed = (
        DTensor.from_local(x.cos(), mesh, [Partial()]).redistribute(mesh, [Shard(0)]).to_local()
    )
    return total + moved.square().sum() + summed.square().sum()


MESHES = {}  # by size; torch.compile takes a global one as it is


@pytest.mark.mpi(min_size=2)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_functional_collectives_and_redistribution(world, default_group, backend):
    MESHES[world.size] = init_device_mesh("cpu", (world.size,))
    x = torch.randn(
        world.size, 2 * world.size, generator=torch.Generator().manual_seed(world.rank)
    ).requires_grad_()
    plain = [part.clone() for part in every_functional(x.detach())]
    differentiable(x).backward()
    slope, x.grad = x.grad, None
    for _ in range(2 if backend == "inductor" else 1):
        torch._dynamo.reset()
        got = torch.compile(every_functional, backend=backend, fullgraph=True)(x.detach())
        far = [
            place
            for place, (one, other) in enumerate(zip(got, plain, strict=True))
            if not torch.equal(one, other)
        ]
        torch.compile(differentiable, backend=backend)(x).backward()
        agree(
            world,
            not far and torch.allclose(x.grad, slope),
            f"wrong: {far}; gradient off by {(x.grad - slope).abs().max()}",
        )
        x.grad = None


def in_place(x):
    """Call torch.distributed's functions, of which Dynamo replaces some by functional ones."""
    y, size = x * 2, dist.get_world_size()
    dist.all_reduce(y)
    dist.broadcast(y, 0)
    parts = [torch.empty_like(y) for _ in range(size)]
    dist.all_gather(parts, y)
    work = dist.all_reduce(parts[0], async_op=True)
    work.wait()
    dist.barrier()
    return y + parts[0]


@pytest.mark.mpi(min_size=2)
def test_calls_within_a_compiled_function(world, default_group, target):
    def native(x):
        y = x * 3
        world.all_reduce(y)
        return y + sum(world.all_gather_object(world.rank))

    x = torch.arange(4.0, device=target) + world.rank
    for function in (in_place, native):
        expected, before = function(x), graphs()
        got = torch.compile(function, backend="aot_eager")(x)
        agree(
            world,
            torch.equal(got, expected) and graphs() > before,
            f"{function.__name__}: {got}, not {expected}",
        )


# --- Inductor ---


def compiled_twice(function, inputs, settings):
    """Compile and call a function twice; return each result with the number of cached graphs."""
    outcome = []
    for _ in range(2):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        with torch._inductor.config.patch(
            {"compile_threads": 1, "fx_graph_cache": True, **settings}
        ):
            result = torch.compile(function)(*inputs)
        outcome.append((result, torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"]))
    return outcome


@pytest.mark.mpi(min_size=2)
def test_a_second_compilation_takes_the_first_from_inductors_cache(world, default_group, cache):
    """With a warm cache, Inductor requests the group's CUDA backend.

    A matrix product needs no generated kernel.
    """
    x = torch.ones(3, 3) * world.rank
    (first, cold), (second, warm) = compiled_twice(lambda x: gathered(x @ x, 0), [x], {})
    right = all(torch.equal(got, gathered(x @ x, 0)) for got in (first, second))
    # the first may find another rank's
    agree(world, right and warm == 1, f"{first}, {second}; hits {cold}, {warm}")


@pytest.mark.long
@pytest.mark.mpi(min_size=2)
def test_inductor_puts_all_gathers_into_one(world, default_group, cache, monkeypatch):
    """A bucket of all-gathers uses the operator with an ``out`` argument."""
    require_translator(*TRANSLATORS)
    if not hasattr(torch._inductor.config, "bucket_all_gathers_fx"):
        pytest.skip("this torch has no buckets of all-gathers")

    def two(x, y):
        return gathered(x, 0) + 1, gathered(y, 0) * 2

    inputs, calls = [torch.ones(3) * world.rank, torch.ones(2, 2) + world.rank], []
    expected, kernel = two(*inputs), type(default_group).all_gather_single_coalesced
    recorded = lambda *args: calls.append(args) or kernel(*args)  # noqa: E731
    monkeypatch.setattr(type(default_group), "all_gather_single_coalesced", recorded)
    for got, _ in compiled_twice(two, inputs, {"bucket_all_gathers_fx": "all"}):
        agree(world, all(map(torch.equal, got, expected)), f"{got}, not {expected}")
    agree(world, len(calls) == 2, f"{len(calls)} all-gathers in two passes")


SECOND_PROCESS = """
    import json
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from tests.integration.training import loss, net, share

    dist.init_process_group("mpidist")
    rank, size = dist.get_rank(), dist.get_world_size()
    plain, model = DistributedDataParallel(net()), torch.compile(DistributedDataParallel(net()))
    x, y = share(0, rank, size)
    for one in (plain, model):
        loss(one(x), y).backward()
    pairs = zip(plain.parameters(), model.parameters())
    far = max((p.grad - q.grad).abs().max().item() for p, q in pairs)
    hits = torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"]
    print(json.dumps({"rank": rank, "far": far, "hits": hits}), flush=True)
    dist.destroy_process_group()
"""


@pytest.mark.long
def test_a_second_process_takes_what_the_first_compiled(tmp_path):
    require_translator(*TRANSLATORS)
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    runs = [printed(job(2, SECOND_PROCESS, env=env, timeout_s=100)) for _ in range(2)]
    assert all(line["far"] < 1e-12 for run in runs for line in run.values()), json.dumps(runs)
    assert all(line["hits"] for line in runs[1].values()), json.dumps(runs)
