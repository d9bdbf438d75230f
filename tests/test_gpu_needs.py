"""Requirements of ``make gpu``: missing modules are listed, and unpacked from local wheels."""

import importlib.util
import sys
import tarfile
import zipfile

import pytest

from tests import gpu_needs
from tests.support import ROOT, started

GPU = [str(ROOT / "tests" / "gpu.sh")]


def test_what_is_missing_is_named_with_the_way_to_get_it(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name in ("hypothesis", "tabulate") else real(name),
    )
    assert dict(gpu_needs.missing("cpu")) == {
        "hypothesis": "pip install hypothesis",
        "tabulate": "pip install tabulate",
    }


def test_wheels_are_unpacked_but_for_what_is_installed(tmp_path):
    source, target = tmp_path / "from", tmp_path / "to"
    source.mkdir()
    for name in ("brought-1-py3-none-any", "torch-1-py3-none-any", "other-1-cp27-cp27mu-any"):
        base = name.rpartition("-1-")[0]
        with zipfile.ZipFile(source / f"{name}.whl", "w") as wheel:
            wheel.writestr(f"{base}.py", "")
            program = zipfile.ZipInfo(f"{base}-1.data/data/bin/mpirun")
            program.external_attr = 0o100755 << 16
            wheel.writestr(program, "#!/bin/sh\n")
            wheel.writestr(f"{base}-1.data/platlib/{base}_own.py", "")
    with tarfile.open(source / "more.tar.xz", "w:xz") as archive:
        archive.add(__file__, "more/a.py")
    gpu_needs.unpack(source, target)
    found = sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file())
    assert found == ["brought/bin/mpirun", "more/a.py", "site/brought.py", "site/brought_own.py"]
    assert (target / "brought/bin/mpirun").stat().st_mode & 0o100


def test_without_torch_nothing_is_started(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    python.chmod(0o755)
    done = started(
        GPU,
        timeout_s=60,
        env={
            "PY": str(python),
            "DEVICE": "cpu",
            "OUT": str(tmp_path / "out"),
            "WHEELS": str(tmp_path),
        },
    )
    summary_text = (tmp_path / "out" / "summary.txt").read_text()
    assert done.returncode == 2 and summary_text in done.stdout
    assert (
        "missing: torch (pip install torch)" in summary_text
        and "missing: pytest (pip install pytest)" in summary_text
    )
    assert "start:" not in summary_text


@pytest.mark.slow
def test_steps_that_cannot_be_run_are_told(tmp_path):
    settings = {
        "PY": sys.executable,
        "DEVICE": "cpu",
        "STEPS": "start:* memcheck",
        "OUT": str(tmp_path / "out"),
    }
    done = started(GPU, timeout_s=60, env={**settings, "WHEELS": str(tmp_path)})
    assert done.returncode == 0, done.stdout + done.stderr
    head, *lines, end = (tmp_path / "out" / "summary.txt").read_text().splitlines()
    steps = {name: verdict for name, verdict, *_ in map(str.split, lines) if name != "missing:"}
    assert head.startswith("cpu: ") and end.startswith("0 of 3 steps failed")
    assert steps == {"start:aware": "skipped", "start:plain": "ok", "memcheck": "skipped"}
    assert "rank 1 of 2 Open MPI" in (tmp_path / "out" / "logs.txt").read_text()
