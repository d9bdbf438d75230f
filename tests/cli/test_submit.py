"""Subcommand that submits: the plan is printed, or handed to sbatch."""

from types import SimpleNamespace

from mpidist.cli import submit
from mpidist.slurm import submission
from mpidist.slurm.job_plan import JobPlan


def test_submit_prints_or_hands_over(call, monkeypatch):
    seen = []
    monkeypatch.setattr(submission, "partitions", lambda: None)
    monkeypatch.setattr(
        submit,
        "planned",
        lambda *args: seen.append(args) or JobPlan("the text\n", args[1], ("two nodes",)),
    )
    line = (
        "submit ddp --nodes 2 --gpus-per-node 4 --name x --sbatch qos=low --set A=b=c --dry-run "
        "-- train.py --epochs 3"
    )
    done = call(*line.split())
    assert (done.stdout, done.stderr) == ("the text\n", "mpidist submit: two nodes\n")
    name, options, env, *_ = seen[0]
    assert (name, env, options.settings, options.arguments) == (
        "ddp",
        None,
        {"A": "b=c"},
        ("train.py", "--epochs", "3"),
    )
    assert options.header == {"job-name": "x", "nodes": "2", "gpus-per-node": "4", "qos": "low"}
    ended = SimpleNamespace(returncode=5)
    monkeypatch.setattr(submission, "call_sbatch", lambda plan: ended)
    assert call("submit", "ddp").exit_code == 5
