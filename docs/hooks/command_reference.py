"""Subcommands of ``mpidist`` as Markdown, generated from the program: arguments and examples."""

from __future__ import annotations

from typing import Any


def reference(name: str | None = None) -> str:
    """Return the reference of one subcommand, or of all."""
    import typer

    from mpidist.cli.app import app

    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    if name is not None and name not in commands:
        raise ValueError(f"mpidist has no command {name}; it has {', '.join(commands)}")
    return "\n\n".join(
        _section(one, commands[one])
        for one in ([name] if name else commands)
        if not commands[one].hidden
    )


def _section(name: str, command: Any, level: int = 3) -> str:
    parts = [f"{'#' * level} mpidist {name}", _plain(command.help)]
    if examples := [
        line for line in (command.epilog or "").split("\n\n") if line.startswith(("mpi", "srun"))
    ]:
        parts.append("\n".join(["```bash", *(line.strip() for line in examples), "```"]))
    rows = [row for parameter in command.params if (row := _row(parameter))]
    if rows:
        parts.append("\n".join(["| argument | does |", "| --- | --- |", *rows]))
    for one, inner in getattr(command, "commands", {}).items():
        parts.append(_section(f"{name} {one}", inner, level + 1))
    return "\n\n".join(parts)


def _row(parameter: Any) -> str:
    if getattr(parameter, "hidden", False):
        return ""
    is_option = parameter.param_type_name == "option"
    value = f" {parameter.metavar}" if parameter.metavar else ""
    names = [*(one + value for one in parameter.opts), *parameter.secondary_opts]
    if not is_option:
        names = [parameter.metavar or parameter.name.upper()]
    text = _plain(getattr(parameter, "help", None) or "").replace("|", "\\|").replace("\n", " ")
    default = parameter.default
    if (
        is_option
        and isinstance(default, int | float | str)
        and not isinstance(default, bool)
        and default != ""
    ):
        text += f" (default: {default})"
    return f"| {', '.join(f'`{one}`' for one in names)} | {text} |"


def _plain(text: str | None) -> str:
    return (text or "").replace("\f", "").strip()
