"""Command lines of the shipped benchmarks."""

import os
import subprocess
import sys

import pytest

from mpidist import shipped
from mpidist.cli import bench
from mpidist.errors import LaunchError
from tests.test_whole_file import without_room
from tests.tools.support import ROOT


def test_a_benchmark_writes_into_the_folder(tmp_path):
    found = bench.program("collectives", tmp_path / "a" / "b", ["--quick"], lambda name: True)
    assert found == (
        str(shipped.folder("benchmarks") / "bench_collectives.py"),
        "--quick",
        "--output",
        str(tmp_path / "a" / "b"),
    )
    assert (tmp_path / "a" / "b").is_dir()


def test_a_folder_without_room_is_refused_before_the_measurement(tmp_path):
    words = r"results cannot be written: .*too large"
    with without_room(), pytest.raises(LaunchError, match=words):
        bench.program("collectives", tmp_path, [], lambda name: True)


def test_benchmarks_that_start_their_own_jobs_are_plain_programs(tmp_path, monkeypatch):
    (tmp_path / "bench_scaling.py").write_text("")
    monkeypatch.setattr(shipped, "folder", lambda name: tmp_path)
    assert (
        bench.is_job("scaling", [])
        and bench.is_job("scaling", ["--quick"])
        and bench.is_job("scaling", ["measure"])
    )
    assert bench.is_job("ddp", ["sweep"]) and not bench.is_job("scaling", ["sweep", "--links"])
    path = str(tmp_path / "bench_scaling.py")
    assert bench.program("scaling", tmp_path, ["sweep"], lambda name: True) == (
        path,
        "sweep",
        "--output",
        str(tmp_path),
    )
    assert bench.program("scaling", tmp_path, ["advise", "--ranks", "8"], lambda name: True) == (
        path,
        "advise",
        "--ranks",
        "8",
    )


def test_every_benchmark_takes_a_folder():
    """A benchmark's source has --output, or uses a module of shared options."""
    ways = (
        '"--output"',
        "benchmark_options.parser(",
        "training_run.arguments(",
        "scaling_options.add_commands(",
    )
    for name in bench.RANKS:
        path = shipped.folder("benchmarks") / f"bench_{name}.py"
        if name != "scaling" or path.exists():
            text = path.read_text()
            assert any(way in text for way in ways), name


def test_a_missing_package_is_named_with_its_install_command(tmp_path):
    (tmp_path / "file").write_text("")
    for name, folder, arguments, words in [
        ("nothing", tmp_path, [], "no benchmark nothing: collectives"),
        ("ddp", tmp_path / "file" / "x", [], "cannot be made"),
        ("ddp", tmp_path, ["--output", "x"], "before the --"),
    ]:
        with pytest.raises(LaunchError, match=words):
            bench.program(name, folder, arguments, lambda name: True)
    with pytest.raises(LaunchError, match=r"need psutil, rich: pip install 'mpidist\[bench\]'"):
        bench.program("ddp", tmp_path, [], lambda name: name == "matplotlib")
    assert bench.is_installed("torch") and not bench.is_installed("no_such_package")


def test_arithmetic_needs_no_packages_for_plots_and_makes_no_folder(tmp_path):
    folder = tmp_path / "results"
    words = bench.program("scaling", folder, ["advise", "memory"], lambda name: name == "rich")
    assert words[1:] == ("advise", "memory") and not folder.exists()
    with pytest.raises(LaunchError, match="need matplotlib, psutil"):
        bench.program("scaling", folder, ["advise", "--measure"], lambda name: name == "rich")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_advice_whose_reader_has_enough_has_no_traceback(unbuffered):
    path = shipped.folder("benchmarks") / "bench_scaling.py"
    words = "--bandwidth 10 --parameters 350e6 --ranks 64 --processor gpu"
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as closed:
        done = subprocess.run(
            [sys.executable, str(path), "advise", *words.split()],
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, "")
