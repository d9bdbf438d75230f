"""README's first program, as the doctor tries it: a group of torch.distributed, one all_reduce.

``python -m mpidist.cli.first_program`` is the program of each rank; ``try_two_ranks`` starts two of
them as a child job. MPI alone may work where this does not: torch must find the plugin, and the
rendezvous must connect the ranks.
"""

from __future__ import annotations

from datetime import timedelta

from mpidist.comm.discovery import child_job

_MARKER = "mpidist-first-program"
_MODULE = "mpidist.cli.first_program"
_NUMEL = 1000
_TIMEOUT_S = 30.0


def all_reduce(timeout_s: float) -> str:
    """Initialise torch's default group on mpidist, sum a tensor over its ranks, end the group.

    Collective: over the job.

    Args:
        timeout_s: Limit in seconds of the group's operations.

    Returns:
        "" for the right sum, else what came.

    Raises:
        RuntimeError: What torch or mpidist raises.
    """
    import torch
    import torch.distributed as dist

    dist.init_process_group("mpidist", timeout=timedelta(seconds=timeout_s))
    try:
        tensor = torch.full((_NUMEL,), dist.get_rank() + 1.0)
        dist.all_reduce(tensor)
        expected = dist.get_world_size() * (dist.get_world_size() + 1) / 2
        is_right = bool((tensor == expected).all())
        return "" if is_right else f"expected {expected:g}, got {tensor[0].item():g}"
    finally:
        dist.destroy_process_group()


def try_two_ranks(library: str, silence_s: float) -> str:
    """Start two ranks of this program with the library's own mpirun.

    Local: one rank calls it. Blocks: until torch is imported twice, at most ``silence_s``.

    Args:
        library: The MPI library's description of itself.
        silence_s: Seconds without output after which the job is ended.

    Returns:
        "" if both ranks had the sum, else the reason of the failure.
    """
    ended, failure = child_job.answers(library, _MODULE, _MARKER, silence_s)
    failed = [text for text in ended if text != "fine"]
    if len(ended) == child_job.RANKS and not failed:
        return ""
    return failed[0] if failed else failure


def main() -> None:
    """Print the result of this rank."""
    print(_MARKER, all_reduce(_TIMEOUT_S) or "fine", flush=True)


if __name__ == "__main__":
    main()
