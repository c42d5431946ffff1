"""What the commands share of the terminal: one-line errors, UTF-8 input, progress, statistics."""

from __future__ import annotations

import errno
import io
import os
import sys
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import click

from outpace.cli.options import Option
from outpace.errors import OutpaceError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from outpace.llm import Choice, Result
    from outpace.stats import Stats


class BadRequest(click.ClickException):
    """An error whose message is for the user."""

    exit_code = 2


class Command(click.Command):
    """A command that turns outpace's errors into one line and lists its options by section."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OutpaceError as error:
            if ctx.params["debug"]:
                traceback.print_exc()
            raise BadRequest(str(error)) from error

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                section = param.section if isinstance(param, Option) else "Other"
                sections.setdefault(section, []).append(record)
        for section, records in sections.items():
            with formatter.section(section):
                formatter.write_dl(records)


class Group(click.Group):
    """A group whose commands end with one line on stderr and a fitting exit code."""

    def main(self, *args: Any, **settings: Any) -> NoReturn:
        for stream in (sys.stdout, sys.stderr):
            # A character that the terminal's encoding lacks must not end a text half way.
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        try:
            code = super().main(*args, **{**settings, "standalone_mode": False}) or 0
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            code = error.exit_code
        except click.ClickException as error:
            message = " ".join(error.format_message().split())
            if isinstance(error, click.UsageError) and error.ctx is not None:
                message += f" See {error.ctx.command_path} --help."
            click.echo(f"Error: {message}", err=True)
            code = error.exit_code
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            click.echo(f"Error: what was written does not fit: {error}", err=True)
            code = 2
        except click.Abort:
            click.echo("Interrupted", err=True)
            code = 130
        sys.exit(code)


class LoadProgress:
    """Shows on stderr how far loading is: a bar on a terminal, else a line for each label."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._label = ""

    def __enter__(self) -> LoadProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int, label: str) -> None:
        if not sys.stderr.isatty():
            if label != self._label:
                click.echo(f"{label} ...", err=True)
            self._label = label
            return
        if self._bar is None:
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._bar.start()
        if self._task is None or label != self._label:
            self._task = self._bar.add_task(label)
            self._label = label
        self._bar.update(self._task, completed=done, total=total)

    def notice(self, message: str) -> None:
        """A one-line message on stderr."""
        if self._bar is not None:
            self._bar.console.print(message, markup=False, highlight=False)
        else:
            click.echo(message, err=True)


def cache_folder() -> Path | None:
    """Where converted models are kept, if OUTPACE_CACHE says so."""
    folder = os.environ.get("OUTPACE_CACHE")
    return Path(folder) if folder else None


def read_stdin() -> str:
    """All of stdin, less one newline at its end (which `echo` adds).

    Raises:
        BadRequest: naming the offset of the first byte that is not UTF-8.
    """
    return decode(_stdin().buffer.read()).removesuffix("\n")


def read_lines() -> Iterator[str]:
    """The lines of stdin as they come, each asked for on stderr where a person types."""
    stdin, offset = _stdin(), 0
    while True:
        if stdin.isatty():
            click.echo("> ", nl=False, err=True)
        line = stdin.buffer.readline()
        if not line:
            return
        yield decode(line, offset=offset).rstrip("\r\n")
        offset += len(line)


def _stdin() -> TextIO:
    if sys.stdin is None:
        raise BadRequest("stdin is closed: give it a text to read")
    return sys.stdin


def decode(data: bytes, *, offset: int = 0) -> str:
    """UTF-8 text; `offset` is where `data` starts in the stream.

    Raises:
        BadRequest: naming the first offset that is not valid.
    """
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise BadRequest(
            f"stdin is not valid UTF-8 at byte offset {offset + error.start}: "
            "convert the text to UTF-8"
        ) from error


def json_object(result: Result, *, logprobs: bool) -> dict[str, Any]:
    """What `--json` prints."""
    body = {
        **_json_choice(result.choices[0], logprobs=logprobs),
        "method": result.method,
        "exact": result.exact,
        "stats": result.stats.asdict(),
    }
    if len(result.choices) > 1:
        body["choices"] = [_json_choice(c, logprobs=logprobs) for c in result.choices]
    return body


def _json_choice(choice: Choice, *, logprobs: bool) -> dict[str, Any]:
    body: dict[str, Any] = {
        "text": choice.text,
        "tokens": choice.tokens,
        "finish_reason": choice.finish_reason,
        "seed": choice.seed,
    }
    if logprobs:
        body["logprobs"] = [asdict(entry) for entry in choice.logprobs]
    return body


def stats_lines(stats: Stats) -> str:
    """Speed, acceptance and where the time went, for a person."""
    speed = "" if stats.tokens_per_second is None else f", {stats.tokens_per_second:.1f} tokens/s"
    first = stats.first_token_seconds
    first_text = "" if first is None else f", the first after {first:.2f} s"
    per_step = "" if stats.tokens_per_step is None else f", {stats.tokens_per_step:.2f} a step"
    accepted = "nothing drafted"
    if stats.acceptance is not None:
        accepted = f"{stats.accepted} of {stats.drafted} drafted accepted ({stats.acceptance:.1%})"
    total = sum(stats.time_split.values())
    split = ", ".join(f"{name} {t / total:.1%}" for name, t in stats.time_split.items() if total)
    exact = "exact" if stats.exact else "not exact (typical acceptance)"
    return (
        f"{stats.method}: {stats.completion_tokens} tokens in {stats.seconds:.2f} s{first_text}"
        f"{speed}; {stats.steps} steps{per_step}; {accepted}\n"
        f"{exact}, {stats.exactness} forwards; time: {split}"
    )
