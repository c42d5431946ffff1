"""Writes docs/cli.md, the help pages of the command line; `make docs` runs it, a test compares."""

from __future__ import annotations

from pathlib import Path

import click
from click.testing import CliRunner

from outpace.cli import cli

PAGE = Path(__file__).with_name("cli.md")


def render() -> str:
    """The page's text."""
    parts = ["# The command line\n\nWritten by `make docs` from the commands' own help.\n"]
    for names in ([], *([name] for name in cli.commands), *_nested()):
        command = " ".join(["outpace", *names])
        shown = CliRunner().invoke(cli, [*names, "--help"], prog_name="outpace", terminal_width=100)
        parts.append(f"## {command}\n\n```\n{shown.output.rstrip()}\n```\n")
    return "\n".join(parts)


def _nested() -> list[list[str]]:
    """The commands of commands, such as `train medusa`."""
    groups = {n: c for n, c in cli.commands.items() if isinstance(c, click.Group)}
    return [[name, inner] for name, group in groups.items() for inner in group.commands]


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
