"""`outpace verify`: methods against plain decoding, or any engine's text against the target."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outpace.cli import options
from outpace.cli.loading import load
from outpace.cli.options import Option, Text
from outpace.cli.terminal import Command, LoadProgress
from outpace.cli.verdicts import IDENTICAL, TIE, summary, text

if TYPE_CHECKING:
    from outpace.journal import Journal
    from outpace.llm import LLM
    from outpace.prompts import Prompt

_FILE = click.Path(dir_okay=False, path_type=Path)

METHOD = [
    Option(
        "--method",
        section="Method",
        default="lookup,lookahead,combined",
        show_default=True,
        type=Text(),
        help=f"Those to verify, separated by commas: {', '.join(options.METHODS)}.",
    ),
    Option(
        "--draft",
        section="Method",
        type=Text(),
        help="draft, combined: the small model; else draft takes the model itself.",
    ),
    Option(
        "--heads",
        section="Method",
        type=Text(),
        help="medusa, combined: the folder with trained heads; else medusa takes random ones.",
    ),
]
REQUESTS = [
    Option(
        "--prompts",
        section="Prompt",
        type=_FILE,
        help="JSONL with prompt, messages or turns, or a text file; else a few of its own.",
    ),
    Option(
        "--limit",
        section="Prompt",
        default=12,
        show_default=True,
        type=click.IntRange(min=1),
        help="Most prompts, taken evenly from the file.",
    ),
    *options.RAW,
]
SAMPLING = [
    Option(
        "--temperature",
        section="Sampling",
        default=0.0,
        show_default=True,
        type=float,
        help="Verify seeded texts and the draws' distribution at this temperature too.",
    ),
    Option("--seed", section="Sampling", default=7, show_default=True, type=int, help="Of these."),
    Option(
        "--samples",
        section="Sampling",
        default=100,
        show_default=True,
        type=click.IntRange(min=0),
        help="Draws for each of two prefixes, by each rule; 0 leaves that test out.",
    ),
    Option(
        "--max-new-tokens",
        section="Ends",
        default=64,
        show_default=True,
        type=click.IntRange(min=1),
        help="Most tokens of a text.",
    ),
]
AUDIT = [
    Option(
        "--completions",
        section="Audit",
        type=_FILE,
        help="Judge these instead: JSONL with prompt or messages, text or tokens, and "
        "finish_reason where it is known; greedy ones only.",
    ),
]
OUT = [
    Option("--out", section="Output", type=_FILE, help="Save each result here as it comes."),
    Option(
        "--resume",
        section="Output",
        is_flag=True,
        help="Go on where the run that wrote --out was stopped.",
    ),
]
_NOT_WITH_COMPLETIONS = {option.name for option in (*METHOD, *SAMPLING)} | {"prompts", "limit"}


@click.command(
    cls=Command,
    params=[
        *options.MODEL,
        *options.LOADING,
        *METHOD,
        *REQUESTS,
        *SAMPLING,
        *AUDIT,
        *options.JSON,
        *OUT,
        *options.DEBUG,
    ],
)
def verify(**values: Any) -> int:
    """Checks that methods write what plain decoding writes, or audits another engine's text.

    Exits with 1 where something is wrong: a first difference that no rounding explains, draws that
    do not fit the target's distribution, or a test of them that a wrong distribution passes.
    """
    from outpace.llm import prompt_ids
    from outpace.sampling import SamplingParams
    from outpace.verify import run
    from outpace.verify.completions import read_completions
    from outpace.verify.ledger import Ledger

    names = _method_names(values)
    sampling = {name: values[name] for name in ("temperature", "seed", "max_new_tokens")}
    params = SamplingParams(**sampling)
    if values["resume"] and values["out"] is None:
        raise click.UsageError("--resume needs --out, the file of the run to go on with.")
    audits = values["completions"] is not None
    if audits:
        _refuse_with_completions()
    completions = read_completions(values["completions"]) if audits else []
    prompts = [] if audits else _prompts(values)

    llm = load(values)
    facts = _facts(llm, audits=audits)
    journal = _journal(values, facts, completions or prompts)
    with Ledger(journal) as ledger, LoadProgress() as progress:
        to: dict[str, Any] = {"ledger": ledger, "progress": progress}
        if audits:
            run.check_completions(llm, completions, raw=values["raw"], **to)
        else:
            tokenizer = llm.model.tokenizer
            ids = [prompt_ids(tokenizer, p.content, raw=values["raw"]) for p in prompts]
            methods = {name: _with_method(llm, name, values, progress) for name in names}
            run.check_ids(llm, methods, ids, sampling=sampling, **to)
            if not params.greedy and values["samples"] > 0:
                run.check_fit(llm, methods, ids, params=params, samples=values["samples"], **to)
    report = {**facts, **summary(ledger.entries)}
    click.echo(json.dumps(report) if values["as_json"] else text(report))
    return 0 if report["verdict"] in (IDENTICAL, TIE) else 1


def _method_names(values: dict[str, Any]) -> list[str]:
    names = [name.strip() for name in values["method"].split(",")]
    for name in names:
        if name not in options.METHODS:
            raise click.UsageError(
                f"--method takes {', '.join(options.METHODS)}, separated by commas, not {name!r}."
            )
    for option, method in (("draft", "draft"), ("heads", "medusa")):
        if values[option] is not None and not {method, "combined"} & set(names):
            raise click.UsageError(f"--{option} goes with --method {method} or combined only.")
    return list(dict.fromkeys(names))


def _refuse_with_completions() -> None:
    context = click.get_current_context()
    for name in sorted(_NOT_WITH_COMPLETIONS):
        source = context.get_parameter_source(str(name))
        if source is click.core.ParameterSource.COMMANDLINE:
            flag = "--" + str(name).replace("_", "-")
            raise click.UsageError(f"{flag} does not go with --completions: no text is generated.")


def _with_method(llm: LLM, name: str, values: dict[str, Any], progress: LoadProgress) -> LLM:
    """The method; where it lacks what it needs, something as good to verify with."""
    from outpace.verify.standins import random_heads

    if name == "medusa":
        if values["heads"] is None:
            progress.notice("medusa: no --heads, so untrained random heads stand in")
            return llm.with_method(name, heads=random_heads(llm.model.runtime))
        return llm.with_method(name, heads=values["heads"])
    if name == "draft":
        if values["draft"] is None:
            progress.notice("draft: no --draft, so the model itself stands in")
        return llm.with_method(name, draft=values["draft"] or values["model"])
    if name == "combined":
        return llm.with_method(name, heads=values["heads"], draft=values["draft"])
    return llm.with_method(name)


def _facts(llm: LLM, *, audits: bool) -> dict[str, Any]:
    from outpace.verify.ids import rounding_of, tolerance_of

    info, runtime = llm.info(), llm.model.runtime
    names = ("model", "fingerprint", "device", "dtype", "exactness")
    tolerance = rounding_of(runtime) if audits else tolerance_of(runtime)
    return {**{name: info[name] for name in names}, "tolerance": tolerance}


def _journal(values: dict[str, Any], facts: dict[str, Any], work: object) -> Journal | None:
    """The file of --out; it tells this run, and what it works on, from another one."""
    from outpace.journal import Journal

    if values["out"] is None:
        return None
    settings = ("draft", "heads", "method", "raw", "seed", "samples", "temperature")
    header = {
        "command": "verify",
        **facts,
        **{name: values[name] for name in (*settings, "max_new_tokens")},
        "work": hashlib.sha256(repr(work).encode()).hexdigest(),
    }
    return Journal(values["out"], header, resume=values["resume"])


def _prompts(values: dict[str, Any]) -> list[Prompt]:
    from outpace.prompts import own_prompts, read_prompts

    if values["prompts"] is None:
        return own_prompts(values["limit"])
    return read_prompts(values["prompts"], limit=values["limit"])
