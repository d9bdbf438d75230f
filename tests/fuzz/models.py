"""Random data-parallel models and training loops as plain data. Pure: equal on all ranks.

Letters: W ranks.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

FEATURES = (
    "torch",  # torch's DistributedDataParallel on mpidist's backend
    "join",  # uneven inputs
    "stale_gradients",  # a rank without inputs keeps its gradients into the next epoch
    "lone_forward",  # one rank runs a forward pass alone before the first step
    "non_finite",  # one non-finite gradient, as with AMP
    "in_backward",  # optimizers run within the backward pass
    "sparse",  # an embedding with sparse gradients
    "nothing",  # no parameter requires a gradient
    "hooks",
    "powersgd",
    "odd_strides",  # a parameter of one element with a stride other than 1
    "checkpoint",
    "static_graph",
    "unused",
)

HOOKS = (
    "allreduce",
    "fp16_hook",
    "bf16_hook",
    "fp16_wrapper",
    "bf16_wrapper",
    "powersgd",
    "powersgd_fp16",
)
TORCH_HOOKS = ("allreduce", "fp16_hook", "powersgd")


@dataclass(frozen=True)
class Block:
    """Part of a model between two hidden states.

    Attributes:
        kind: "linear", "shared" (block ``of`` again), "frozen", "unused" (on all ranks),
            "sometimes" (used where ``Pass.uses`` is set), "scalar", "transposed", "one" (x[::4] of
            four elements), "empty", "conv" (channels last), "norm", "complex", "single" (fp32),
            "embedding", "sparse", "counter" (a buffer).
        checkpoint: "", "reentrant" or "plain".
    """

    kind: str
    of: int = 0
    checkpoint: str = ""


@dataclass(frozen=True)
class Pass:
    """Passes of all ranks for one optimizer step.

    Attributes:
        micro: Forward and backward passes under no_sync before the averaged one.
        forwards: Forward passes before the averaged backward pass.
        uses: By rank, whether it uses the blocks of kind "sometimes".
        poisoned: Rank with an infinite loss.
        hook: Hook to register before the pass; "" for none.
        keeps: Gradients accumulate instead of being zeroed.
    """

    uses: tuple[bool, ...]
    micro: int = 0
    forwards: int = 1
    poisoned: int | None = None
    hook: str = ""
    keeps: bool = False


@dataclass(frozen=True)
class Model:
    """Model and its training loop.

    Attributes:
        is_torch: Uses torch's module.
        options: Arguments of the module's constructor.
        zero_first: zero_grad runs before the forward pass, else after the optimizer's step.
        epochs: By epoch, each rank's number of inputs under join; empty without join.
        by_initial: ``divide_by_initial_world_size``.
        torch_join: torch's ``Join`` wraps mpidist's module.
        checks_stale: Under join, the gradients of ranks without inputs are compared after each
            epoch.
        may_refuse: An equal error on all ranks is also right.
    """

    seed: int
    size: int
    width: int
    blocks: tuple[Block, ...]
    is_torch: bool
    options: tuple[tuple[str, object], ...]
    passes: tuple[Pass, ...]
    zero_first: bool
    set_to_none: bool
    epochs: tuple[tuple[int, ...], ...] = ()
    by_initial: bool = True
    torch_join: bool = False
    lone_forward: bool = False
    in_backward: bool = False
    checks_stale: bool = True
    may_refuse: bool = False


def model(seed: int, size: int, without: Sequence[str] = ()) -> Model:
    """Return the model of a seed for ``size`` ranks, without the named features."""
    return _Maker(seed, size, frozenset(without)).model()


class _Maker:
    def __init__(self, seed: int, size: int, without: frozenset[str]) -> None:
        self.seed, self.size, self.without = seed, size, without
        self.rng = random.Random(f"model {seed}")

    def has(self, feature: str, chance: float) -> bool:
        return self.rng.random() < chance and feature not in self.without

    def model(self) -> Model:
        rng = self.rng
        if self.has("nothing", 0.01):
            return self.assemble((Block("frozen"),), may_refuse=True)
        is_static = self.has("static_graph", 0.25)
        finds = not is_static and rng.random() < 0.35
        blocks = self.blocks(is_static, finds)
        if finds and self.has("unused", 0.7):
            blocks = (*blocks, Block(rng.choice(("unused", "sometimes"))))
        elif is_static and self.has("unused", 0.3):
            blocks = (*blocks, Block("unused"))
        if (
            not is_static
            and not any(block.checkpoint for block in blocks)
            and self.has("sparse", 0.02)
        ):
            return self.assemble((*blocks, Block("sparse")), may_refuse=True)
        if self.has("in_backward", 0.02):
            return self.assemble(
                tuple(b for b in blocks if not b.checkpoint), in_backward=True, may_refuse=True
            )
        return self.assemble(blocks, is_static, finds)

    def blocks(self, is_static: bool, finds: bool) -> tuple[Block, ...]:
        rng = self.rng
        kinds = ["linear"] * 4 + [
            "shared",
            "frozen",
            "scalar",
            "transposed",
            "empty",
            "conv",
            "norm",
            "complex",
            "single",
        ]
        kinds += ["embedding", "counter"] + ["one"] * ("odd_strides" not in self.without)
        blocks = [Block("linear")]
        for _ in range(rng.randint(1, 6)):
            kind = rng.choice(kinds)
            checkpoint = ""
            if kind in ("linear", "norm", "shared", "scalar") and self.has("checkpoint", 0.3):
                # A re-entrant segment runs its own backward pass, which find_unused_parameters does
                # not see.
                checkpoint = "plain" if finds else rng.choice(("plain", "reentrant"))
            of = rng.choice([i for i, block in enumerate(blocks) if block.kind == "linear"])
            if (
                kind == "shared"
                and not is_static
                and (checkpoint == "reentrant" or blocks[of].checkpoint == "reentrant")
            ):
                continue
            blocks.append(Block(kind, of if kind == "shared" else 0, checkpoint))
        return tuple(blocks)

    def assemble(
        self,
        blocks: tuple[Block, ...],
        is_static: bool = False,
        finds: bool = False,
        in_backward: bool = False,
        may_refuse: bool = False,
    ) -> Model:
        rng, size = self.rng, self.size
        # torch's module halves dense gradients of several dtypes next to sparse ones, also on Gloo.
        is_torch = self.has("torch", 0.35) and not in_backward and not may_refuse
        is_plain = not (in_backward or may_refuse)
        options: dict[str, object] = {
            "find_unused_parameters": finds,
            "static_graph": is_static,
            "gradient_as_bucket_view": rng.random() < 0.5,
        }
        if rng.random() < 0.7:
            options["bucket_cap_mb"] = rng.choice((1e-5, 5e-4, 2e-3, 1.0))
        if not is_torch and rng.random() < 0.2:
            options["most_buckets"] = rng.randint(1, 3)
        if not is_torch and rng.random() < 0.2:
            options["broadcast_buffers"] = False
        epochs: tuple[tuple[int, ...], ...] = ()
        zero_first, set_to_none = rng.random() < 0.5, rng.random() < 0.5
        # torch's join does not shadow the communication of torch's static graphs.
        if is_plain and size > 1 and not (is_torch and is_static) and self.has("join", 0.25):
            epochs = tuple(
                tuple(rng.randrange(4) for _ in range(size)) for _ in range(rng.randint(1, 3))
            )
            if is_torch:
                # Otherwise torch's join writes into the gradients.
                options["gradient_as_bucket_view"] = False
            if is_torch and finds:
                # torch fills the map of used parameters that a rank without inputs sends in the
                # rank's first backward pass: before, memory as it comes tells that all are used.
                epochs = (tuple(max(1, count) for count in epochs[0]), *epochs[1:])
            if "stale_gradients" in self.without:
                zero_first = True
        by_initial = rng.random() < 0.6
        hooks = is_plain and by_initial and self.has("hooks", 0.35)
        passes = self.passes(blocks, is_static, finds, is_torch, hooks, bool(epochs), is_plain)
        # Other ranks do not shadow this pass of one rank, so it must not communicate: no buffers.
        may_be_alone = (
            is_plain
            and not any(block.kind == "counter" for block in blocks)
            and not finds
            and not is_static
        )
        # torch's reducer would confuse the next backward pass with this one.
        may_be_alone = may_be_alone and not is_torch
        return Model(
            seed=self.seed,
            size=size,
            width=rng.choice((2, 4, 6)),
            blocks=blocks,
            is_torch=is_torch,
            options=tuple(options.items()),
            passes=passes,
            zero_first=zero_first,
            set_to_none=set_to_none,
            epochs=epochs,
            by_initial=by_initial,
            torch_join=bool(epochs) and not is_torch and rng.random() < 0.4,
            lone_forward=may_be_alone and self.has("lone_forward", 0.1),
            in_backward=in_backward,
            may_refuse=may_refuse,
            checks_stale="stale_gradients" not in self.without,
        )

    def passes(
        self,
        blocks: tuple[Block, ...],
        is_static: bool,
        finds: bool,
        is_torch: bool,
        hooks: bool,
        joins: bool,
        is_plain: bool,
    ) -> tuple[Pass, ...]:
        rng, size = self.rng, self.size
        may_vary = is_plain and not is_static and not joins
        has_reentrant = any(block.checkpoint == "reentrant" for block in blocks)
        passes_drawn = []
        count = 1 if joins else rng.randint(1, 4)
        poisoned_at = (
            rng.randrange(count)
            if is_plain and not joins and self.has("non_finite", 0.12)
            else None
        )
        for place in range(count):
            # torch's PowerSGD supports neither complex parameters nor empty ones, nor those without
            # a dimension.
            is_odd = any(block.kind in ("empty", "complex", "scalar") for block in blocks)
            fits = "powersgd" not in self.without and not (is_torch and is_odd)
            names = [
                hook
                for hook in (TORCH_HOOKS if is_torch else HOOKS)
                # torch's PowerSGD calls collectives in callbacks, whose order is another one on a
                # rank without inputs: the job hangs on Gloo, and mixes averages on mpidist.
                if (fits and not (is_torch and joins)) or "powersgd" not in hook
            ]
            # torch allows one hook per module, registered before the first pass.
            hook = (
                rng.choice(names)
                if hooks and (place == 0 or (not is_torch and rng.random() < 0.4))
                else ""
            )
            passes_drawn.append(
                Pass(
                    uses=tuple(rng.random() < 0.5 for _ in range(size)),
                    micro=rng.choice((0, 0, 0, 1, 2)) if may_vary else 0,
                    forwards=2
                    if may_vary and not finds and not has_reentrant and rng.random() < 0.15
                    else 1,
                    poisoned=rng.randrange(size) if place == poisoned_at else None,
                    hook=hook,
                    keeps=may_vary and place != poisoned_at and rng.random() < 0.15,
                )
            )
        return tuple(passes_drawn)
