"""Versions of torch: what is said about them, and that the project's files agree on them."""

from __future__ import annotations

import configparser
import re

import pytest
import torch

from mpidist import torch_version
from tests.tools import torch_versions_row
from tests.tools.support import ROOT, short_job


@pytest.mark.parametrize(
    ("text", "numbers", "is_newer"),
    [
        ("2.11.0", (2, 11), False),
        ("2.15.3+cu130", (2, 15), False),
        ("2.16.0a0+git12ab", (2, 16), True),
        ("3.0.0", (3, 0), True),
        ("", (), False),
    ],
)
def test_numbers_of_a_version(text, numbers, is_newer):
    assert torch_version.numbers(text) == numbers
    assert (torch_version.newer_than_tested(text) is not None) == is_newer


def test_the_installed_torch_is_supported():
    installed = torch_version.numbers(torch.__version__)
    assert torch_version.OLDEST <= installed <= torch_version.NEWEST


def test_a_newer_torch_is_told_in_one_line():
    """Once per job, on stderr, and the job goes on."""
    done = short_job(
        2,
        """
import torch, torch.distributed as dist
from mpidist import torch_version
torch_version.NEWEST = (2, 9)
dist.init_process_group("mpidist")
dist.new_group([0, 1])
x = torch.ones(1)
dist.all_reduce(x)
assert x.item() == 2
dist.destroy_process_group()
""",
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "newer" in line] == [
        f"torch is {torch.__version__}, newer than 2.9, the newest that mpidist was tested on; "
        "mpidist doctor says more"
    ]


def test_files_name_the_same_versions():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    oldest = ".".join(map(str, torch_version.OLDEST))
    assert f"torch>={oldest}" in settings["options"]["install_requires"].split()
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    newest = re.search(r'^NEWEST_TORCH := .*print\("(\d+\.\d+)\.\d+" if', makefile, re.MULTILINE)
    assert newest is not None and torch_version.numbers(newest[1]) == torch_version.NEWEST


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("..\n12 passed, 3 skipped, 7 deselected, 2 warnings in 9.08s\n", "12 passed, 3 skipped"),
        (
            "==== 1 failed, 2 passed, 1 error in 75.1s (0:01:15) ====\n",
            "1 failed, 2 passed, 1 error",
        ),
        ("1 passed in 1s\n" * 2, "1 passed"),
        ("Abort(1) on node 1\n", "ended without a result"),
    ],
)
def test_the_result_of_an_output(output, expected):
    assert torch_versions_row.result(output) == expected
