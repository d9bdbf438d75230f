"""The program in C of the page about several programs."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.tools.support import ROOT, launcher, missing, python, started

pytestmark = pytest.mark.slow

READER = """
import mpidist.comm

with mpidist.comm.couple(["simulation", "train"], timeout_s=60) as coupled:
    seen = []
    for sample in coupled.inlet("simulation"):
        (field,) = sample.tensors
        assert field.tolist() == [sample.label + 0.125 * place for place in range(8)]
        seen.append(sample.label)
print("seen", *seen)
"""


@pytest.mark.parametrize(("simulating", "reading"), [(1, 2), (2, 1)])
def test_a_program_in_c_feeds_readers(tmp_path, simulating, reading):
    command = launcher(simulating)
    compiler = Path(command[0]).with_name("mpicc")
    if not compiler.exists():
        missing("mpicc is not installed beside mpirun")
    page = (ROOT / "docs" / "several-programs.md").read_text()
    source, program = tmp_path / "simulation.c", tmp_path / "simulation"
    source.write_text(re.findall(r"```c\n(.*?)```", page, re.DOTALL)[0])
    compiled = subprocess.run(
        [compiler, "-Wall", "-Wextra", "-Werror", "-o", program, source],
        capture_output=True, text=True,
    )  # fmt: skip
    assert compiled.returncode == 0, compiled.stderr
    done = started(
        [*command, str(program), ":", "-n", str(reading), *python(), "-c", READER], timeout_s=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("seen")]
    assert len(seen) == reading
    # Each of the simulations numbers its own.
    assert sorted(int(label) for labels in seen for label in labels) == sorted(
        [*range(20)] * simulating
    )
