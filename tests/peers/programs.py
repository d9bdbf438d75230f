"""Programs of others as data: where they lie, how they start, what in them changes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import unified_diff


@dataclass(frozen=True)
class Edit:
    """Replacement in a copy of a program's file."""

    file: str  # in the program's folder
    pattern: str  # regular expression, over lines
    text: str
    for_cpu: bool = True  # the peer's run has it, too; else it is for mpidist


@dataclass(frozen=True)
class Program:
    """Program of a suite, and how it is started.

    ``{rank}`` and ``{size}`` in an argument are the rank and the number of ranks.
    """

    path: str  # in the folder of the sources, or module:NAME of an installed package
    ranks: int = 2
    args: tuple[str, ...] = ()
    start: str = "torchrun"  # or "spawn": processes by itself; or "ranks": one by one, by hand
    label: str = ""  # if a program has several rows
    devices: int = 0  # accelerators that it wants to see
    needs: tuple[str, ...] = ()  # modules
    data: str = ""  # of ``small_data``
    folder: str = ""  # that is copied; else the program's own
    says: str = ""  # regular expression that its output has when it has worked
    until: str = ""  # of a program that goes on for ever: it has worked when it says this
    limit_s: float = 120.0
    edits: tuple[Edit, ...] = ()
    environ: dict[str, str] = field(default_factory=dict)
    # The cause of a failure on mpidist, where it is known and not mpidist's.
    cause: str = ""

    @property
    def name(self) -> str:
        """Return the row's name."""
        return f"{self.path} {self.label}".strip()


class EditError(ValueError):
    """A program's text has no place for an edit."""


def edited(text: str, edits: Iterable[Edit]) -> str:
    """Return a file's text with edits applied."""
    for edit in edits:
        text, count = re.subn(edit.pattern, edit.text, text, flags=re.MULTILINE)
        if count == 0:
            raise EditError(f"{edit.file} has nothing like {edit.pattern!r}")
    return text


def changed_lines(before: str, after: str) -> int:
    """Return the number of lines that are new or other in ``after``, or gone from ``before``."""
    lines = list(unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm=""))[2:]
    added = sum(line.startswith("+") for line in lines)
    removed = sum(line.startswith("-") for line in lines)
    return max(added, removed)


def starts_of_processes(text: str) -> int:
    """Return the number of places where a program starts processes by torch.multiprocessing.

    Under MPI a user writes the call of the function there.
    """
    names = [
        node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
    ]
    return sum(name in ("spawn", "Process") for name in names)


RPC = "examples/distributed/rpc"
_TWO = {"devices": 2, "start": "spawn"}

EXAMPLES = (
    Program("examples/distributed/ddp/example.py", devices=2, says="training completed in rank 1"),
    Program(
        "examples/distributed/ddp-tutorial-series/multigpu_torchrun.py",
        args=("2", "1"),
        devices=2,
        says="Epoch 1 .*snapshot saved",
    ),
    Program(
        "examples/distributed/ddp-tutorial-series/multinode.py",
        args=("2", "1"),
        devices=2,
        says="Epoch 1 .*snapshot saved",
    ),
    Program(
        "examples/distributed/ddp-tutorial-series/multigpu.py",
        args=("2", "1"),
        devices=2,
        start="spawn",
        says="Epoch 1 .*checkpoint saved",
        edits=(Edit("multigpu.py", r"torch\.cuda\.device_count\(\)", "2"),),
    ),
    *(
        Program(
            "examples/distributed/FSDP2/example.py",
            args=args,
            label=label,
            devices=2,
            limit_s=240,
            edits=(
                Edit("example.py", r"n_layers=10", "n_layers=2"),
                Edit("example.py", r"batch_size = 32", "batch_size = 4"),
                Edit("example.py", r", device_id=device\)", ")"),
            ),
        )
        for args, label in (
            ((), ""),
            (("--explicit-prefetching",), "--explicit-prefetching"),
            (("--mixed-precision",), "--mixed-precision"),
            (("--dcp-api",), "--dcp-api"),
        )
    ),
    *(
        Program(
            f"examples/distributed/tensor_parallelism/{name}.py",
            ranks=ranks,
            devices=4,
            says="completed",
            limit_s=240,
        )
        for name, ranks in (
            ("tensor_parallel_example", 2),
            ("sequence_parallel_example", 2),
            ("fsdp_tp_example", 4),
        )
    ),
    Program(
        "examples/distributed/minGPT-ddp/mingpt/main.py",
        args=(
            "data_config.path=data/input.txt",
            "data_config.truncate=0.01",
            "data_config.block_size=16",
            "gpt_config.n_layer=2",
            "gpt_config.n_head=2",
            "gpt_config.n_embd=16",
            "trainer_config.max_epochs=1",
            "trainer_config.save_every=1",
            "trainer_config.data_loader_workers=0",
            "trainer_config.use_amp=False",
        ),
        devices=2,
        needs=("hydra", "omegaconf", "boto3", "fsspec"),
        says="Snapshot saved at epoch 1",
    ),
    Program(
        f"{RPC}/batch/parameter_server.py",
        ranks=6,
        **_TWO,
        needs=("torchvision",),
        says="Finish training",
        limit_s=300,
        edits=(Edit("parameter_server.py", r"image_([wh]) = 64", r"image_\1 = 32"),),
    ),
    Program(
        f"{RPC}/batch/reinforce.py",
        args=("--max-world-size", "3", "--num-episode", "2"),
        **_TWO,
        needs=("gymnasium",),
        says=r"^2, ",
        limit_s=300,
    ),
    Program(f"{RPC}/ddp_rpc/main.py", ranks=4, **_TWO, says="Training done for epoch 99"),
    *(
        Program(
            f"{RPC}/parameter_server/rpc_parameter_server.py",
            label=label,
            ranks=ranks,
            args=("--world_size={size}", "--rank={rank}"),
            start="ranks",
            needs=("torchvision",),
            data="mnist",
            says="Accuracy",
            limit_s=180,
            cause=cause,
        )
        for label, ranks, cause in (
            ("with one trainer", 2, ""),
            (
                "with two trainers",
                3,
                "a race of the example, reported with TensorPipe, too: a trainer's "
                "step changes the model between another's forward and backward pass "
                "([report](https://github.com/pytorch/examples/issues/856))",
            ),
        )
    ),
    Program(
        f"{RPC}/pipeline/main.py",
        ranks=3,
        start="spawn",
        needs=("torchvision",),
        says="number of splits = 8",
        limit_s=400,
        edits=(
            Edit("main.py", r'"cuda:[01]"', '"cpu"'),
            Edit("main.py", r"^batch_size = 120", "batch_size = 8"),
            Edit("main.py", r"^image_([wh]) = 128", r"image_\1 = 64"),
        ),
    ),
    Program(
        f"{RPC}/rl/main.py",
        args=("--log-interval", "1"),
        start="spawn",
        needs=("gymnasium",),
        until=r"Episode 3\b",
        limit_s=240,
    ),
    Program(f"{RPC}/rnn/main.py", start="spawn", says="Training epoch 9"),
    *(
        Program(
            "examples/imagenet/main.py",
            label=label,
            args=(
                *("--dummy", "-a", "squeezenet1_1", "-b", "4", "--epochs", "1", "-j", "0"),
                *("--no-accel", "--dist-backend", "gloo", *more),
            ),
            start=start,
            needs=("torchvision",),
            says=r"Acc@1\s+\d",
            limit_s=300,
            edits=(
                Edit("main.py", r"FakeData\(1281167,", "FakeData(8,"),
                Edit("main.py", r"FakeData\(50000,", "FakeData(8,"),
                *edits,
            ),
        )
        for label, start, more, edits in (
            ("", "torchrun", ("--dist-url", "env://"), ()),
            (
                "--multiprocessing-distributed",
                "spawn",
                (
                    *("--dist-url", "tcp://127.0.0.1:29509", "--multiprocessing-distributed"),
                    *("--world-size", "1", "--rank", "0"),
                ),
                (Edit("main.py", r"ngpus_per_node = 1$", "ngpus_per_node = 2"),),
            ),
        )
    ),
)

_NANO = (
    *("--dataset=small", "--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=32"),
    *("--batch_size=4", "--max_iters=6", "--eval_iters=2", "--eval_interval=3", "--log_interval=1"),
    *("--gradient_accumulation_steps=4", "--device=cpu", "--backend=gloo", "--dtype=float32"),
)
_NANO_EDITS = (
    Edit("train.py", r"device = f'cuda:\{ddp_local_rank\}'", "device = 'cpu'"),
    Edit("train.py", r"^\s*torch\.cuda\.set_device\(device\)\n", ""),
    Edit("train.py", r", device_ids=\[ddp_local_rank\]", ""),
)
NANOGPT = tuple(
    Program(
        "nanoGPT/train.py",
        label=f"--compile={compiled}",
        args=(*_NANO, f"--compile={compiled}"),
        data="characters",
        says=r"iter 6: loss",
        limit_s=limit_s,
        edits=_NANO_EDITS,
    )
    for compiled, limit_s in (("False", 120.0), ("True", 400.0))
)

_SCRIPTS = "module:accelerate.test_utils.scripts"
_ON_CPU = {"ACCELERATE_USE_CPU": "1"}
_DOWNLOADED = ("datasets", "evaluate", "transformers")  # they load models and data by these
_WITHOUT_JOIN = {
    "test_distributed_data_loop": "ranks have unlike numbers of batches, and wait for each other "
    "with Gloo, too: on CPUs Accelerate's `join_uneven_inputs` does nothing"
}
ACCELERATE = tuple(
    Program(
        f"{_SCRIPTS}.{name}",
        needs=("accelerate", *(_DOWNLOADED if name.startswith("external_deps") else ())),
        environ=_ON_CPU,
        limit_s=60 if name in _WITHOUT_JOIN else 300,
        cause=_WITHOUT_JOIN.get(name, ""),
    )
    for name in (
        "test_script",
        "test_sync",
        "test_ops",
        "test_distributed_data_loop",
        "test_ddp_comm_hook",
        "test_merge_weights",
        "external_deps.test_checkpointing",
        "external_deps.test_metrics",
        "external_deps.test_performance",
        "external_deps.test_peak_memory_usage",
    )
)

VISION = (
    Program(
        "vision/references/classification/train.py",
        args=(
            *("--device=cpu", "--model=squeezenet1_1", "--data-path=images", "--batch-size=4"),
            *("--epochs=1", "--workers=0", "--train-crop-size=32", "--val-crop-size=32"),
            *("--val-resize-size=32", "--output-dir=out"),
        ),
        needs=("torchvision", "PIL"),
        data="images",
        says="Training time",
        limit_s=240,
        edits=(
            Edit("utils.py", r"torch\.cuda\.set_device\(args\.gpu\)", "pass"),
            Edit("utils.py", r'device="cuda"', 'device="cpu"'),
            Edit("utils.py", r'args\.dist_backend = "nccl"', 'args.dist_backend = "gloo"'),
            Edit("train.py", r"device_ids=\[args\.gpu\]", "device_ids=None"),
        ),
    ),
)
