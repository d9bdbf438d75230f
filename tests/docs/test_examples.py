"""Programs of the documentation run as they stand, at any number of ranks from the one they name."""

from __future__ import annotations

import os
import re
import sys
import types
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.docs.fences import all_examples, examples_of
from tests.support import ROOT


@pytest.mark.mpi
def test_programs_of_the_pages_run(world, tmp_path, monkeypatch):
    # One folder for all ranks: a program may write what another rank reads.
    monkeypatch.chdir(world.broadcast_object(str(tmp_path), 0))
    ran = []
    for number, example in enumerate(all_examples()):
        if example.ranks > world.size:
            continue
        # A module of its own: its functions and classes are found by name on other ranks.
        module = types.ModuleType(f"docs_example_{number}")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        environment = dict(os.environ)
        exec(compile("\n" * int(example.place.split(":")[1]) + example.code, example.place, "exec"), module.__dict__)
        world.barrier()
        if dist.is_initialized():
            dist.destroy_process_group()
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        ran.append(example.place)
    assert len(ran) >= 8


def test_marked_blocks_are_found_with_their_ranks_and_lines():
    page = "# A\n\n<!-- run: 2 -->\n```python\nx = 1\n```\n\n```python\nnot run\n```\n"
    page += "\n    <!-- run -->\n    ```python\n    y = 2\n    ```\n"
    first, second = examples_of(page, "a.md")
    assert (first.place, first.ranks, first.code) == ("a.md:5", 2, "x = 1")
    assert (second.ranks, second.code) == (1, "y = 2")


def test_all_python_blocks_of_the_pages_are_programs():
    # Those that are not run are parsed: a page cannot show what is no Python.
    for page in sorted(Path(ROOT, "docs").rglob("*.md")):
        for block in re.findall(r"^( *)```python[^\n]*\n(.*?)^ *```$", page.read_text(encoding="utf-8"), re.M | re.S):
            code = "\n".join(line[len(block[0]) :] for line in block[1].splitlines())
            compile(code, str(page), "exec")
