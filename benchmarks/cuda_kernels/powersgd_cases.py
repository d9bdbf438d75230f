"""PowerSGD of a network's gradients on one rank: mpidist's kernels and hook, and torch's hook.

The fewest bytes. Each stage needs the result of the previous stage from all ranks, so each stage
reads the matrix again; changed matrices are written. For n × m elements with error feedback: M and
E are read, X = M + E is written (3); X is read for Q (1); X is read, the approximation M and the
error E are written (3): 7·n·m. Without a stored X both M and E would be read in every stage, which
is more. The orthogonalization reads and writes each thin factor of rank r, one stage writes the
factor, two stages read it: 5·r·(n + m). An uncompressed tensor is copied to its slot and back: 4.

Letters: n × m a matrix; r the approximation's rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd

from cuda_kernels.launches import most_launches
from harness.timing import Contender
from mpidist.ddp.buckets.bucket import Bucket
from mpidist.ddp.buckets.plan import assign
from mpidist.ddp.hooks import lowrank
from mpidist.ddp.hooks.grad_bucket import GradBucket
from mpidist.ddp.hooks.lowrank import Factors
from mpidist.ddp.hooks.powersgd import powerSGD_hook
from mpidist.ddp.hooks.powersgd_state import PowerSGDState
from mpidist.kernels import powersgd
from training.gradient_lists import Shape

Tensor = torch.Tensor

KERNELS, OURS, THEIRS, BATCHED = "kernels", "powerSGD_hook", "torch's hook", "torch's hook, batched"
# Default of both hooks: tensors that shrink less are not compressed.
_LEAST_RATE = 2
# The smallest start of torch's hook.
_PLAIN_STEPS = 2
# After so many steps warm-started factors have converged.
_WARM_STEPS = 6
# Largest difference of two contenders' errors, relative to the gradient.
_SAME = 0.02


@dataclass(frozen=True)
class Case:
    """One list of tensors at one rank."""

    tensors_of: str
    rank: int
    buckets: int
    tensors: int
    matrices: int
    numel: int
    moved_bytes: int  # fewest bytes
    contenders: list[Contender]
    # Largest number of kernels per bucket; None on the CPU, where torch code replaces them.
    launches: dict[str, Any]


def case(
    name: str, shapes: Sequence[Shape], bucket_bytes: int, rank: int, device: torch.device
) -> Case:
    """Build and check all contenders, each with its own gradients and buckets.

    Raises:
        RuntimeError: A contender's result is wrong.
    """
    buckets = buckets_of(shapes, bucket_bytes, device)
    factors = [found for bucket in buckets if (found := _factors(bucket, rank)) is not None]
    _check_kernels(name, factors)
    launches = {KERNELS: most_launches([_stages_of(one) for one in factors], device)}
    ours, theirs, batched = (
        _hook(kind, shapes, bucket_bytes, rank, device) for kind in (OURS, THEIRS, BATCHED)
    )
    _check_hooks(name, [ours, theirs, batched])
    launches[OURS] = most_launches([_one_bucket(ours, bucket) for bucket in ours.buckets], device)
    matrices = [x for one in factors for x in one.bucket.matrices]
    return Case(
        name,
        rank,
        len(buckets),
        len(shapes),
        len(matrices),
        sum(map(math.prod, shapes)),
        fewest_bytes(shapes, rank),
        [
            _kernels(factors),
            *(Contender(hook.name, (hook.step,), ()) for hook in (ours, theirs, batched)),
        ],
        launches,
    )


def fewest_bytes(shapes: Sequence[Shape], rank: int, itemsize: int = 4) -> int:
    """Return the bytes that compression must read and write; see the module's docstring."""
    moved = 0
    for shape in shapes:
        numel = math.prod(shape)
        if lowrank.is_compressible(shape, rank, _LEAST_RATE):
            n, m = shape[0], numel // shape[0]
            moved += 7 * n * m + 5 * lowrank.rank_of(n, m, rank) * (n + m)
        else:
            moved += 4 * numel
    return moved * itemsize


# --- gradients in buckets ---


def buckets_of(
    shapes: Sequence[Shape], bucket_bytes: int, device: torch.device
) -> list[GradBucket]:
    """Return DDP's buckets of these gradients, filled reproducibly: low rank plus some noise."""
    sizes = [torch.empty(shape, device="meta") for shape in shapes]
    plan = assign(sizes, [bucket_bytes], order=range(len(shapes) - 1, -1, -1))
    parameters = [torch.empty(shape, device=device) for shape in shapes]
    names = [f"{place}" for place in range(len(shapes))]
    buckets = []
    for index, places in enumerate(plan):
        bucket = Bucket(places, parameters, names)
        generator = torch.Generator(device).manual_seed(index)
        for view in bucket.views:
            view.copy_(_gradient(view.shape, generator, device))
        buckets.append(GradBucket(bucket, index, is_last=index == len(plan) - 1))
    return buckets


def _gradient(shape: torch.Size, generator: torch.Generator, device: torch.device) -> Tensor:
    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device)

    noise = 0.1 * normal(*shape)
    if len(shape) < 2:
        return noise
    left, right = normal(shape[0], 4), normal(4, shape[1:].numel())
    left *= torch.tensor([1.0, 0.5, 0.25, 0.125], device=device)
    return noise + (left @ right).view(shape)


# --- the stages alone ---


def _factors(bucket: GradBucket, rank: int) -> Factors | None:
    matrices: list[tuple[str, Tensor, Tensor | None]] = []
    whole = []
    for name, gradient in zip(bucket.names(), bucket.gradients(), strict=True):
        if lowrank.is_compressible(gradient.shape, rank, _LEAST_RATE):
            matrix = lowrank.as_matrix(gradient)
            matrices.append((name, matrix, 0.1 * torch.randn_like(matrix)))
        else:
            whole.append(gradient)
    if not matrices:
        return None
    factors = lowrank.place(matrices, whole, rank)
    factors.flat_q.normal_()
    return factors


def _stages_of(factors: Factors) -> Callable[[], None]:
    bucket = factors.bucket

    def stages() -> None:
        powersgd.orthogonalize_q(bucket)
        powersgd.project(bucket)
        powersgd.orthogonalize_p(bucket)
        powersgd.backproject(bucket)
        powersgd.reconstruct(bucket)

    return stages


def _kernels(factors: Sequence[Factors]) -> Contender:
    stages = [_stages_of(one) for one in factors]

    def step() -> None:
        for each in stages:
            each()

    return Contender(KERNELS, (step,), ())


def _check_kernels(name: str, factors: Sequence[Factors]) -> None:
    """Run one step and compare with plain products in fp64."""
    for one in factors:
        matrices = one.bucket.matrices
        whole = [tensor.clone() for tensor in one.bucket.whole]
        before = [(x.m.double() + x.e.double(), x.q.double()) for x in matrices if x.e is not None]
        _stages_of(one)()
        if not all(torch.equal(old, new) for old, new in zip(whole, one.bucket.whole, strict=True)):
            raise RuntimeError(f"{name}: a tensor that travels whole came back changed")
        for x, (total, old_q) in zip(matrices, before, strict=True):
            for what, distance in _distances(x, total, old_q).items():
                if not distance < 1e-4:
                    raise RuntimeError(
                        f"{name}, {tuple(x.m.shape)} at rank {x.p.shape[1]}: {what} is off by "
                        f"{distance:.1e}"
                    )


def _distances(x: powersgd.Matrix, total: Tensor, old_q: Tensor) -> dict[str, float]:
    """Return the relative error of each property of a step."""
    assert x.e is not None
    m, p, q = x.m.double(), x.p.double(), x.q.double()
    projected = total @ old_q
    return {
        "M + E = X": _relative(m + x.e.double(), total),
        "PᵀP = 1": _relative(p.t() @ p, torch.eye(p.shape[1], dtype=p.dtype, device=p.device)),
        "the space of X·Q": _relative(p @ (p.t() @ projected), projected),
        "Q = Xᵀ·P": _relative(q, total.t() @ p),
        "M = P·Qᵀ": _relative(m, p @ q.t()),
    }


def _relative(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


# --- the hooks ---


@dataclass(frozen=True)
class Hook:
    """Communication hook and the buckets that it compresses."""

    name: str
    call: Callable[[Any, Any], Any]
    state: Any
    buckets: list[GradBucket]

    def step(self) -> None:
        """Launch the hook on all buckets and wait, as DDP does."""
        for future in [self.call(self.state, bucket) for bucket in self.buckets]:
            future.wait()

    def left_out(self) -> list[Tensor]:
        """Return the error of each bucket after the last step."""
        return [self._left_out(bucket) for bucket in self.buckets]

    def _left_out(self, bucket: GradBucket) -> Tensor:
        errors = self.state.error_dict
        if self.name != OURS:
            return errors[bucket.index()]
        pairs = zip(bucket.names(), bucket.gradients(), strict=True)
        return torch.cat(
            [errors.get(name, torch.zeros_like(gradient)).view(-1) for name, gradient in pairs]
        )


def _hook(
    kind: str, shapes: Sequence[Shape], bucket_bytes: int, rank: int, device: torch.device
) -> Hook:
    buckets = buckets_of(shapes, bucket_bytes, device)
    if kind == OURS:
        return Hook(
            kind,
            powerSGD_hook,
            PowerSGDState(None, rank, start_powerSGD_iter=_PLAIN_STEPS),
            buckets,
        )
    state = torch_powersgd.PowerSGDState(
        None, rank, start_powerSGD_iter=_PLAIN_STEPS, batch_tensors_with_same_shape=kind == BATCHED
    )
    return Hook(kind, torch_powersgd.powerSGD_hook, state, buckets)


def _one_bucket(hook: Hook, bucket: GradBucket) -> Callable[[], None]:
    return lambda: hook.call(hook.state, bucket).wait()


def _check_hooks(name: str, hooks: Sequence[Hook]) -> None:
    """Step until the factors converge; require that nothing is lost and that all errors agree."""
    shares = {}
    for hook in hooks:
        truth = [bucket.buffer().clone() for bucket in hook.buckets]
        for _ in range(_PLAIN_STEPS + _WARM_STEPS):
            hook.step()
        left_out, whole = hook.left_out(), torch.stack([t.norm() for t in truth]).norm()
        lost = [
            t - bucket.buffer() - e
            for t, bucket, e in zip(truth, hook.buckets, left_out, strict=True)
        ]
        if not float(torch.stack([t.norm() for t in lost]).norm() / whole) < 1e-4:
            raise RuntimeError(f"{name}: {hook.name} loses a part of the gradients")
        shares[hook.name] = float(torch.stack([t.norm() for t in left_out]).norm() / whole)
    if max(shares.values()) - min(shares.values()) > _SAME:
        raise RuntimeError(
            f"{name}: the hooks leave out different shares of the gradients: {shares}"
        )
