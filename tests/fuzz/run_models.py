"""Training of random models on the ranks of a job, compared with training in one process."""

from __future__ import annotations

import contextlib
import sys
import traceback
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from mpidist.ddp.hooks import default as our_hooks
from mpidist.ddp.hooks.powersgd import powerSGD_hook
from mpidist.ddp.hooks.powersgd_state import PowerSGDState
from mpidist.ddp.module import DistributedDataParallel
from tests.fuzz.deadline import Deadline
from tests.fuzz.models import Model
from tests.fuzz.nets import LEARNING_RATE, Net, Reference, loss_of, numbers_of
from tests.fuzz.programs import described
from tests.fuzz.run_programs import gathered_failures

_REFUSALS = (TypeError, ValueError, RuntimeError, NotImplementedError)


def warm_up() -> None:
    """Import all modules of torch's DDP, which takes seconds, before any limit starts.

    Collective: as ``run``.
    """
    TorchDDP(torch.nn.Linear(1, 1))


def run(model: Model, world: Any, deadline: Deadline) -> list[str]:
    """Train a model; return the failures of all ranks.

    Collective: over ``world``, and on torch's default group.
    """
    trainer = _Trainer(model, world, deadline)
    outcomes = {}
    try:
        trainer.train()
        outcomes["training"] = "right"
    except Exception as error:
        outcomes["training"] = "refused"
        if not model.may_refuse or not isinstance(error, _REFUSALS):
            trainer.fail(f"{type(error).__name__}: {error}")
            sys.stderr.write("".join(traceback.format_exception(error)))
            sys.stderr.flush()
    trainer.close()
    deadline.now("the verdict of all ranks")
    return gathered_failures(world, trainer.failures, outcomes)


class _Trainer:
    def __init__(self, model: Model, world: Any, deadline: Deadline) -> None:
        self._model, self._world, self._rank, self._deadline = model, world, world.rank, deadline
        self._reference = Reference(model)
        self._group: Any = None
        self.failures: list[str] = []

    def fail(self, what: str) -> None:
        self.failures.append(what)
        if len(self.failures) > 1:
            # One error shows in many parameters.
            return
        sys.stderr.write(
            f"seed {self._model.seed}, world rank {self._rank}: {what}\n  "
            f"{described(self._model)}\n"
        )
        sys.stderr.flush()

    def train(self) -> None:
        """Run the model's training loop."""
        model = self._model
        self._deadline.now("the constructor")
        net = Net(model)
        if model.in_backward:
            trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
            from torch.distributed.optim import _apply_optimizer_in_backward

            _apply_optimizer_in_backward(torch.optim.SGD, trained, {"lr": LEARNING_RATE})
        if model.is_torch:
            self._ddp: Any = TorchDDP(net, **dict(model.options))
        else:
            # torch's Join supports only torch's groups.
            if not model.torch_join:
                self._group = self._world.clone(f"model {model.seed}")
            self._ddp = DistributedDataParallel(
                net, process_group=self._group, **dict(model.options)
            )
        trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.SGD(trained, lr=LEARNING_RATE)
        if model.lone_forward and self._rank == 0:
            self._deadline.now("a forward pass of rank 0 alone")
            loss_of(self._ddp, model, 0, 999, False)
        if model.epochs:
            self._register(model.passes[0].hook)
            for epoch, counts in enumerate(model.epochs):
                self._epoch(epoch, counts)
        else:
            for place in range(len(model.passes)):
                self._pass(place)

    def close(self) -> None:
        """Close the model's group."""
        if self._group is not None:
            self._group.close()

    def _zero(self) -> None:
        self._optimizer.zero_grad(set_to_none=self._model.set_to_none)

    def _pass(self, place: int) -> None:
        model, step, reference, rank = (
            self._model,
            self._model.passes[place],
            self._reference,
            self._rank,
        )
        self._deadline.now(f"pass {place}")
        self._register(step.hook)
        if model.zero_first and not step.keeps and not model.in_backward:
            self._zero()
            for other in range(model.size):
                reference.zero(other)
        with self._ddp.no_sync() if step.micro else contextlib.nullcontext():
            for micro in range(step.micro):
                loss_of(
                    self._ddp, model, rank, numbers_of(place, micro), step.uses[rank]
                ).backward()
        losses = [
            loss_of(self._ddp, model, rank, numbers_of(place, step.micro + i), step.uses[rank])
            for i in range(step.forwards)
        ]
        loss = sum(losses)
        assert isinstance(loss, torch.Tensor)
        (loss * float("inf") if rank == step.poisoned else loss).backward()
        if step.poisoned is not None:
            # As a gradient scaler does: all ranks find non-finite gradients and skip the step.
            bad = [
                name
                for name, p in self._trained()
                if p.grad is not None and not p.grad.isfinite().all()
            ]
            if not bad:
                self.fail(
                    f"pass {place}: rank {step.poisoned}'s gradients are infinite, and this rank's "
                    "average is finite"
                )
            self._optimizer.zero_grad()
            for other in range(model.size):
                reference.gradients[other] = dict.fromkeys(reference.gradients[other])
            return
        reference.pass_of(place, step)
        if not model.in_backward:
            self._compare_gradients(f"pass {place}")
            self._optimizer.step()
        reference.step(0)
        self._compare_parameters(f"pass {place}")
        if not model.zero_first and not step.keeps and not model.in_backward:
            self._zero()
            for other in range(model.size):
                reference.zero(other)
        if model.in_backward:
            reference.gradients = [dict.fromkeys(own) for own in reference.gradients]

    def _epoch(self, epoch: int, counts: tuple[int, ...]) -> None:
        model, rank, uses = self._model, self._rank, self._model.passes[0].uses
        self._deadline.now(f"epoch {epoch}")
        context = (
            Join([self._ddp], divide_by_initial_world_size=model.by_initial)
            if model.torch_join
            else self._ddp.join(divide_by_initial_world_size=model.by_initial)
        )
        with context:
            for place in range(counts[rank]):
                if model.zero_first:
                    self._zero()
                loss_of(
                    self._ddp, model, rank, numbers_of(epoch * 10 + place, 0), uses[rank]
                ).backward()
                self._advance(epoch, counts, place)
                self._compare_gradients(f"epoch {epoch}, input {place}")
                self._optimizer.step()
                self._reference_end(counts, place)
                self._compare_parameters(f"epoch {epoch}, input {place}")
                if not model.zero_first:
                    self._zero()
        for place in range(counts[rank], max(counts)):
            self._advance(epoch, counts, place)
            self._reference_end(counts, place)
        self._compare_parameters(f"the end of epoch {epoch}")
        if model.checks_stale:
            self._compare_gradients(f"the end of epoch {epoch}")

    def _advance(self, epoch: int, counts: tuple[int, ...], place: int) -> None:
        """Run the reference's passes for all ranks with inputs, up to the averaged gradients."""
        model, reference = self._model, self._reference
        ranks = [rank for rank in range(model.size) if place < counts[rank]]
        for rank in ranks:
            if model.zero_first:
                reference.zero(rank)
            reference.add(rank, numbers_of(epoch * 10 + place, 0), model.passes[0].uses[rank])
        reference.average(ranks, model.size if model.by_initial else len(ranks))

    def _reference_end(self, counts: tuple[int, ...], place: int) -> None:
        ranks = [rank for rank in range(self._model.size) if place < counts[rank]]
        self._reference.step(ranks[0])
        if not self._model.zero_first:
            for rank in ranks:
                self._reference.zero(rank)

    def _register(self, hook: str) -> None:
        if not hook:
            return
        self._reference.take_hook(hook)
        register = self._ddp.register_comm_hook
        if self._model.is_torch:
            if hook == "powersgd":
                state = torch_powersgd.PowerSGDState(
                    None, matrix_approximation_rank=8, start_powerSGD_iter=2, min_compression_rate=0
                )
                register(state, torch_powersgd.powerSGD_hook)
                return
            register(
                None,
                torch_hooks.allreduce_hook
                if hook == "allreduce"
                else torch_hooks.fp16_compress_hook,
            )
            return
        if hook.startswith("powersgd"):
            ours = PowerSGDState(
                self._group,
                matrix_approximation_rank=8,
                start_powerSGD_iter=self._model.seed % 3,
                min_compression_rate=0,
                use_error_feedback=self._model.seed % 2 == 0,
                warm_start=self._model.seed % 5 > 0,
            )
            register(
                ours,
                our_hooks.fp16_compress_wrapper(powerSGD_hook)
                if hook == "powersgd_fp16"
                else powerSGD_hook,
            )
            return
        register(self._group, {
            "allreduce": our_hooks.allreduce_hook, "fp16_hook": our_hooks.fp16_compress_hook,
            "bf16_hook": our_hooks.bf16_compress_hook,
            "fp16_wrapper": our_hooks.fp16_compress_wrapper(our_hooks.allreduce_hook),
            "bf16_wrapper": our_hooks.bf16_compress_wrapper(our_hooks.allreduce_hook),
        }[hook])  # fmt: skip

    def _trained(self) -> list[tuple[str, torch.Tensor]]:
        return [
            (name, parameter)
            for name, parameter in self._ddp.module.named_parameters()
            if parameter.requires_grad
        ]

    def _compare_gradients(self, where: str) -> None:
        right = self._reference.gradients[self._rank]
        largest = max(
            [1e-6, *(float(g.abs().max()) for g in right.values() if g is not None and g.numel())]
        )
        for name, parameter in self._trained():
            got, want = parameter.grad, right[name]
            if (got is None) != (want is None):
                # zero_grad() before the first step has no gradient to zero; a zero gradient equals
                # a missing one.
                present = got if got is not None else want
                assert present is not None
                if present.to_dense().count_nonzero():
                    self.fail(f"{where}: gradient of {name}: expected {want}, got {got}")
            elif got is not None and want is not None:
                self._compare(
                    f"{where}: gradient of {name}", got.detach().to_dense(), want, largest
                )

    def _compare_parameters(self, where: str) -> None:
        right = self._reference.parameters()
        for name, parameter in self._trained():
            self._compare(
                f"{where}: parameter {name}", parameter.detach(), right[name].detach(), 1.0
            )

    def _compare(self, where: str, got: torch.Tensor, want: torch.Tensor, scale: float) -> None:
        if not got.numel():
            return
        error = float((got - want).abs().max())
        if not error <= self._reference.error * max(scale, float(want.abs().max())):
            self.fail(
                f"{where}: off by {error:.3g}, expected {want.flatten()[:4].tolist()}, got "
                f"{got.flatten()[:4].tolist()}"
            )
