"""Spawned processes as calls in the ranks of a job."""

import types

import pytest
import torch.multiprocessing

from tests.peers import in_rank_spawn


def test_spawn_calls_the_function_in_the_first_ranks(monkeypatch):
    calls = []
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        in_rank_spawn.spawn(lambda *args: calls.append(args), ("x",), nprocs=2)
    assert calls == [(0, "x"), (1, "x")]
    with pytest.raises(ValueError, match="spawn of 4 processes in a job of 3 ranks"):
        in_rank_spawn.spawn(print, nprocs=4)


def test_processes_of_the_program_alone_are_calls(monkeypatch):
    for name in ("spawn", "Process"):
        monkeypatch.setattr(torch.multiprocessing, name, getattr(torch.multiprocessing, name))
    theirs = torch.multiprocessing.Process
    in_rank_spawn.install()
    program = types.ModuleType("__main__")
    source = "calls = []\nprocess = mp.Process(target=calls.append, args=(5,))\nprocess.start()"
    vars(program)["mp"] = torch.multiprocessing
    exec(source, vars(program))
    assert program.calls == [5]
    assert isinstance(torch.multiprocessing.Process(target=print), theirs)
