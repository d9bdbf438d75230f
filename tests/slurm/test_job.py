"""Submitted job on fake commands: states, waiting, logs, arrays."""

import pytest

from mpidist.errors import LaunchError
from mpidist.slurm import Job

GONE = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"


@pytest.fixture
def says(tmp_path, monkeypatch):
    """Return a function that sets the text of a command of Slurm."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")

    def put(name, text):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)

    for name in ("scontrol", "scancel", "sacct"):
        put(name, "exit 1")
    return put


def shown(*states, name="train", output="", error=None):
    """Return a script that prints as scontrol does, a line for each path."""
    lines = [f"""JobId={number} JobName={name}
   UserId=me(1000) GroupId=me(1000) MCS_label=N/A
   JobState={state} Reason=None Dependency=(null)
   Command=/jobs/train.sh
   StdErr={output if error is None else error}
   StdIn=/dev/null
   StdOut={output}
   TresPerNode=gres:gpu:1
""" for number, state in enumerate(states, 1)]  # fmt: skip
    return "\n".join(f"cat << 'END'\n{line}\nEND" for line in lines)


def test_a_state_is_slurms_and_of_an_array_that_of_the_slowest(says):
    for states, state, is_done in [
        (["PENDING"], "PENDING", False),
        (["COMPLETED", "RUNNING", "FAILED"], "RUNNING", False),
        (["COMPLETED", "FAILED"], "FAILED", True),
        (["COMPLETED", "COMPLETED"], "COMPLETED", True),
        (["REQUEUED"], "REQUEUED", False),
        (["COMPLETING"], "COMPLETING", False),
    ]:
        says("scontrol", shown(*states))
        assert (Job(7).state, Job(7).done()) == (state, is_done)


def test_a_job_that_slurm_has_forgotten_is_in_the_accounting(says):
    says("scontrol", GONE)
    says("sacct", "echo 'CANCELLED by 0'")
    assert Job("7").state == "CANCELLED"
    says("sacct", "exit 1")
    assert Job("7").state == "UNKNOWN" and Job("7").done()


def test_a_controller_that_does_not_answer_is_no_end(says):
    says("scontrol", "echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(LaunchError, match="Unable to contact"):
        Job(7).wait()


def test_waiting_ends_with_the_job_or_the_limit(says, tmp_path):
    says("scontrol", shown("RUNNING"))
    with pytest.raises(TimeoutError, match=r"job 7 has not ended after 0\.05 s: RUNNING"):
        Job(7).wait(0.05, poll_s=0.01)
    count = tmp_path / "count"
    says("scontrol", f'echo x >> {count}; (( $(wc -l < {count}) > 3 )) && s=FAILED || s=PENDING; '
                     'printf "JobId=7 JobName=a\\n   JobState=$s\\n"')  # fmt: skip
    assert Job(7).wait(poll_s=0.01) == "FAILED"


def test_the_log_is_read_and_found_after_the_job_is_forgotten(says, tmp_path):
    log = tmp_path / "x-7.out"
    says("scontrol", shown("RUNNING", output=log))
    job = Job(7)
    assert job.stdout() == "" and job.paths() == [log]
    log.write_text("loss 1\n")
    says("scontrol", GONE)
    assert job.stdout() == job.stderr() == "loss 1\n"


@pytest.mark.parametrize("folder", ["my runs", "a StdErr=b JobState=FAILED", "Läufe", "it's"])
def test_a_log_is_found_in_any_folder(says, tmp_path, folder):
    log, error = (tmp_path / folder / f"x.{kind}" for kind in ("out", "err"))
    log.parent.mkdir()
    log.write_text("loss 1\n")
    error.write_text("warned\n")
    says("scontrol", shown("RUNNING", output=log, error=error))
    job = Job(7)
    assert (job.state, job.paths()) == ("RUNNING", [log])
    assert (job.stdout(), job.stderr()) == ("loss 1\n", "warned\n")


def test_a_jobs_name_is_no_field_of_it(says):
    says("scontrol", shown("RUNNING", name="x JobState=COMPLETED StdOut=/etc/hostname"))
    assert Job(7).state == "RUNNING" and Job(7).paths() == []
    says("scontrol", shown("RUNNING", name="$(printf '\\377')").replace("<< 'END'", "<< END"))
    assert Job(7).state == "RUNNING"  # a byte that is no text


def test_cancelling_calls_scancel(says, tmp_path):
    says("scancel", f"echo $* > {tmp_path}/cancelled")
    Job("7_3").cancel()
    assert (tmp_path / "cancelled").read_text() == "7_3\n"
    says("scancel", "echo 'Access denied' >&2; exit 1")
    with pytest.raises(LaunchError, match="scancel 7: Access denied"):
        Job(7).cancel()


def test_wrong_numbers_and_missing_commands_are_clear(monkeypatch, tmp_path):
    for number in ("", "a", "7;x", "-1"):
        with pytest.raises(ValueError, match="named by its number"):
            Job(number)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="scontrol was not found"):
        _ = Job(7).state
