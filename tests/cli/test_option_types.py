"""Types of command-line options: proposed names and choices; pure."""

from mpidist.cli.bench import RANKS
from mpidist.cli.launch_request import BINDINGS
from mpidist.cli.option_types import Benchmark, Binding, job_scripts
from mpidist.slurm.job_plan import names


def test_choices_are_the_names_that_the_command_knows():
    assert [choice.value for choice in Binding] == list(BINDINGS)
    assert [choice.value for choice in Benchmark] == list(RANKS)
    assert all(isinstance(choice, str) for choice in (*Binding, *Benchmark))


def test_a_script_that_another_submits_is_not_proposed():
    assert set(names()) - set(job_scripts()) == {"rpc-het"}
