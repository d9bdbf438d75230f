"""``DiLoCo``: inner steps without communication, averaged by an outer step every H of them.

After H steps of the inner optimizer each rank has a pseudo-gradient: the global parameters, which
are those after the last outer step, minus its own. A communication hook averages it, the outer
optimizer steps the global parameters by the average, and all ranks go on from there. With F
fragments a part of the parameters is averaged every H / F steps; with an overlap of T steps the
average runs while T more inner steps are computed, and is mixed into what they have reached.

Letters: W ranks; N elements; H inner steps; F fragments.

Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models" (arXiv
2311.08105), algorithm 1, for the outer optimizer and its defaults; "Streaming DiLoCo with
overlapping communication" (arXiv 2501.18512), algorithm 2, for fragments, overlap and mixture;
``torchft.local_sgd.DiLoCo`` for the sign of the pseudo-gradient, fragments as modules, ``sync`` and
the outer optimizer as an object on the module's parameters.
"""

from __future__ import annotations

import operator
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn.parameter import is_lazy

from mpidist import state_scalars
from mpidist.comm.algorithms.reduce_op import AVG
from mpidist.comm.consistency import comparing
from mpidist.comm.execution.work import Work
from mpidist.comm.group import ProcessGroup
from mpidist.comm.group_types import AnyGroup, Group
from mpidist.comm.mpi import rank_ranges
from mpidist.comm.world_group import default_group, native_group
from mpidist.ddp.buckets.ownership import ownership_of
from mpidist.ddp.buckets.settings import require_int, require_real
from mpidist.ddp.hooks.adaptive_state import AdaptiveState
from mpidist.ddp.hooks.compression_trial import powersgd_rank
from mpidist.ddp.hooks.default import allreduce_hook
from mpidist.ddp.hooks.grad_bucket import GradBucket
from mpidist.ddp.hooks.powersgd_state import PowerSGDState, serve
from mpidist.ddp.hooks.stages import BucketFuture, Hook, call_hook, overlaps_backward
from mpidist.ddp.hooks.torch_bucket import name_of
from mpidist.ddp.inner_optimizer import InnerOptimizer, is_sharded
from mpidist.ddp.outer_fragment import OuterFragment
from mpidist.ddp.outer_schedule import OuterSchedule, even_runs, runs_of
from mpidist.ddp.verification import broadcast_module, rows_of
from mpidist.errors import MpidistError

Optimizer = torch.optim.Optimizer
Tensor = torch.Tensor

_NAME = "DiLoCo"
_FORMAT = "mpidist.diloco 1"
# The outer optimizer of the paper, and its weight of a rank's own parameters where an average
# overlaps.
_LEARNING_RATE, _MOMENTUM, _ALPHA = 0.7, 0.9, 0.5
_TENSORS = ("global", "local")
# Of the rank that goes on from a state with the same bits.
_OWN = ("rank", "world_size", "replica", "is_sharded")
_KEYS = frozenset(
    (
        *_TENSORS,
        *_OWN,
        "format",
        "step",
        "begun",
        "averages",
        "outer",
        "inner",
        "hook",
    )
)


# Conditions of a rank's pseudo-gradient: there is none where its parameters have become others, and
# where they are the global ones (asked in ``sync`` alone) it is zero.
_NOT_FINITE, _FINITE, _CHANGED, _ZERO = range(4)


@dataclass
class _Average:
    """An average that has begun and is not merged."""

    fragment: int
    # Inner step behind which it is merged.
    due: int
    # Of this rank's parameters since the construction, if they have become others.
    change: str | None = None
    # By rank: is in ``sync``, inner steps, condition, sum of the buffers' forms. Complete once
    # ``gathered`` is.
    table: Tensor | None = None
    gathered: Work | None = None

    def wait_for_table(self) -> None:
        """Wait until the table is complete."""
        if self.gathered is not None:
            self.gathered.wait()

    def rows(self) -> list[list[int]]:
        """Return the table's rows; none of an average that was loaded."""
        return [] if self.table is None else self.table.view(-1, 4).tolist()

    def ranks_of(self, condition: int) -> list[int]:
        """Return the ranks whose pseudo-gradient is in a condition; none if it is not known."""
        return [rank for rank, row in enumerate(self.rows()) if row[2] == condition]


class DiLoCo:
    """Average a module every H steps of its optimizer, and not its gradients in each.

    The training loop stays as it is: a hook on ``inner.step()`` counts the steps, begins averages
    and merges them. Gradients are each rank's own, unless the module is also in a
    ``DistributedDataParallel`` on the ranks of a node, whose replicas then stay equal. Floating
    buffers (the statistics of BatchNorm) are averaged with the last fragment; other buffers, those
    registered later, and parameters that require no gradient are each rank's own.

    Collective: constructed by all ranks of the group, which then take the same number of steps, or
    end with ``sync``. Rank 0's parameters and buffers are broadcast.

    Args:
        module: The module, bare or wrapped; all of its parameters dense, and on devices of one
            type.
        inner: Optimizer of its parameters, on this rank; or sharded over the ranks (of a node) over
            which the module, a ``DistributedDataParallel``, averages gradients.
        outer: torch optimizer over the module's parameters, without state yet: from now on it
            holds their global copies, in the same groups. None: SGD with Nesterov's momentum of
            0.9 and a learning rate of 0.7.
        every: H.
        hook: Communication hook of ``mpidist.ddp``, of torch, or your own; averages one flat bucket
            of each dtype of a fragment.
        state: Its state; the group if None.
        process_group: A native group, or a torch group on the backend ``mpidist``. None: torch's
            default group if its backend is ``mpidist``, else all ranks of the job.
        fragments: F runs of parameters with about as many elements each, in their order in the
            module; or a list of modules, each of whose parameters are a fragment.
        overlap: Inner steps from the beginning of an average to its merge, below H.
        alpha: Weight of a rank's own parameters in the merge, 0 to 1; None: 0, with overlap 0.5.

    Attributes:
        inner: The inner optimizer.
        outer: The outer optimizer, for a scheduler of its learning rate.
        steps: Inner steps so far.

    Raises:
        TypeError: A number is no int or real, the hook is not callable or takes another group, or
            the module or an optimizer is of another kind.
        ValueError: A number is out of its range, a parameter has no shape yet, is sparse or a
            DTensor, the optimizers or fragments are of other parameters, the hook reduces to
            owners, its state keeps the errors of another module, the inner optimizer is sharded
            over ranks that do not have equal gradients, or another ``DiLoCo`` of these parameters
            is on it.
        DisagreementError: Settings, parameters or buffers differ between ranks, or another rank
            raised one of these (all ranks).
    """

    def __init__(
        self,
        module: torch.nn.Module,
        inner: Optimizer,
        outer: Optimizer | None = None,
        *,
        every: int,
        hook: Hook = allreduce_hook,
        state: object = None,
        process_group: AnyGroup = None,
        fragments: int | Sequence[torch.nn.Module] = 1,
        overlap: int = 0,
        alpha: float | None = None,
    ) -> None:
        self.module = module
        self.inner = inner
        self.hook = hook
        self.steps = 0
        self._begun = 0  # averages
        self._averages: list[_Average] = []
        self._given_state = state
        self._use(default_group() if process_group is None else process_group)
        with comparing(self._group, _NAME) as rows:
            named = _trained(module)
            # Names of the buffers that are averaged; all ranks have them here.
            self._averaged = list(_floating_buffers(module))
            _require_inner(inner, named)
            self._inner = InnerOptimizer(inner, module, self._group)
            runs = _runs(fragments, named)
            self.schedule = OuterSchedule(every, len(runs), overlap)
            self.alpha = _alpha_of(alpha, overlap)
            _require_hook(hook, self.state, self._group)
            serve(self.state, named)
            self.fragments = [
                OuterFragment([named[i][0] for i in run], [named[i][1] for i in run])
                for run in runs
            ]
            _require_outer(outer, inner, module, named)
            rows += [
                ("settings", str((self.schedule, self.alpha, name_of(hook)))),
                ("outer optimizer", _settings_of(outer)),
                *((f"fragment {n}", str(one.names)) for n, one in enumerate(self.fragments)),
                *rows_of(_all_state(module)),
            ]
        _warn_of_errors(self.state, self.alpha)
        broadcast_module(self._group, _all_state(module))
        with torch.no_grad():
            for fragment in self.fragments:
                fragment.restart()
                fragment.allocate(self._group)
        self.outer = self._on_copies(outer)
        self._handle = inner.register_step_post_hook(self._after_step)

    def remove(self) -> None:
        """Take the hook off the inner optimizer; averages on their way are not merged."""
        self._handle.remove()

    def sync(self) -> None:
        """Average all fragments now; then all ranks have the global parameters.

        For the end of the training, and before an evaluation. A rank that comes while others still
        take inner steps takes part in their averages, with the parameters that it has reached,
        until all have come. A fragment that all ranks hold as its last outer step left it takes
        none: by momentum alone it would be moved on.

        Collective: over the group.

        Blocks: until all ranks have called it.

        Raises:
            MpidistError: An average is not finite, or a rank's parameters have another dtype,
                device or shape than at the construction, or other ones require a gradient (all
                ranks).
        """
        with torch.no_grad():
            while self._averages:
                self._merge(self._averages[0])
            while (others := self._others_average()) is not None:
                self._merge(self._begin(others))
            for _ in self.fragments:
                average = self._announce(is_syncing=True)
                average.wait_for_table()
                if len(average.ranks_of(_ZERO)) == self._group.size:
                    self._pass_over(average)
                else:
                    self._merge(self._begin(average))
            for fragment in self.fragments:
                fragment.merge(0)

    # --- state ---

    def global_state(self, state: Mapping[str, Any], named: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return a module's state dict with the global parameters in place of this rank's.

        Args:
            state: The state dict.
            named: The module's parameters by their names in it.
        """
        copies = self._copies()
        return dict(state) | {
            name: copies[id(parameter)]
            for name, parameter in named.items()
            if id(parameter) in copies and name in state
        }

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state: parameters, both optimizers, the hook's state and the counters.

        Of a sharded inner optimizer it holds this rank's shard. Averages on their way are in it, so
        that a run goes on with the same bits. Tensors are not copied. Save it on each rank, between
        steps: ``checkpoint.save`` and ``commit`` do, as ``hook_state``.

        Blocks: until averages that have begun have arrived.
        """
        averages = []
        for average in self._averages:
            self._arrive(average)
            flats = [bucket.flat.clone() for bucket in self.fragments[average.fragment].buckets]
            averages.append({"fragment": average.fragment, "due": average.due, "flats": flats})
        return {
            "format": _FORMAT,
            "rank": self._group.rank,
            "world_size": self._group.size,
            "step": self.steps,
            "begun": self._begun,
            "global": dict(self._named("global_parameters")),
            "local": {name: own.detach() for name, own in self._named("parameters")},
            "averages": averages,
            "outer": self.outer.state_dict(),
            "inner": self._inner.state(),
            "is_sharded": self._inner.is_sharded,
            "replica": self._inner.replica,
            "hook": self._hook_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned; the group and the settings stay.

        The state of the same rank of as many ranks continues with the same bits, if the same ones
        average gradients in the inner steps. Another state brings what all ranks shared: the global
        parameters, from which this rank begins, the outer optimizer and averages on their way; with
        them the inner optimizer's state of the rank that saved it. The errors of PowerSGD, which
        were that rank's own, are dropped.

        Called by all ranks, between steps, with states of one save. Communicates among the ranks of
        a sharded inner optimizer alone.

        Raises:
            ValueError: ``state`` is no such state, of another module or fragments, or has a shard
                of an inner optimizer on other ranks; nothing has been loaded.
            DisagreementError: Another rank of the sharded inner optimizer refused.
        """
        with self._inner.agreeing():
            self._require_fits(state)
        is_own = self.continues(state)
        for fragment in self.fragments:
            fragment.settle()
        with torch.no_grad():
            for key, attribute in (("global", "global_parameters"), ("local", "parameters")):
                values = state[key if is_own else "global"]
                for name, tensor in self._named(attribute):
                    tensor.copy_(values[name])
            self._averages = []
            for held in state["averages"]:
                fragment = self.fragments[held["fragment"]]
                for bucket, flat in zip(fragment.buckets, held["flats"], strict=True):
                    bucket.flat.copy_(flat)
                self._averages.append(_Average(held["fragment"], held["due"]))
        state_scalars.load(self.outer, state["outer"])
        self._inner.load(state["inner"])
        self._load_hook_state(state["hook"], is_own)
        self.steps, self._begun = state["step"], state["begun"]

    def continues(self, state: Mapping[str, Any]) -> bool:
        """Return whether this rank goes on with the same bits from a state.

        The state is of the same rank, of as many ranks, and the same ones average their gradients.
        """
        own = self._group.rank, self._group.size, self._inner.replica, self._inner.is_sharded
        return own == tuple(state[key] for key in _OWN)

    # --- steps ---

    def _after_step(self, *_: object) -> None:
        """Merge averages that are due behind an inner step, and begin the next one."""
        self.steps += 1
        if not self._averages and not self.schedule.begins(self.steps):
            return
        with torch.no_grad():
            while self._averages and self._averages[0].due <= self.steps:
                self._merge(self._averages[0])
            if self.schedule.begins(self.steps):
                average = self._begin(self._announce(is_syncing=False))
                if average.due <= self.steps:
                    self._merge(average)

    def _begin(self, average: _Average) -> _Average:
        """Begin the next fragment's average, as announced. Collective: over the group."""
        number = average.fragment
        fragment = self.fragments[number]
        self._begun += 1
        is_last = number == len(self.fragments) - 1
        index = sum(len(one.buckets) for one in self.fragments[:number])
        fragment.average(self._call, self._group, index, is_last)
        # Behind the hook: where it has raised, the buckets hold no average.
        self._averages.append(average)
        if is_last:
            self._average_buffers(average)
        return average

    def _pass_over(self, average: _Average) -> None:
        """Take no average of the next fragment, but that of the buffers. Collective: as _begin."""
        self._begun += 1
        if average.fragment == len(self.fragments) - 1:
            self._average_buffers(average)

    def _announce(self, is_syncing: bool) -> _Average:
        """Compute the next pseudo-gradient; begin to gather what each rank is about to do.

        Collective: over the group.
        """
        number = self._begun % len(self.fragments)
        fragment = self.fragments[number]
        average = _Average(number, self.steps + self.schedule.overlap, self._change())
        condition = _CHANGED
        if average.change is None:
            fragment.subtract()
            condition = _FINITE if fragment.is_finite() else _NOT_FINITE
            if is_syncing and fragment.is_zero():
                condition = _ZERO
        forms = [(name, one.dtype, one.shape) for name, one in self._averaged_buffers().items()]
        own = torch.tensor(
            [is_syncing, self.steps, condition, zlib.crc32(str(forms).encode())], device="cpu"
        )
        average.table = torch.empty(own.numel() * self._group.size, dtype=own.dtype, device="cpu")
        overlaps = self.schedule.overlap and overlaps_backward(self._group, own)
        average.gathered = self._group.all_gather_into_tensor(
            average.table, own, async_op=bool(overlaps)
        )
        return average

    def _others_average(self) -> _Average | None:
        """Return the average that ranks with inner steps have announced, None where there is none.

        Collective: over the group.
        """
        average = self._announce(is_syncing=True)
        average.wait_for_table()
        rows = average.rows()
        if not all(is_syncing for is_syncing, *_ in rows):
            return average
        self.steps = max(steps for _, steps, *_ in rows)
        return None

    def _merge(self, average: _Average) -> None:
        """Step the global parameters by an average, and merge them into this rank's.

        Raises:
            MpidistError: The average is not finite, or a rank had no pseudo-gradient.
        """
        self._averages.remove(average)
        fragment = self.fragments[average.fragment]
        self._arrive(average)
        if changed := average.ranks_of(_CHANGED):
            raise MpidistError(
                f"{_NAME}: {average.change}"
                if average.change is not None
                else f"{_NAME}: the parameters of {rank_ranges.named(changed)} are no longer those "
                "of the construction"
            )
        if not fragment.is_finite():
            raise MpidistError(self._not_finite(average))
        fragment.step(self.outer)
        fragment.merge(self.alpha)

    def _arrive(self, average: _Average) -> None:
        average.wait_for_table()
        self.fragments[average.fragment].wait()

    def _averaged_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that are averaged, as they are now."""
        present = _floating_buffers(self.module) if self._averaged else {}
        return {name: present[name] for name in self._averaged if name in present}

    def _average_buffers(self, average: _Average) -> None:
        """Average the floating buffers. Collective: over the group.

        Raises:
            MpidistError: The buffers of the ranks differ in dtype or shape (all ranks).
        """
        if not self._averaged:
            return
        average.wait_for_table()
        sums = [row[3] for row in average.rows()]
        if others := [rank for rank, own in enumerate(sums) if own != sums[0]]:
            raise MpidistError(
                f"{_NAME}: the buffers {', '.join(self._averaged)} of {rank_ranges.named(others)} "
                "are of other dtypes or shapes than those of rank 0, and cannot be averaged"
            )
        buffers = list(self._averaged_buffers().values())
        for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
            same = [buffer for buffer in buffers if buffer.dtype == dtype]
            flat = torch.cat([buffer.reshape(-1) for buffer in same])
            self._group.all_reduce(flat, AVG)
            parts = flat.split([buffer.numel() for buffer in same])
            for buffer, part in zip(same, parts, strict=True):
                # A NaN of one rank stays on that rank.
                mean = part.view_as(buffer)
                buffer.copy_(torch.where(mean.isnan(), buffer, mean))

    def _call(self, bucket: GradBucket) -> BucketFuture:
        return call_hook(self.hook, self.state, bucket, self._group)

    def _not_finite(self, average: _Average) -> str:
        ranks = average.ranks_of(_NOT_FINITE)
        cause = (
            f"the parameters of {rank_ranges.named(ranks)} are not"
            if ranks
            else "those of all ranks are, and the hook's sum is not"
        )
        names = self.fragments[average.fragment].names
        return (
            f"{_NAME}: the average of {names[0]} to {names[-1]} that began before step "
            f"{average.due + 1} is not finite: {cause}. The global parameters are those before it, "
            "and global_state() has them"
        )

    def _change(self) -> str | None:
        """Return what has become of this rank's parameters since the construction, if anything."""
        for fragment in self.fragments:
            if (name := fragment.changed()) is not None:
                return (
                    f"parameter {name!r} has another dtype, device or shape than when {_NAME} was "
                    "constructed: move the module before"
                )
        known = self._copies()
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad and id(parameter) not in known:
                return (
                    f"parameter {name!r} requires a gradient, and did not when {_NAME} was "
                    "constructed: remove() it, and construct another"
                )
        return None

    # --- construction ---

    def _use(self, process_group: AnyGroup) -> None:
        self.process_group = process_group
        self._group: Group = native_group(process_group)
        self.state = self._given_state if self._given_state is not None else process_group

    def _on_copies(self, outer: Optimizer | None) -> Optimizer:
        """Return the outer optimizer with the global copies in place of the parameters."""
        copies = self._copies()
        if outer is None:
            return torch.optim.SGD(
                list(copies.values()), lr=_LEARNING_RATE, momentum=_MOMENTUM, nesterov=True
            )
        for group in outer.param_groups:
            group["params"] = [copies.get(id(held), held) for held in group["params"]]
        return outer

    def _copies(self) -> dict[int, Tensor]:
        """Return the global copies by the id of their parameter."""
        return {
            id(own): copy
            for fragment in self.fragments
            for own, copy in zip(fragment.parameters, fragment.global_parameters, strict=True)
        }

    def _named(self, attribute: str) -> list[tuple[str, Tensor]]:
        return [
            pair
            for fragment in self.fragments
            for pair in zip(fragment.names, getattr(fragment, attribute), strict=True)
        ]

    def _hook_state(self) -> object:
        has_state = self._given_state is not None and hasattr(self.state, "state_dict")
        return self.state.state_dict() if has_state else None  # type: ignore[attr-defined]

    def _load_hook_state(self, saved: Any, is_own: bool) -> None:
        if saved is None or not hasattr(self.state, "load_state_dict"):
            return
        # Errors are of the rank that saved them, and times of its ranks.
        if not is_own and isinstance(self.state, PowerSGDState):
            saved = saved | {"error_dict": {}}
        if not is_own and isinstance(self.state, AdaptiveState):
            powersgd = saved["powersgd"] | {"error_dict": {}}
            saved = saved | {"step_s": None, "decisions": [], "powersgd": powersgd}
        self.state.load_state_dict(saved)

    def _require_fits(self, state: object) -> None:
        if not isinstance(state, Mapping) or set(state) != _KEYS or state["format"] != _FORMAT:
            raise ValueError(f"the state is not what {_NAME}.state_dict returned")
        for key in _TENSORS:
            shapes = {name: own.shape for name, own in self._named("parameters")}
            saved = state[key]
            if {name: getattr(one, "shape", None) for name, one in saved.items()} != shapes:
                raise ValueError(f"the state is of another module: its {key} parameters differ")
        for held in state["averages"]:
            flats, number = held["flats"], held["fragment"]
            own = self.fragments[number].buckets if number < len(self.fragments) else []
            if [flat.shape for flat in flats] != [bucket.flat.shape for bucket in own]:
                raise ValueError(
                    "the state holds averages on their way of other fragments: load it with the "
                    "fragments of the run that saved it"
                )
        if state["is_sharded"] and not self.continues(state):
            raise ValueError(
                f"the state has a shard of an inner optimizer over ranks {state['replica']} of "
                f"{state['world_size']}, and this is rank {self._group.rank} of "
                f"{self._group.size}, whose inner optimizer is "
                + (f"of {self._inner.replica}" if self._inner.is_sharded else "not sharded")
                + ": checkpoint.load merges shards"
            )
        if (state["hook"] is None) == hasattr(self._given_state, "state_dict"):
            raise ValueError("the state is of another hook: one has a state, and the other has not")


def _trained(module: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Return names and parameters that require a gradient.

    Raises:
        TypeError: The module is none.
        ValueError: There is none, one has no shape yet, is sparse or a part of a DTensor, or the
            devices are of several types.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module must be a torch.nn.Module; got {type(module).__name__}")
    if lazy := [name for name, parameter in module.named_parameters() if is_lazy(parameter)]:
        raise ValueError(
            f"parameters {', '.join(lazy)} have no shape yet: run one forward pass of the module "
            "first"
        )
    for name, tensor in _all_state(module):
        if tensor.layout is not torch.strided:
            raise ValueError(f"{_NAME} needs dense parameters and buffers; {name!r} is sparse")
        # As FSDP2 makes them.
        if hasattr(tensor, "device_mesh"):
            raise ValueError(
                f"{_NAME} needs whole parameters and buffers on each rank; {name!r} is a DTensor"
            )
    named = [pair for pair in module.named_parameters() if pair[1].requires_grad]
    kinds = sorted({parameter.device.type for _, parameter in named})
    if len(kinds) != 1:
        raise ValueError(
            f"{_NAME} needs parameters that require a gradient, on one type of device; found "
            f"{len(named)} on {kinds}"
        )
    return named


def _all_state(module: torch.nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _floating_buffers(module: torch.nn.Module) -> dict[str, Tensor]:
    return {
        name: buffer
        for name, buffer in module.named_buffers()
        if buffer.is_floating_point() or buffer.is_complex()
    }


def _runs(
    fragments: int | Sequence[torch.nn.Module], named: Sequence[tuple[str, Tensor]]
) -> list[list[int]]:
    if isinstance(fragments, (list, tuple, torch.nn.ModuleList)):
        for part in fragments:
            if not isinstance(part, torch.nn.Module):
                raise TypeError(f"fragments must be modules; got {type(part).__name__}")
        members = [list(part.parameters()) for part in fragments]
        return runs_of(members, [parameter for _, parameter in named])
    require_int("fragments", fragments, least=1)
    count = operator.index(cast("int", fragments))
    return even_runs([parameter.numel() for _, parameter in named], count)


def _alpha_of(alpha: float | None, overlap: int) -> float:
    if alpha is None:
        return _ALPHA if overlap else 0.0
    require_real("alpha", alpha)
    if alpha > 1:
        raise ValueError(f"alpha must be at most 1; got {alpha}")
    return float(alpha)


def _require_hook(hook: object, state: object, group: Group) -> None:
    if not callable(hook):
        raise TypeError(f"hook must be callable; got {type(hook).__name__}")
    if ownership_of(hook) is not None:
        raise ValueError("hook must bring the averages to all ranks, and this one to owners")
    is_of_torch = str(getattr(hook, "__module__", "")).startswith("torch.")
    if is_of_torch and isinstance(state, ProcessGroup):
        raise TypeError(
            f"{name_of(hook)} is torch's and takes a torch group on the backend mpidist: give one "
            "as process_group, or the hook of this name in mpidist.ddp"
        )
    averaging = getattr(state, "process_group", state)
    if averaging is None or isinstance(averaging, (ProcessGroup, dist.ProcessGroup)):
        # torch's may be on another backend.
        ranks = (
            dist.get_process_group_ranks(averaging)
            if isinstance(averaging, dist.ProcessGroup)
            else native_group(averaging).world_ranks
        )
        if set(ranks) != set(group.world_ranks):
            raise ValueError(
                f"the hook's state is of ranks {list(ranks)} of the job, and process_group is of "
                f"{list(group.world_ranks)}: give both the same group"
            )


def _warn_of_errors(state: object, alpha: float) -> None:
    """Warn of PowerSGD's errors beside a mixture."""
    powersgd = state
    if isinstance(state, AdaptiveState) and state.decides:
        powersgd = state.powersgd if any(map(powersgd_rank, state.candidates)) else None
    if alpha and isinstance(powersgd, PowerSGDState) and powersgd.use_error_feedback:
        warnings.warn(
            f"{_NAME} with PowerSGD's errors and alpha={alpha:g} may diverge: what an average "
            "leaves out stays both in the errors and, by the mixture, in the ranks' parameters, "
            "and is added twice. Give PowerSGDState use_error_feedback=False, AdaptiveState "
            "candidates without PowerSGD, or alpha=0",
            stacklevel=3,
        )


def _require_inner(inner: object, named: Sequence[tuple[str, Tensor]]) -> None:
    if not isinstance(inner, Optimizer):
        raise TypeError(f"inner must be a torch.optim.Optimizer; got {type(inner).__name__}")
    if not _held(inner) & {id(parameter) for _, parameter in named}:
        raise ValueError("inner steps none of the module's parameters that require a gradient")
    own = {id(parameter) for _, parameter in named}
    for hook in inner._optimizer_step_post_hooks.values():
        other = getattr(hook, "__self__", None)
        if isinstance(other, DiLoCo) and own & other._copies().keys():
            raise ValueError(
                f"another {_NAME} of these parameters is on the inner optimizer: remove() it first"
            )


def _require_outer(
    outer: object, inner: object, module: torch.nn.Module, named: Sequence[tuple[str, Tensor]]
) -> None:
    if outer is None:
        return
    if outer is inner:
        raise ValueError("outer must be another optimizer than inner")
    if not isinstance(outer, Optimizer) or is_sharded(outer):
        raise TypeError(
            "outer must be a torch.optim.Optimizer of whole parameters, or None; got "
            f"{type(outer).__name__}"
        )
    if isinstance(outer, torch.optim.LBFGS):
        raise TypeError("outer must step by gradients alone; LBFGS calls a closure")
    if outer.state:
        raise ValueError(
            f"outer ({type(outer).__name__}) has state of the module's parameters, and {_NAME} "
            "steps copies of them: give a new optimizer, of a class that makes no state before its "
            f"first step (Adagrad does), and load its state with {_NAME}.load_state_dict"
        )
    if not {id(own) for _, own in named} <= _held(outer) <= set(map(id, module.parameters())):
        raise ValueError("outer must hold the module's parameters, all that require a gradient")


def _held(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _settings_of(outer: Optimizer | None) -> str:
    if outer is None:
        return "the default"
    groups = [
        (len(group["params"]), sorted((k, str(v)) for k, v in group.items() if k != "params"))
        for group in outer.param_groups
    ]
    return f"{type(outer).__name__} {groups}"
