"""Results of training with embedding servers: text, and a plot and a JSON file."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mpidist import shipped, whole_file


@dataclass(frozen=True)
class Result:
    """Results of one trainer."""

    losses: list[float]  # per step, mean over the trainers
    # Prompts and the model's continuations; of the first trainer only.
    samples: list[tuple[str, str]]
    weights: str  # hash of the dense part
    # Loss of a model that knows only the frequencies of the words.
    by_frequency: float
    steps_per_s: float
    # Word numbers that a trainer sends to each server per step.
    numbers_bytes: int
    # Rows from all servers per step; their gradients have the same size.
    rows_bytes: int
    dense_bytes: int  # gradients averaged over the trainers

    @property
    def first(self) -> float:
        return self.losses[0]

    @property
    def last(self) -> float:
        """Return the mean loss of the last ten steps."""
        return sum(self.losses[-10:]) / len(self.losses[-10:])


def text(result: Result, trainers: int, servers: int) -> str:
    """Return the samples, the bytes per step, and the loss in the last line."""
    width = max(len(repr(prompt)) for prompt, _ in result.samples)
    return "\n".join(
        (
            "The likeliest words to follow:",
            *(f"  {prompt!r:{width}} ->  {more}" for prompt, more in result.samples),
            f"A step of each trainer: {_size(result.numbers_bytes)} of words' numbers to each "
            f"server, {_size(result.rows_bytes)} "
            f"of rows back, {_size(result.rows_bytes)} of their gradients to the server(s); "
            f"{_size(result.dense_bytes)} of dense gradients averaged over the trainers. "
            f"{result.steps_per_s:.0f} steps/s.",
            f"{trainers} trainer(s), {servers} server(s), {len(result.losses)} steps: "
            f"loss {result.first:.2f} -> {result.last:.2f} ({result.by_frequency:.2f} by words' "
            "frequencies alone)",
        )
    )


def write(result: Result, trainers: int, servers: int, folder: Path) -> None:
    """Write hybrid.json and hybrid.png."""
    # Only needed with a folder: colours are those of the benchmarks.
    sys.path.append(str(shipped.folder("benchmarks")))
    from harness import palette, pictures

    def draw(row: dict[str, Any], theme: palette.Theme) -> Any:
        figure = pictures.sheet(
            4.4,
            f"The next word: {trainers} trainer(s), embedding on {servers} server(s)",
            "mean over the trainers",
        )
        (axes,) = pictures.panels(figure, 1, 1)
        axes.plot(
            range(1, len(result.losses) + 1),
            result.losses,
            color=palette.OWN.color(theme),
            label="this model",
        )
        axes.axhline(
            result.by_frequency, color=theme.ink, linestyle="--", label="words' frequencies alone"
        )
        axes.set(xlabel="step", ylabel="training loss (nats a word)")
        pictures.legend(figure, 2)
        return figure

    row = {"trainers": trainers, "servers": servers, **asdict(result)}
    text = json.dumps(row, indent=1) + "\n"
    with whole_file.replacing(folder / "hybrid.json") as file:
        file.write(text.encode())
    pictures.write(draw, row, folder / "hybrid.png", text.encode(), [palette.LIGHT])


def _size(count: int) -> str:
    return f"{count / 1024:,.0f} KiB" if count >= 1024 else f"{count} bytes"
