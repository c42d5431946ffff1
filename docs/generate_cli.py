"""Writes docs/cli.md, the help pages of the command line; `make docs` runs it, a test compares."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from outpace.cli import cli

PAGE = Path(__file__).with_name("cli.md")


def render() -> str:
    """The page's text."""
    parts = ["# The command line\n\nWritten by `make docs` from the commands' own help.\n"]
    for name in ("", *cli.commands):
        command = f"outpace {name}".strip()
        shown = CliRunner().invoke(
            cli, [name, "--help"] if name else ["--help"], prog_name="outpace", terminal_width=100
        )
        parts.append(f"## {command}\n\n```\n{shown.output.rstrip()}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
