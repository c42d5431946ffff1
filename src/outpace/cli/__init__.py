"""The command line: one function a command; text goes to stdout, all else to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

import outpace
from outpace.cli import options
from outpace.cli.bench import bench
from outpace.cli.loading import load
from outpace.cli.terminal import (
    BadRequest,
    Command,
    Group,
    json_object,
    read_lines,
    read_stdin,
    stats_lines,
)
from outpace.cli.train import train
from outpace.cli.verify import verify
from outpace.errors import InvalidRequest

if TYPE_CHECKING:
    from outpace.llm import LLM, Piece, Result

_WIDTH = {"max_content_width": 100}


@click.group(cls=Group, context_settings=_WIDTH)
@click.version_option(outpace.__version__, prog_name="outpace", message="%(prog)s %(version)s")
def cli() -> None:
    """Makes a language model generate faster without changing what it says.

    Converted models are kept in the folder that OUTPACE_CACHE names.
    """


@cli.command(
    cls=Command,
    params=[
        click.Argument(["prompt"], type=options.Text()),
        *options.MODEL,
        *options.LOADING,
        *options.METHOD,
        *options.SAMPLING,
        *options.CHOICES,
        *options.SYSTEM,
        *options.RAW,
        *options.JSON,
        *options.STATS,
        *options.DEBUG,
    ],
)
def generate(**values: Any) -> None:
    """Writes what the model answers to PROMPT; - reads the prompt from stdin."""
    if values["raw"] and values["system"] is not None:
        raise click.UsageError("--system needs the chat template: leave --raw out.")
    if values["logprobs"] is not None and not values["as_json"]:
        raise click.UsageError("--logprobs are reported with --json only.")
    text = read_stdin() if values["prompt"] == "-" else values["prompt"]
    if not text:
        raise BadRequest("the prompt is empty: give at least one character")
    prompt = text if values["system"] is None else _messages(values["system"], text)

    llm, sampling = _load_for(values)
    if values["as_json"]:
        result = llm.generate(prompt, raw=values["raw"], **sampling)
        click.echo(json.dumps(json_object(result, logprobs=values["logprobs"] is not None)))
    elif sampling.get("n", 1) > 1:
        result = llm.generate(prompt, raw=values["raw"], **sampling)
        for choice in result.choices:
            click.echo(f"[{choice.index + 1} of {len(result.choices)}]", err=True)
            click.echo(choice.text)
    else:
        result = _show(llm.stream(prompt, raw=values["raw"], **sampling))
    if values["stats"]:
        click.echo(stats_lines(result.stats), err=True)


@cli.command(
    cls=Command,
    params=[
        *options.MODEL,
        *options.LOADING,
        *options.METHOD,
        *options.SAMPLING,
        *options.SYSTEM,
        *options.STATS,
        *options.DEBUG,
    ],
)
def chat(**values: Any) -> None:
    """Talks with the model, line by line from stdin: /reset starts anew, /quit ends."""
    llm, sampling = _load_for(values)
    history = _messages(values["system"])
    for line in read_lines():
        if line == "/quit":
            return
        if line == "/reset":
            history = _messages(values["system"])
        elif line:
            history.append({"role": "user", "content": line})
            try:
                result = _show(llm.stream(history, **sampling))
            except InvalidRequest as error:  # the talk has outgrown the context
                if not sys.stdin.isatty():
                    raise
                history.pop()
                click.echo(f"Error: {error}; or start anew with /reset", err=True)
                continue
            history.append({"role": "assistant", "content": result.text})
            if values["stats"]:
                click.echo(stats_lines(result.stats), err=True)


@cli.command(
    cls=Command,
    params=[
        click.Argument(["model"], type=options.Text()),
        *options.LOADING,
        *options.JSON,
        *options.DEBUG,
    ],
)
def info(**values: Any) -> None:
    """Loads MODEL and tells what it is and how it runs here."""
    facts = load(values).info()
    if values["as_json"]:
        click.echo(json.dumps(facts))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        click.echo(f"{name:{width}}  {_readable(name, value)}")


cli.add_command(bench)
cli.add_command(train)
cli.add_command(verify)


def main() -> None:
    """The `outpace` command."""
    cli()


def _load_for(values: dict[str, Any]) -> tuple[LLM, dict[str, Any]]:
    """The model with its method, and the sampling; all options are checked before it is read."""
    sampling = options.sampling_arguments(values)
    method_arguments = options.method_arguments(values)
    from outpace.sampling import SamplingParams

    # Bad words need the tokenizer: they are checked with it.
    SamplingParams(**{name: v for name, v in sampling.items() if name != "bad_words"})
    return load(values, method=values["method"], **method_arguments), sampling


def _show(pieces: Iterable[Piece]) -> Result:
    """Writes a stream to stdout as it comes."""
    result: Result | None = None
    text = ""
    for piece in pieces:
        text = piece.text or text
        click.echo(piece.text, nl=False)
        result = piece.result
    if not text.endswith("\n"):
        click.echo()
    assert result is not None, "a stream ends with its result"
    return result


def _messages(system: str | None, *user: str) -> list[dict[str, str]]:
    messages = [] if system is None else [{"role": "system", "content": system}]
    return messages + [{"role": "user", "content": text} for text in user]


def _readable(name: str, value: Any) -> str:
    if isinstance(value, dict) and name == "memory":
        return ", ".join(f"{part} {size / 2**20:,.0f} MiB" for part, size in value.items())
    if isinstance(value, dict):
        return ", ".join(f"{key} {part}" for key, part in value.items())
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
