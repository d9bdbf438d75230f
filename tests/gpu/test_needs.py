"""Requirements of ``make gpu``: missing modules are listed, and unpacked from local wheels."""

import importlib.metadata
import importlib.util
import tarfile
import zipfile

import pytest

from tests.gpu import needs


def test_what_is_missing_is_named_with_the_way_to_get_it(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name in ("hypothesis", "rich") else real(name),
    )
    assert dict(needs.missing("cpu")) == {
        "hypothesis": "pip install hypothesis",
        "rich": "pip install rich",
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
    needs.unpack(source, target)
    found = sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file())
    assert found == ["brought/bin/mpirun", "more/a.py", "site/brought.py", "site/brought_own.py"]
    assert (target / "brought/bin/mpirun").stat().st_mode & 0o100


def test_an_old_mpi4py_is_replaced(tmp_path, monkeypatch):
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "4.0.3" if name == "mpi4py" else real(name)
    )
    assert dict(needs.missing("cpu")) == {"mpi4py": "pip install 'mpi4py>=4.1' (there is 4.0.3)"}
    source = tmp_path / "from"
    source.mkdir()
    for name in ("mpi4py", "pytest"):
        with zipfile.ZipFile(source / f"{name}-9-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", "")
    needs.unpack(source, tmp_path / "to")
    assert [path.name for path in (tmp_path / "to" / "site").iterdir()] == ["mpi4py"]


def test_too_many_wheels_are_refused(tmp_path, capsys):
    with (tmp_path / "a-1-py3-none-any.whl").open("wb") as file:
        file.truncate(23 << 20)
    needs.main(["weigh", str(tmp_path)])
    assert "23.0 MiB, of at most 24" in capsys.readouterr().out
    with (tmp_path / "b-1-py3-none-any.whl").open("wb") as file:
        file.truncate(2 << 20)
    with pytest.raises(SystemExit):
        needs.main(["weigh", str(tmp_path)])
    assert "25.0 MiB, of at most 24" in capsys.readouterr().out


def test_metadata_is_written_for_a_checkout_alone(tmp_path, monkeypatch):
    needs.write_metadata(tmp_path)  # it is installed here
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: importlib.metadata.EntryPoints()
    )
    needs.write_metadata(tmp_path)
    text = (tmp_path / "mpidist-0.dist-info" / "entry_points.txt").read_text()
    assert "[torch.backends]\nmpidist = mpidist.c10d.backend:autoload" in text
