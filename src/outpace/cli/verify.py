"""`outpace verify`: methods against plain decoding, or any engine's text against the target."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outpace.cli import options
from outpace.cli.options import Option, Text
from outpace.cli.terminal import Command, LoadProgress
from outpace.cli.verdicts import summary, text

if TYPE_CHECKING:
    from outpace.llm import LLM
    from outpace.sampling import SamplingParams
    from outpace.verify.completions import Completion

_FILE = click.Path(dir_okay=False, path_type=Path)
_NUM_PREFIXES = 2  # of the goodness-of-fit test
_SAMPLED = ("coupled", "rejection")

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
        "--draft", section="Method", type=Text(), help="draft: the small model; else the model."
    ),
    Option(
        "--heads",
        section="Method",
        type=Text(),
        help="medusa: the folder with trained heads; else random ones.",
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
        default=400,
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
    from outpace.sampling import SamplingParams
    from outpace.verify.completions import read_completions

    names = _method_names(values)
    sampling = {name: values[name] for name in ("temperature", "seed", "max_new_tokens")}
    params = SamplingParams(**sampling)
    completions = None
    if values["completions"] is not None:
        _refuse_with_completions()
        completions = read_completions(values["completions"])
    if values["resume"] and values["out"] is None:
        raise click.UsageError("--resume needs --out, the file of the run to go on with.")

    llm = _load(values)
    ledger = _Ledger(values, llm)
    with LoadProgress() as progress:
        if completions is not None:
            _audit(llm, completions, ledger, progress, raw=values["raw"])
        else:
            prompts = _prompts(values, llm)
            methods = {name: _with_method(llm, name, values, progress) for name in names}
            _check_ids(llm, methods, prompts, sampling, ledger, progress)
            if not params.greedy and values["samples"] > 0:
                _check_fit(llm, methods, prompts, params, values["samples"], ledger, progress)
    report = {**_facts(llm, values), **summary(ledger.entries)}
    click.echo(json.dumps(report) if values["as_json"] else text(report))
    return 0 if report["verdict"] in ("identical", "numerical tie") else 1


def _method_names(values: dict[str, Any]) -> list[str]:
    names = [name.strip() for name in values["method"].split(",")]
    for name in names:
        if name not in options.METHODS:
            raise click.UsageError(
                f"--method takes {', '.join(options.METHODS)}, separated by commas, not {name!r}."
            )
    for option, method in (("draft", "draft"), ("heads", "medusa")):
        if values[option] is not None and method not in names:
            raise click.UsageError(f"--{option} goes with --method {method} only.")
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
    return llm.with_method(name)


def _check_ids(
    llm: LLM,
    methods: dict[str, LLM],
    prompts: list[list[int]],
    sampling: dict[str, Any],
    ledger: _Ledger,
    progress: LoadProgress,
) -> None:
    from outpace.verify.run import compare_methods

    for temperature in dict.fromkeys((0.0, sampling["temperature"])):
        done = ledger.done("ids", temperature, ("method", "prompt"))
        count, total = len(done), len(methods) * len(prompts)
        label = f"Texts at temperature {temperature:g}"
        progress(count, total, label)
        found = compare_methods(
            llm, methods, prompts, sampling={**sampling, "temperature": temperature}, done=done
        )
        for name, number, comparison in found:
            ledger.add("ids", temperature, method=name, prompt=number, **asdict(comparison))
            count += 1
            progress(count, total, label)


def _check_fit(
    llm: LLM,
    methods: dict[str, LLM],
    prompts: list[list[int]],
    params: SamplingParams,
    samples: int,
    ledger: _Ledger,
    progress: LoadProgress,
) -> None:
    from dataclasses import replace

    from outpace.verify.fit import LEVEL, Partition, choose_prefix, measure_fit

    done = ledger.done("fit", params.temperature, ("method", "acceptance"))
    tests = [(name, rule) for name in methods for rule in _SAMPLED]
    left = [test for test in tests if test not in done]
    if not left:
        return
    label = f"Draws at temperature {params.temperature:g}"
    progress(len(tests) - len(left), len(tests), label)
    prefixes = [choose_prefix(llm, ids, params=params) for ids in prompts[:_NUM_PREFIXES]]
    runtime = llm.model.runtime
    partitions = [Partition.build(runtime, p, params=params, samples=samples) for p in prefixes]
    for number, (name, rule) in enumerate(left, start=len(tests) - len(left) + 1):
        fit = measure_fit(
            methods[name],
            partitions,
            params=replace(params, acceptance=rule),
            samples=samples,
            level=LEVEL / len(tests),
        )
        entry = {"method": name, "verdict": fit.verdict, **asdict(fit)}
        ledger.add("fit", params.temperature, **entry)
        progress(number, len(tests), label)


def _audit(
    llm: LLM,
    completions: list[Completion],
    ledger: _Ledger,
    progress: LoadProgress,
    *,
    raw: bool,
) -> None:
    from outpace.verify.audit import audit

    done = ledger.done("completion", None, ("line",))
    for number, completion in enumerate(completions):
        progress(number, len(completions), "Completions")
        if (completion.line,) not in done:
            found = audit(llm.model, completion, raw=raw)
            ledger.add("completion", None, **asdict(found))


class _Ledger:
    """The verdicts so far, each saved in the file of --out as soon as it is there."""

    def __init__(self, values: dict[str, Any], llm: LLM) -> None:
        self.entries: list[dict[str, Any]] = []
        self._file: Path | None = values["out"]
        if values["resume"] and self._file is not None and self._file.exists():
            self.entries = [json.loads(x) for x in self._file.read_text().splitlines()]

    def add(self, test: str, temperature: float | None, **entry: Any) -> None:
        entry = {"test": test, "temperature": temperature, **entry}
        self.entries.append(entry)
        if self._file is not None:
            with self._file.open("a") as file:
                file.write(json.dumps(entry) + "\n")

    def done(self, test: str, temperature: float | None, key: tuple[str, ...]) -> set[Any]:
        """The values of `key` of the entries of a test."""
        return {
            tuple(entry[name] for name in key)
            for entry in self.entries
            if entry["test"] == test and entry["temperature"] == temperature
        }


def _facts(llm: LLM, values: dict[str, Any]) -> dict[str, Any]:
    from outpace.verify.ids import TOLERANCES, tolerance_of

    info, runtime = llm.info(), llm.model.runtime
    tolerance = tolerance_of(runtime)
    if values["completions"] is not None:
        tolerance = TOLERANCES[runtime.dtype]
    facts = {name: info[name] for name in ("model", "fingerprint", "dtype", "exactness")}
    return {**facts, "tolerance": tolerance}


def _prompts(values: dict[str, Any], llm: LLM) -> list[list[int]]:
    from outpace.llm import prompt_ids

    texts = [
        "Write a Python function that reverses a list.",
        "Repeat this sentence three times: the cat sat on the mat, and the dog sat on the cat.",
    ]
    return [prompt_ids(llm.model.tokenizer, t, raw=values["raw"]) for t in texts]


def _load(values: dict[str, Any]) -> LLM:
    import outpace
    from outpace.cli.terminal import cache_folder

    with LoadProgress() as progress:
        return outpace.load(
            values["model"],
            device=values["device"],
            dtype=values["dtype"],
            exactness=values["exactness"],
            cache=cache_folder(),
            notice=progress.notice,
            progress=progress,
        )
