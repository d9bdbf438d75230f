"""Fixtures for capabilities: an empty cache, and a trial without a job."""

import pytest

from mpidist.comm.discovery import capability, capability_trial, trial_operations, visible_devices


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Give each test an empty cache folder, and the modules their initial state."""
    monkeypatch.setenv("MPIDIST_CACHE", str(tmp_path))
    monkeypatch.delenv("MPIDIST_CUDA_AWARE", raising=False)
    monkeypatch.setattr(capability, "_tables", {})
    monkeypatch.setattr(visible_devices, "_node_sees_all", None)
    return tmp_path


@pytest.fixture
def launches(monkeypatch):
    """Count the jobs that this rank starts; each reports that all but one operation work."""
    started = []

    def found(device, library, cuda_first):
        started.append(device)
        return {
            **dict.fromkeys(trial_operations.OPERATIONS, "works"),
            "Alltoallv": "ended by signal 11 (SIGSEGV)",
        }

    monkeypatch.setattr(capability_trial, "try_operations", found)
    return started
