"""Figure of RPC with many workers: rates, start and memory over the number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness import environment, palette, pictures
from harness.palette import Theme

# Of a contender in a job: title of the panel, label of its axis.
_PANELS = {
    "async_calls_per_s": ("asynchronous calls, all ranks", "calls/s"),
    "sync_calls_per_s": ("synchronous calls, all ranks", "calls/s"),
    "start_s": ("init_rpc", "start, s"),
    "resident_after_calls_mib": ("memory of RPC after the calls", "MiB of a rank"),
}


def draw(record: Mapping[str, Any], theme: Theme) -> Any:
    """Draw a panel for each figure of a job."""
    jobs = record["jobs"]
    about = jobs[0]["environment"]
    made = pictures.sheet(
        6.4,
        f"RPC, all workers call all others: {about['mpi_library']}, torch "
        f"{about['torch'].partition('+')[0]}, {environment.processor(about)}",
        f"{about['logical_cores']} cores for all ranks, which take turns where they are more",
    )
    names = dict.fromkeys(name for job in jobs for name in job["contenders"])
    for axes, (key, (title, label)) in zip(
        pictures.panels(made, len(_PANELS), 2), _PANELS.items(), strict=True
    ):
        for name in names:
            found = [job for job in jobs if name in job["contenders"]]
            pictures.line(
                axes,
                theme,
                palette.contender(record["benchmark"], name),
                [job["ranks"] for job in found],
                [job["contenders"][name][key] for job in found],
            )
        axes.set(title=title, xscale="log", xlabel="ranks", ylabel=label)
        axes.set_ylim(bottom=0)
        counts = [job["ranks"] for job in jobs]
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.minorticks_off()
    if len(names) > 1:
        pictures.legend(made, 3)
    return made
