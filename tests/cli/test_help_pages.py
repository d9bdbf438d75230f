"""Help pages of the command, the examples and the benchmarks in a terminal of 80 columns."""

import importlib.util
import json
import re

import pytest

from mpidist import shipped
from mpidist.cli import help_pages
from mpidist.cli.help_examples import EXAMPLES
from tests.tools.support import ROOT, missing, python, started

COLUMNS = 80

# Children that a benchmark starts with positional arguments.
CHILDREN = {"autograd_tensorpipe.py"}


def has_main(path):
    return "__main__" in path.read_text(encoding="utf-8") and path.name not in CHILDREN


SCRIPTS = [
    f"{folder}/{path.name}"
    for folder in ("benchmarks", "examples")
    for path in sorted((ROOT / folder).glob("*.py"))
    if has_main(path)
]
SCALING = [
    f"benchmarks/bench_scaling.py {name}"
    for name in ("measure", "sweep", "report", "startup", "advise")
]
COMMANDS = ["mpidist", *(f"mpidist {name}" for name in EXAMPLES), "mpidist tune --"]
PAGES = [*SCRIPTS, *SCALING, *COMMANDS]

# One process for all pages, because each would import torch again.
_PROGRAM = """
import contextlib, io, json, os, runpy, sys
from mpidist.cli import app
pages = {}
start = list(sys.path)
for line in json.loads(sys.argv[1]):
    words = line.split()
    out, status = io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            if words[0] == "mpidist":
                app.app([*words[1:], "--help"], prog_name="mpidist")
            else:
                sys.argv = [*words, "--help"]
                sys.path = [os.path.dirname(os.path.abspath(words[0])), *start]
                runpy.run_path(words[0], run_name="__main__")
        except SystemExit as ended:
            status = ended.code
    pages[line] = [status, out.getvalue()]
print(json.dumps(pages))
"""


@pytest.fixture(scope="module")
def pages():
    for name in ("matplotlib", "psutil", "rich", "scipy", "sklearn", "tqdm"):
        if importlib.util.find_spec(name) is None:
            missing(f"{name} is not installed")
    terminal = {"COLUMNS": str(COLUMNS), "NO_COLOR": "1"}
    command = [*python(), "-c", _PROGRAM, json.dumps(PAGES)]
    done = started(command, 200, terminal)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_help_fits_a_terminal_and_names_and_describes_the_program(pages, page):
    status, text = pages[page]
    assert status in (0, None), text
    lines = text.splitlines()
    assert [line for line in lines if len(line) > COLUMNS] == []
    usage, _, rest = text.partition("sage: ")
    name, *commands = page.removesuffix(" --").split()
    expected = " ".join([name.rpartition("/")[2], *commands])
    assert not usage.strip() or usage.strip() in ("U", "u"), text
    assert rest.startswith(expected), rest[:COLUMNS]
    # Between the usage and the options stands a description.
    described = re.split(r"\n\s*\n", rest, maxsplit=1)[1].strip()
    assert re.match(r"[A-Z]\S* \S+", described), described[:COLUMNS]
    assert "<bool>" not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "behind"),
    [
        ("mpidist run", "[OPTIONS] PROGRAM [ARGS]..."),
        ("mpidist bench", "[OPTIONS] NAME [-- OPTIONS...]"),
        ("mpidist submit", "[OPTIONS] NAME [-- PROGRAM [ARGS]...]"),
    ],
)
def test_the_program_behind_the_options_is_in_the_usage(pages, page, behind):
    usage = next(line for line in pages[page][1].splitlines() if "sage:" in line)
    # Some versions of typer set a required name in braces.
    assert usage.strip().replace("{NAME}", "NAME") == f"Usage: {page} {behind}"


def test_shipped_files_are_described_by_their_first_sentence(tmp_path):
    (tmp_path / "job.sbatch").write_text(
        "#!/bin/bash\n#SBATCH --nodes=1\n#\n# Trains on all\n# nodes. More.\n#   sbatch it\n# X\n"
    )
    assert help_pages.job_scripts(tmp_path) == {"job": "Trains on all nodes"}
    found = help_pages.benchmarks(shipped.folder("benchmarks"))
    assert all(text.endswith(".") and len(text) > 20 for text in found.values())
    assert found["collectives"].startswith("Time collectives of mpidist")
