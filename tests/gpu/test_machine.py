"""Machine of ``make gpu``: settings that cannot be used, and what stays between calls."""

import os

import pytest

from tests.gpu import machine
from tests.gpu.machine import SettingError, kept_folder, settings


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("DEVICE", "gpu", "DEVICE must be cuda or cpu; got 'gpu'"),
        ("BUDGET_S", "ten", "BUDGET_S must be a positive number; got 'ten'"),
        ("BUDGET_S", "-1", "BUDGET_S must be a positive number; got '-1'"),
        ("BUDGET_S", "nan", "BUDGET_S must be a positive number; got 'nan'"),
        ("PARALLEL", "yes", "PARALLEL must be 0 or 1; got 'yes'"),
        ("CUDA_MPI", "/none/such", "CUDA_MPI must be a folder; there is no '/none/such'"),
        ("PY", "/none/python", "PY must be an interpreter; there is no '/none/python'"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named(name, value, words):
    with pytest.raises(SettingError) as raised:
        settings({name: value})
    assert str(raised.value) == words


def test_settings_have_their_defaults():
    found = settings({"WHEELS": "", "CUDA_MPI": ""})
    assert found.device == "cuda" and found.budget_s == 570 and found.hang_s == 45
    assert found.records and found.mps and not found.prefixes
    assert found.last == machine.ROOT / "gpu-results" / "steps.json"
    dry = settings({"DEVICE": "cpu"})
    assert dry.is_dry and not dry.records and not dry.mps


def test_findings_stay_for_the_next_call_in_a_folder_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    kept = kept_folder(tmp_path / "work")
    assert kept.parent == tmp_path and kept.stat().st_mode & 0o777 == 0o700
    assert kept_folder(tmp_path / "other work") == kept
    kept.chmod(0o777)
    assert kept_folder(tmp_path / "work") == tmp_path / "work" / "kept"
    kept.rmdir()
    kept.symlink_to(tmp_path)
    assert kept_folder(tmp_path / "work") == tmp_path / "work" / "kept"


def test_what_was_brought_is_unpacked_once(tmp_path, monkeypatch):
    wheels, unpacked = tmp_path / "wheels", []
    wheels.mkdir()
    (wheels / "a.whl").write_bytes(b"1")
    monkeypatch.setattr(machine, "asked", lambda *words: unpacked.append(words[-1]))
    chosen = settings({"WHEELS": str(wheels)})
    # The same path each time: the cache of MPI's capabilities has it in its key.
    first = machine._unpacked(chosen, tmp_path / "kept", os.environ)
    os.utime(wheels / "a.whl", (1, 1))
    assert first.is_dir() and machine._unpacked(chosen, tmp_path / "kept", os.environ) == first
    assert len(unpacked) == 1
    (wheels / "a.whl").write_bytes(b"12")
    assert machine._unpacked(chosen, tmp_path / "kept", os.environ) != first
