"""Job of a benchmark: ranks of one thread each, a communicator of theirs, and rank 0's record."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

import mpidist.comm
from harness import benchmark_options, environment, plots, report


class Job:
    """Ranks of a benchmark, in a context at whose end the communicator is freed.

    Collective: constructed by all ranks, and left by all: an error on one rank ends the job.

    Args:
        least: Fewest ranks.
        uses_torch: The benchmark calls ``torch.distributed``, which is begun on mpidist.
        device: Named in the description of the environment if it is a GPU.

    Attributes:
        group: mpidist's group of all ranks.
        mpi: The module ``mpi4py.MPI``.
        raw: mpi4py communicator of all ranks.
        about: Environment of the measurement.
        rank: This rank.
        is_first: Whether it is rank 0, which prints and writes.
    """

    def __init__(
        self, least: int = 2, uses_torch: bool = False, device: torch.device | None = None
    ) -> None:
        torch.set_num_threads(1)
        if uses_torch:
            dist.init_process_group("mpidist")
        self.group = mpidist.comm.init()
        benchmark_options.require_ranks(self.group.size, least)
        # mpidist prepares the MPI library before the import of mpi4py.MPI starts MPI.
        from mpi4py import MPI

        self.mpi, self.raw = MPI, MPI.COMM_WORLD.Dup()
        self.about = environment.describe(self.raw, device)
        self.rank, self.is_first = self.group.rank, self.group.rank == 0

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            return
        self.raw.Barrier()
        self.raw.Free()
        # Gloo's threads must end before the interpreter does.
        if dist.is_initialized():
            dist.destroy_process_group()

    def show(self) -> None:
        """Print libraries, ranks, processor and binding, on rank 0."""
        about = self.about
        if self.is_first:
            versions = f"{about['mpi_library']}, torch {about['torch']}"
            print(f"{versions}, {about['ranks']} ranks, {environment.processor(about)}")
            load = about["load_average"][0]
            print(f"{environment.binding(about)}; load average {load}", flush=True)

    def write(
        self,
        folder: Path,
        benchmark: str,
        fields: dict[str, Any],
        verdicts: Sequence[dict[str, Any]] | None = None,
        parts: Sequence[str] = (),
        case: str = "",
    ) -> None:
        """Print the goals and write the record, with its plot if it has one; on rank 0.

        All results are checked before: a wrong one ends a run with an error.

        Args:
            folder: Of the record.
            benchmark: Its name, the first part of the file's; library and ranks follow.
            fields: Of the record, behind the environment.
            verdicts: Of the goals, the record's last field; None of a benchmark without goals.
            parts: Further parts of the file's name; empty ones are left out.
            case: Part of the file's name behind the benchmark's: a run of one case alone.
        """
        record = {
            "benchmark": benchmark,
            "environment": self.about,
            "results_checked": True,
            **fields,
        }
        if verdicts is not None:
            record["goals"] = verdicts
        if verdicts:
            print(f"\n{report.goals_table(verdicts)}", flush=True)
        library = environment.library_name(self.about)
        names = [benchmark, case, library, str(self.about["ranks"]), *parts]
        path = folder / f"{'-'.join(filter(None, names))}.json"
        report.write_json(record, path)
        print(f"\n{plots.written(path)}", flush=True)
