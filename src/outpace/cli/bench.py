"""`outpace bench`: methods side by side on the same prompts, with the reasons."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outpace.cli import options
from outpace.cli.loading import load
from outpace.cli.options import Option, Text
from outpace.cli.terminal import Command, LoadProgress
from outpace.errors import InvalidRequest

if TYPE_CHECKING:
    from outpace.bench.arms import Arm
    from outpace.bench.harness import Item
    from outpace.llm import LLM

_PATH = click.Path(path_type=Path)
# The entries of --methods that name a model or a folder: the method, and the option that it is.
_WITH_FOLDER = {
    "draft": ("draft", "draft"),
    "medusa": ("medusa", "heads"),
    "combined+draft": ("combined", "draft"),
    "combined+heads": ("combined", "heads"),
}

BENCH = [
    Option(
        "--methods",
        section="Methods",
        default="plain,lookup,lookahead,combined",
        show_default=True,
        type=Text(),
        help="Separated by commas; draft:MODEL, medusa:FOLDER, combined+draft:MODEL and "
        "combined+heads:FOLDER name what they need.",
    ),
    Option(
        "--peers",
        section="Methods",
        type=click.Choice(["hf"]),
        help="hf: transformers' own generate, prompt lookup and assisted generation as well.",
    ),
    Option(
        "--prompts",
        section="Prompts",
        type=_PATH,
        help="JSONL with turns (Spec-Bench), prompt or messages, or a text file; else a few of "
        "its own.",
    ),
    Option(
        "--limit",
        section="Prompts",
        type=click.IntRange(min=1),
        help="So many prompts, spread evenly over the file.",
    ),
    Option(
        "--max-new-tokens",
        section="Prompts",
        default=128,
        show_default=True,
        type=click.IntRange(min=2),
        help="Most tokens of a completion.",
    ),
    Option(
        "--temperature",
        section="Prompts",
        default=0.0,
        show_default=True,
        type=click.FloatRange(min=0),
        help="0 is greedy.",
    ),
    Option(
        "--seed", section="Prompts", default=7, show_default=True, type=int, help="Of sampling."
    ),
    Option(
        "--concurrency",
        section="Prompts",
        default="1",
        show_default=True,
        help="Requests side by side; several numbers separated by commas.",
    ),
    Option(
        "--out",
        section="Output",
        required=True,
        type=_PATH,
        help="Folder for results.json, report.html, the plots and the journal of the run.",
    ),
    Option(
        "--resume",
        section="Output",
        is_flag=True,
        help="Go on with the run whose journal is in --out.",
    ),
]


@click.command(cls=Command, params=[*options.MODEL, *options.LOADING, *BENCH, *options.DEBUG])
def bench(**values: Any) -> None:
    """Measures methods on the same prompts, in turn, and says what pays here and why.

    A speed-up compares the decoding of the same ids; where a method's ids differ from plain
    decoding's, that is reported and the prompt has none.
    """
    from outpace.bench import plots, report
    from outpace.bench.forward_cost import measure_forward_cost
    from outpace.bench.harness import run
    from outpace.bench.results import (
        provenance,
        summarise,
        write_atomically,
        write_results,
    )
    from outpace.journal import Journal
    from outpace.sampling import SamplingParams

    methods = _methods(values["methods"])
    concurrency = _concurrency(values["concurrency"])
    SamplingParams(temperature=values["temperature"], seed=values["seed"])
    plots.check_available()
    prompts = _prompts(values)
    llm = load(values)
    items = _items(llm, prompts)
    with LoadProgress() as progress:
        arms = _arms(llm, methods, values)
        out: Path = values["out"]
        header = {name: str(v) for name, v in values.items() if name not in _FREE}
        header["fingerprint"] = llm.model.fingerprint
        with Journal(out / "journal.jsonl", header, resume=values["resume"]) as journal:
            run(
                arms,
                items,
                journal,
                max_new_tokens=values["max_new_tokens"],
                concurrency=concurrency,
                progress=progress,
            )
            cost = measure_forward_cost(llm.model.runtime)
            summary = summarise(
                journal.entries,
                arms,
                categories={item.number: item.category for item in items},
                concurrency=concurrency,
                cost=cost,
            )
        results = {**provenance(llm), "settings": header, **summary}
        pictures = plots.draw_all(results)
        for name, png in pictures.items():
            (out / name).write_bytes(png)
        write_atomically(out / "report.html", report.render(results, pictures))
        write_results(out / "results.json", results)
    _show(results)


_FREE = {"out", "resume", "debug"}  # what may differ between a run and the one that goes on with it


def _methods(text: str) -> dict[str, tuple[str, dict[str, str]]]:
    """Entry -> its method and options; plain, the baseline, is always the first."""
    found: dict[str, tuple[str, dict[str, str]]] = {"plain": ("plain", {})}
    names = [name for name in options.METHODS if name not in _WITH_FOLDER] + list(_WITH_FOLDER)
    for entry in text.split(","):
        name, _, folder = entry.strip().partition(":")
        if name not in names:
            raise click.UsageError(
                f"--methods takes {', '.join(names)}, separated by commas, not {name!r}."
            )
        method, option = _WITH_FOLDER.get(name, (name, ""))
        if bool(folder) != bool(option):
            wanted = f"{name}:{option.upper()}" if option else name
            raise click.UsageError(f"--methods: write {wanted}, not {entry.strip()!r}.")
        chosen = (method, {option: folder} if folder else {})
        if found.setdefault(name, chosen) != chosen:
            raise click.UsageError(f"--methods names {name} twice; one run compares one of them.")
    return found


def _concurrency(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise click.UsageError(f"--concurrency takes numbers, not {text!r}.") from error
    if min(numbers) < 1:
        raise click.UsageError("--concurrency starts at 1.")
    return list(dict.fromkeys(numbers))


def _prompts(values: dict[str, Any]) -> Any:
    from outpace.prompts import OWN, own_prompts, read_prompts

    if values["prompts"] is None:
        return own_prompts(values["limit"] or len(OWN))
    return read_prompts(values["prompts"], limit=values["limit"])


def _items(llm: LLM, prompts: Any) -> list[Item]:
    from outpace.bench.harness import Item
    from outpace.llm import prompt_ids

    items = [
        Item(
            number=number,
            category=prompt.category,
            prompt=prompt_ids(llm.model.tokenizer, prompt.content, raw=False),
        )
        for number, prompt in enumerate(prompts)
    ]
    longest, context = max(len(item.prompt) for item in items), llm.model.runtime.max_context
    if longest > context:  # told before anything is measured
        raise InvalidRequest(
            f"a prompt has {longest} tokens, the model's context is {context}: shorten it"
        )
    return items


def _arms(
    llm: LLM, methods: dict[str, tuple[str, dict[str, str]]], values: dict[str, Any]
) -> list[Arm]:
    from outpace.bench.arms import MethodArm

    sampling = {"temperature": values["temperature"], "seed": values["seed"]}
    llms = {name: llm.with_method(method, **own) for name, (method, own) in methods.items()}
    arms: list[Arm] = [MethodArm(name, own, sampling) for name, own in llms.items()]
    if values["peers"] == "hf":
        from outpace.bench.hf import hf_arms

        arms += hf_arms(llm, list(llms.values()), values["temperature"])
    return arms


def _show(results: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from outpace.bench.report import by_category, overview, reasons

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 140  # a file has no edge to wrap at
    for title, rows in (("Methods", overview(results)), ("Speed-up", by_category(results))):
        table = Table(title=title)
        for i, heading in enumerate(rows[0]):
            table.add_column(heading, justify="left" if i == 0 else "right")
        for row in rows[1:]:
            table.add_row(*row)
        console.print(table)
    for name, text in reasons(results):
        console.print(f"{name}: {text}", markup=False)
    for name, method in results["methods"].items():
        for parting in method["divergences"]:
            console.print(f"{name} parts from {method['baseline']}: {json.dumps(parting)}")
