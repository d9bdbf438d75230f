"""Folders shipped with the package, found in a checkout; for a wheel see tests/test_package.py."""

import pytest

from mpidist import shipped
from mpidist.errors import MpidistError


def test_each_folder_of_the_checkout_is_found():
    assert (shipped.folder("slurm") / "env.sh").is_file()
    assert (shipped.folder("benchmarks") / "bench_collectives.py").is_file()
    assert list(shipped.folder("examples").glob("*.py"))


def test_another_name_and_a_broken_installation_are_errors(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="none of benchmarks, examples, slurm"):
        shipped.folder("cuda")
    monkeypatch.setattr(shipped, "_PACKAGED", tmp_path)
    monkeypatch.setattr(shipped, "_CHECKOUT", tmp_path)
    (tmp_path / "slurm").mkdir()  # of another package
    with pytest.raises(MpidistError, match="install mpidist again"):
        shipped.folder("slurm")
