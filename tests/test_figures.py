"""Figures: legible at 400 pixels, nothing on top of data, alike to no red-green-blind reader."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import re

import numpy as np
import pytest

from tests.tools.support import ROOT, missing

pytestmark = pytest.mark.slow

BENCHMARKS = ROOT / "benchmarks"
RESULTS = BENCHMARKS / "results"
# One record of each form of figure; all records have the same drawings.
FORMS = (
    "allocate-openmpi-2", "autograd-openmpi-3", "collectives-openmpi-2", "ddp-openmpi-2",
    "device-openmpi-2-nvidia-h100-80gb-hbm3", "growth-openmpi-2", "kernels-nvidia-h100-80gb-hbm3",
    "messages-openmpi-2", "oss-openmpi-2", "owners-openmpi-2", "powersgd-mpich-2-1gbit",
    "replay-simgrid",
    "rpc-openmpi-2", "rpc-scale-openmpi", "scaling-openmpi",
)  # fmt: skip

NEWER = {
    "ddp": ("noop_hook, copies", "mpidist, copies"),
    "powersgd": (
        "quantization_pertensor_hook", "quantization_perchannel_hook",
        "torch's quantization_pertensor_hook",
    ),
}  # fmt: skip

# Pixels of text where a page shows a figure 850 and 400 pixels wide.
LEAST_TEXT_PX = {850: 9, 400: 6}
# Of two colours of one plot in CIELAB; two that differ by 2.3 can just be told apart side by side
# (Mahy, Van Eycken and Oosterlinck 1994).
LEAST_DISTANCE = 10
LEAST_CONTRAST = 3  # of graphics, WCAG 2.2, 1.4.11
PICTURE_BYTES = 100_000

# Complete loss of one kind of cone, on linear sRGB: Machado, Oliveira and Fernandes 2009, "A
# Physiologically-based Model for Simulation of Color Vision Deficiency", severity 1.0.
VISION = {
    "normal": np.eye(3),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
}
# Linear sRGB to XYZ with the white of D65: IEC 61966-2-1.
_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


@pytest.fixture
def module(monkeypatch):
    for name in ("matplotlib", "psutil", "rich"):
        if importlib.util.find_spec(name) is None:
            missing(f"{name} is not installed")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


# --- colours ---


def linear(color: str) -> np.ndarray:
    """Return linear sRGB of ``#rrggbb``."""
    values = np.array([int(color[start : start + 2], 16) for start in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(color: str, kind: str = "normal") -> np.ndarray:
    """Return a colour in CIELAB as a reader with this kind of vision sees it."""
    seen = np.clip(VISION[kind] @ linear(color), 0, 1)
    ratio = (_XYZ @ seen) / _XYZ.sum(axis=1)
    root = np.where(ratio > (6 / 29) ** 3, np.cbrt(ratio), ratio / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * root[1] - 16, 500 * (root[0] - root[1]), 200 * (root[1] - root[2])])


def distance(one: str, other: str) -> float:
    """Return the distance of two colours to the reader who sees them least apart."""
    return min(float(np.linalg.norm(lab(one, kind) - lab(other, kind))) for kind in VISION)


def contrast(one: str, other: str) -> float:
    lights = sorted((float(_XYZ[1] @ linear(color)) for color in (one, other)), reverse=True)
    return (lights[0] + 0.05) / (lights[1] + 0.05)


def test_the_simulation_knows_red_from_green_as_readers_do():
    assert np.allclose(lab("#ffffff"), (100, 0, 0), atol=0.1)
    assert np.linalg.norm(lab("#c04000") - lab("#707000")) > 50
    assert distance("#c04000", "#707000") < LEAST_DISTANCE < distance("#0000c0", "#707000")
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


def alike(styles, theme) -> list[str]:
    """Return pairs of styles that a reader may take for each other."""
    return [
        f"{one.label or one.marker} and {other.label or other.marker}{theme.suffix}"
        for one, other in itertools.combinations(styles, 2)
        if distance(one.color(theme), other.color(theme)) < LEAST_DISTANCE
    ]


def drawn_together(record) -> list[list[str]]:
    """Return contenders that one legend explains: those of all lines, and of each list of bars."""
    results = record.get("results") or [*record.get("copies", ()), *record.get("powersgd", ())]
    if not isinstance(results, list):
        return []
    lines = dict.fromkeys(
        name for one in results if one.get("size_bytes") for name in one["contenders"]
    )
    lists = [
        list(one["contenders"])
        for one in results
        if not one.get("size_bytes") and not one.get("operation", "").startswith("parts of")
    ]
    return [list(lines), *lists]


def test_no_two_contenders_of_a_plot_look_alike(module):
    palette, plots = module("harness.palette"), module("harness.plots")
    plotted = [json.loads(path.read_text()) for path in plots.plotted(RESULTS)]
    assert len(plotted) >= 26
    found = {
        (record["benchmark"], *names) for record in plotted for names in drawn_together(record)
    }
    # Contenders that the committed records lack, and the next ones have.
    found |= {
        (benchmark, *names, *NEWER[benchmark])
        for benchmark, *names in found
        if benchmark in NEWER and len(names) > 8
    }
    assert len(found) > 24
    for (benchmark, *names), theme in itertools.product(found, palette.THEMES):
        assert alike([palette.contender(benchmark, name) for name in names], theme) == []
    for theme in palette.THEMES:
        assert alike(palette.SERIES, theme) == []
        same = palette.named(palette.OWN, "another")
        assert alike([palette.OWN, same], theme) == [f"mpidist and another{theme.suffix}"]


def test_an_implementation_has_one_colour_that_stands_out(module):
    palette = module("harness.palette")
    benchmarks = ("collectives", "messages", "ddp", "powersgd", "oss")
    for theme in palette.THEMES:
        for name, style in {
            "torch on mpidist": palette.TORCH_ON_MPIDIST,
            "torch on Gloo": palette.TORCH_ON_GLOO,
        }.items():
            assert {
                palette.contender(benchmark, name).color(theme)
                for benchmark in ("ddp", "powersgd", "oss")
            } == {style.color(theme)}
        for benchmark in benchmarks:
            own = "native" if benchmark in ("collectives", "messages") else "mpidist"
            if benchmark != "powersgd":
                assert palette.contender(benchmark, own).color(theme) == palette.OWN.color(theme)
        styles = [one for one in vars(palette).values() if isinstance(one, palette.Style)]
        faint = [
            one.label
            for one in (*styles, *palette.SERIES)
            if contrast(one.edge(theme), theme.paper) < LEAST_CONTRAST
        ]
        assert not faint and contrast(theme.ink, theme.paper) > 10


# --- layout ---


@pytest.fixture(scope="module")
def made():
    """Return figures by name, laid out once for all tests of this file."""
    kept: dict[str, object] = {}

    def figure(module, name):
        if name not in kept:
            record = json.loads((RESULTS / f"{name}.json").read_text())
            drawing = module("harness.plots").drawing_of(record)
            kept[name] = module("harness.pictures").figure(
                drawing, record, module("harness.palette").LIGHT
            )
        return kept[name]

    return figure


def texts_of(figure) -> list:
    """Return the texts that a reader sees."""
    from matplotlib.text import Text

    axes = figure.axes
    inside = {
        label: one
        for one in axes
        for axis, limits in ((one.xaxis, one.get_xlim()), (one.yaxis, one.get_ylim()))
        for tick, label in zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=False)
        if min(limits) <= tick <= max(limits)
    }
    ticks = {
        label
        for one in axes
        for axis in (one.xaxis, one.yaxis)
        for label in (*axis.get_ticklabels(), *axis.get_ticklabels(minor=True))
    }
    return [
        text
        for text in figure.findobj(Text)
        if text.get_text().strip() and text.get_visible() and (text not in ticks or text in inside)
    ]


def on_top(figure) -> list[str]:
    """Return texts that overlap each other, and legends that overlap lines or bars."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle
    from matplotlib.transforms import Bbox

    boxes = [(text.get_text(), text.get_window_extent()) for text in texts_of(figure)]
    found = [
        f"{one} on {other}"
        for (one, box), (other, second) in itertools.combinations(boxes, 2)
        if box.padded(-1).overlaps(second.padded(-1))
    ]
    legends = [legend for one in (figure, *figure.subfigs) for legend in one.legends]
    for legend in [*legends, *filter(None, (axes.get_legend() for axes in figure.axes))]:
        for axes in figure.axes:
            # Data is clipped to its panel: a bar on a logarithmic axis begins far below.
            box = Bbox.intersection(legend.get_window_extent(), axes.bbox)
            for part in axes.get_children():
                is_data = part is not axes.patch and isinstance(part, (Line2D, Rectangle))
                if (
                    is_data
                    and box
                    and part.get_transform()
                    .transform_path(part.get_path())
                    .intersects_bbox(box, filled=isinstance(part, Rectangle))
                ):
                    found.append(f"legend on {part.get_label()} of {axes.get_title()}")
    return found


@pytest.mark.parametrize("name", FORMS)
def test_a_figure_is_legible_and_nothing_lies_on_its_data(module, made, name):
    figure = made(module, name)
    texts = texts_of(figure)
    assert len(texts) > 10
    for width_px, least_px in LEAST_TEXT_PX.items():
        points = width_px / figure.get_figwidth() / 72
        assert min(text.get_fontsize() for text in texts) * points >= least_px
    assert on_top(figure) == []
    for text in texts:
        box = text.get_window_extent()
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1, text.get_text()
        assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1, text.get_text()


@pytest.mark.parametrize("name", FORMS)
def test_every_axis_of_a_figure_has_a_unit(module, made, name):
    units = ("s a step", "s a call", "µs a", "ms", "bytes", "elements", "GB/s", "MiB of", "calls/s")
    counts = ("ranks", "rank of PowerSGD", "number of ", "(1: perfect)", ", s")
    for axes in made(module, name).axes:
        assert any(word in axes.get_xlabel() for word in units + counts), axes.get_title()
        # A list of bars has the contenders' names there, or beside the panel at its left; rows of
        # marks have the calls' names.
        is_list = any(bar.get_x() == 0 and bar.get_width() > 0 for bar in axes.patches)
        is_list |= any(tick.get_text()[:1].isalpha() for tick in axes.get_yticklabels())
        assert is_list or any(word in axes.get_ylabel() for word in units + counts)


@pytest.fixture
def demo(module, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return module("demo_report")


def of_method(name, place):
    """Return results of a training of 30 epochs."""
    falling = [2.3 / (epoch + 1) ** (1 + place / 20) for epoch in range(30)]
    return {
        "method": name,
        "losses": falling,
        "accuracies": [1 - loss / 10 for loss in falling],
        "bytes_per_step": 600_000 / (place + 1),
        "uncompressed_bytes": 600_000,
        "exposed_ms": 0.5 + place,
    }


METHODS = ["allreduce", "fp16", "powersgd-1", "powersgd-2", "powersgd-4", "allreduce, OSS"]


def test_the_plots_of_the_demo_are_legible(module, demo):
    pictures, palette = module("harness.pictures"), module("harness.palette")
    rows = [of_method(name, place) for place, name in enumerate(METHODS)]
    data = {"results": rows, "ranks": 2, "wanted": 0.97}
    for drawing in (demo.training_figure, demo.link_figure):
        figure = pictures.figure(drawing, data, palette.LIGHT)
        assert on_top(figure) == []
        sizes = [text.get_fontsize() for text in texts_of(figure)]
        assert min(sizes) * 400 / figure.get_figwidth() / 72 >= LEAST_TEXT_PX[400]
    assert "RECORDED" in figure.get_suptitle() and "AMD EPYC" in figure.get_suptitle()
    for theme in palette.THEMES:
        assert alike([demo.style_of(name) for name in METHODS], theme) == []


def test_the_demo_says_why_compression_is_slower_within_a_node(demo):
    rows = [of_method(name, place) for place, name in enumerate(METHODS)]
    within, between = (demo.explanation(rows, is_one_node=one) for one in (True, False))
    assert max(map(len, within.splitlines())) <= 80
    within, between = " ".join(within.split()), " ".join(between.split())
    assert "4 of 4 compressing hooks took longer" in within and "are on one node" in within
    assert "compressing hooks" not in between and within.endswith(between)
    assert "Recorded, not measured now" in between and "315 ms uncompressed" in between
    quick = demo.explanation(rows[:1], is_one_node=True)
    assert " ".join(quick.split()) == between


def test_what_lies_on_data_is_seen(module):
    pictures, palette = module("harness.pictures"), module("harness.palette")

    def drawing(_, theme):
        figure = pictures.sheet(4, "title", "note")
        (axes,) = pictures.panels(figure, 1, 1)
        pictures.line(axes, theme, palette.OWN, [0, 1], [0, 1])
        axes.legend(loc="center")
        axes.text(0.5, 0.9, "one")
        axes.text(0.5, 0.9, "other")
        return figure

    found = on_top(pictures.figure(drawing, {}, palette.DARK))
    assert "one on other" in found and "legend on mpidist of " in found


# --- files ---


def test_the_pictures_belong_to_their_records(module):
    pictures, plots = module("harness.pictures"), module("harness.plots")
    palette = module("harness.palette")
    expected = set()
    for path in plots.plotted(RESULTS):
        stems = [path.stem, *([f"{path.stem}-excerpt"] if path.stem in plots.EXCERPTS else [])]
        for stem, theme in itertools.product(stems, palette.THEMES):
            picture = RESULTS / f"{stem}{theme.suffix}.png"
            expected.add(picture)
            assert pictures.source_checksum(picture) == pictures.checksum(path.read_bytes()), (
                f"{picture.name} was drawn from another {path.name}: python benchmarks/plots.py"
            )
            assert picture.stat().st_size < PICTURE_BYTES
    assert set(RESULTS.glob("*.png")) == expected


def test_the_pictures_of_the_readme_are_there():
    found = re.findall(r'src(?:set)?="([^"]+)"', (ROOT / "README.md").read_text())
    assert len(found) == 2 and all((ROOT / path).is_file() for path in found)


def test_a_record_gives_the_same_picture_again(module, tmp_path):
    plots = module("harness.plots")
    twice = []
    for folder in (tmp_path / "first", tmp_path / "second"):
        folder.mkdir()
        path = folder / "owners-openmpi-2.json"
        path.write_bytes((RESULTS / path.name).read_bytes())
        plots.beside(path)
        twice.append([one.read_bytes() for one in sorted(folder.glob("*.png"))])
    assert twice[0] == twice[1] and len(twice[0]) == 2 and twice[0][0] != twice[0][1]
