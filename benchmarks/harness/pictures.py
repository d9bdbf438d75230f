"""PNG pictures of figures: one size of text, one width, and a palette of few colours.

Text is large enough to be read where a page shows the picture 400 pixels wide. A picture has the
checksum of the record that it was drawn from and no date, so that the same record gives the same
bytes with the same matplotlib.
"""

from __future__ import annotations

import contextlib
import hashlib
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from harness.palette import THEMES, Style, Theme
from mpidist import whole_file

# Draws a record: called with it and a theme, within ``settings`` of that theme.
Drawing: TypeAlias = Callable[[Mapping[str, Any], Theme], Any]

WIDTH_IN = 8.5
# 17 pixels where 850 show the width, 8 where 400 do.
TEXT_PT = 12
_DPI = 132
# Sharp text and bands of two transparencies need no more; a true-colour PNG is six times as large.
_COLORS = 64
_COLUMNS = 94


def settings(theme: Theme) -> dict[str, Any]:
    """Return matplotlib's settings while a figure of a theme is made and written."""
    colors = dict.fromkeys(
        (
            "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "text.color", "xtick.color",
            "ytick.color", "hatch.color",
        ),
        theme.ink,
    )  # fmt: skip
    papers = ("figure.facecolor", "axes.facecolor", "savefig.facecolor", "legend.facecolor")
    return {
        **colors,
        **dict.fromkeys(papers, theme.paper),
        "font.size": TEXT_PT,
        "axes.titlesize": TEXT_PT,
        "axes.labelsize": TEXT_PT,
        "figure.titlesize": TEXT_PT,
        "legend.fontsize": TEXT_PT,
        "xtick.labelsize": TEXT_PT,
        "ytick.labelsize": TEXT_PT,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": theme.grid,
        "grid.linewidth": 0.7,
        "hatch.linewidth": 0.8,
        "legend.frameon": False,
        "lines.linewidth": 1.6,
        "lines.markersize": 5,
    }


@contextlib.contextmanager
def _themed(theme: Theme) -> Iterator[None]:
    """Set matplotlib to its defaults, whatever the reader's own settings are, and to a theme."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(settings(theme))
        yield


def figure(drawing: Drawing, record: Mapping[str, Any], theme: Theme) -> Any:
    """Return the figure of a record."""
    with _themed(theme):
        made = drawing(record, theme)
        # Ticks take their colours when they are first laid out.
        made.draw_without_rendering()
    return made


def write(
    drawing: Drawing,
    record: Mapping[str, Any],
    path: Path,
    source: bytes,
    themes: Sequence[Theme] | None = None,
) -> list[Path]:
    """Write a record's picture in each theme; return the files.

    Args:
        drawing: Draws one theme.
        record: Data of the drawing.
        path: The light picture's; the dark one's name has a suffix.
        source: Bytes that the record was read from, for the checksum in the pictures.
        themes: Those to write; all if not given.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    written = []
    for theme in THEMES if themes is None else themes:
        target = path.with_name(f"{path.stem}{theme.suffix}{path.suffix}")
        with _themed(theme):
            _save(drawing(record, theme), target, source)
        written.append(target)
    return written


def source_checksum(path: Path) -> str:
    """Return the checksum in a picture of what it was drawn from; empty if it has none."""
    from PIL import Image

    with Image.open(path) as image:
        return image.info.get("Source", "")


def checksum(source: bytes) -> str:
    """Return the checksum of a record's bytes as pictures have it."""
    return f"sha256 {hashlib.sha256(source).hexdigest()}"


def _save(made: Any, path: Path, source: bytes) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    made.set_dpi(_DPI)
    canvas = FigureCanvasAgg(made)
    canvas.draw()
    size = canvas.get_width_height()
    pixels = Image.frombuffer("RGBA", size, canvas.buffer_rgba()).convert("RGB")
    few = pixels.quantize(_COLORS, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    about = PngInfo()
    about.add_text("Source", checksum(source))
    with whole_file.replacing(path) as file:
        few.save(file, "PNG", optimize=True, pnginfo=about)


def sheet(height_in: float, title: str, note: str) -> Any:
    """Return an empty figure with a title, and a note on what is drawn, above the panels."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    lines = [line for text in (title, note) for line in textwrap.wrap(text, _COLUMNS)]
    made.suptitle("\n".join(lines))
    made.get_layout_engine().set(h_pad=0.08, w_pad=0.06)
    return made


def panels(
    made: Any, count: int, columns: int, heights: Sequence[float] | None = None
) -> list[Any]:
    """Return ``count`` axes in rows of ``columns``; ``heights`` are those of the rows."""
    rows = -(-count // columns)
    axes = made.subplots(rows, columns, squeeze=False, height_ratios=heights).ravel().tolist()
    for spare in axes[count:]:
        made.delaxes(spare)
    return axes[:count]


def legend(made: Any, columns: int, of: Any = None) -> None:
    """Explain all lines and bars below the panels, each label once, as it was first drawn.

    Args:
        made: Figure, or part of one, below whose panels the legend stands.
        columns: The most.
        of: Figure whose lines and bars are meant; ``made`` if not given.
    """
    from matplotlib.lines import Line2D

    found: dict[str, Any] = {}
    for axes in (of or made).axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    # Equal rows: three and one look like a mistake.
    columns = 2 if len(found) == 4 else min(columns, len(found))
    below = made.legend(found.values(), found.keys(), loc="outside lower center", ncols=columns)
    for handle in below.legend_handles:
        handle.set_alpha(1)
        if isinstance(handle, Line2D):
            handle.set_markersize(max(handle.get_markersize(), 5))


def line(axes: Any, theme: Theme, style: Style, places: Sequence[Any], values: Any) -> Any:
    """Draw a labelled line with markers, and return it."""
    (drawn,) = axes.plot(
        places,
        values,
        color=style.color(theme),
        label=style.label,
        marker=style.marker,
        linestyle=style.line,
        markeredgewidth=0,
    )
    return drawn


def band(axes: Any, theme: Theme, style: Style, places: Sequence[Any], low: Any, high: Any) -> None:
    """Shade the spread around a line."""
    axes.fill_between(places, low, high, color=style.color(theme), alpha=0.2, linewidth=0)


def bars(
    axes: Any, theme: Theme, styles: Sequence[Style], values: Sequence[Mapping[str, Any]]
) -> None:
    """Draw horizontal bars, the first above, with whiskers from p10 to p90.

    Args:
        axes: Of the bars; labels stand at their left.
        theme: Of the picture.
        styles: One for each bar.
        values: ``median``, ``low`` and ``high`` of each bar, in the unit of the axis; no whiskers
            where the last two are equal.
    """
    for place, (style, value) in enumerate(zip(styles, values, strict=True)):
        median = value["median"]
        spread = [[max(median - value["low"], 0)], [max(value["high"] - median, 0)]]
        has_spread = value["high"] > value["low"]
        drawn = axes.barh(
            -place,
            median,
            xerr=spread if has_spread else None,
            color=style.color(theme),
            edgecolor=style.edge(theme),
            hatch=style.hatch,
            ecolor=theme.ink,
            capsize=2,
        )
        if has_spread:
            outline_whiskers(drawn, theme)
    axes.set_yticks([-place for place in range(len(styles))], [one.label for one in styles])
    axes.grid(visible=False, axis="y")


def outline_whiskers(drawn: Any, theme: Theme) -> None:
    """Draw the whiskers of bars on a stripe of paper, which shows them on dark bars, too."""
    from matplotlib.patheffects import withStroke

    _, _, stems = drawn.errorbar.lines
    for stem in stems:
        stem.set_path_effects([withStroke(linewidth=3, foreground=theme.paper)])
