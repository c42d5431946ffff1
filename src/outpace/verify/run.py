"""The checks of `outpace verify`, entry by entry; what a ledger holds already is not done again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from outpace.verify.audit import audit
from outpace.verify.fit import LEVEL, Partition, choose_prefix, measure_fit
from outpace.verify.ids import compare_methods

if TYPE_CHECKING:
    from outpace.llm import LLM
    from outpace.sampling import SamplingParams
    from outpace.verify.completions import Completion
    from outpace.verify.ledger import Ledger

Progress: TypeAlias = Callable[[int, int, str], None]  # done, total, label

_NUM_PREFIXES = 2  # of the goodness-of-fit test
_RULES = ("coupled", "rejection")  # those that keep the distribution


def check_ids(
    llm: LLM,
    methods: Mapping[str, LLM],
    prompts: Sequence[Sequence[int]],
    *,
    sampling: Mapping[str, Any],
    ledger: Ledger,
    progress: Progress,
) -> None:
    """Greedy texts, and seeded ones at the temperature asked for, against plain decoding's.

    Args:
        llm: decodes plainly.
        methods: name -> the same weights with a method.
        prompts: ids.
        sampling: fields of `SamplingParams`.
        ledger: takes the comparisons.
        progress: receives (done, total, label).
    """
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


def check_fit(
    llm: LLM,
    methods: Mapping[str, LLM],
    prompts: Sequence[Sequence[int]],
    *,
    params: SamplingParams,
    samples: int,
    ledger: Ledger,
    progress: Progress,
) -> None:
    """Draws by each method and rule against the target's distribution, after the first prompts.

    Args:
        llm: decodes plainly.
        methods: name -> the same weights with a method.
        prompts: ids.
        params: the draws' sampling; not greedy.
        samples: draws for each of the prefixes, by each method and rule.
        ledger: takes the fits.
        progress: receives (done, total, label).
    """
    done = ledger.done("fit", params.temperature, ("method", "acceptance"))
    tests = [(name, rule) for name in methods for rule in _RULES]
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


def check_completions(
    llm: LLM,
    completions: Sequence[Completion],
    *,
    ledger: Ledger,
    progress: Progress,
    raw: bool,
) -> None:
    """Audits of completions.

    Args:
        llm: the target.
        completions: from `read_completions`.
        ledger: takes the audits.
        progress: receives (done, total, label).
        raw: prompts of text were continued as they stand.
    """
    done = ledger.done("completion", None, ("line",))
    for number, completion in enumerate(completions, start=1):
        if (completion.line,) not in done:
            found = audit(llm.model, completion, raw=raw)
            ledger.add("completion", None, **asdict(found))
        progress(number, len(completions), "Completions")
