"""`results.json`: what was measured, how and on what.

{
  "command", "commit", "versions", "python", "machine", "model", "dtype", "settings",
  "methods": {name: {
      "tokens_per_second",        decode speed: tokens after the first step over their time
      "speedup",                  median over prompts of the ratio to the baseline's decode
                                  speed; prompts whose ids differ have no ratio
      "speedup_spread",           median, lower and upper quartile, mean, number of prompts
      "speedup_without_degenerate", the same without prompts listed in "degenerate"
      "tokens_per_step", "first_token_seconds",
      "acceptance",               accepted of the drafted candidates
      "acceptance_by_depth",      [{depth, drafted, acceptance}]
      "acceptance_by_position",   [{from, to, steps, accepted_per_step}], by output token
      "exact", "identical", "prompts", "divergences", "baseline",
      "memory",                   bytes: weights, method, cache, scratch, peak
      "time_split",               seconds: propose, forward, accept, other
      "break_even",               what a step must bring, what it brings, and why
      "categories": {name: {prompts, tokens_per_second, tokens_per_step, speedup}}}},
  "concurrency": {number: {name: {"tokens_per_second",   by wall time of a group
                                  "speedup"}}},          null where any ids differ
  "forward_cost": {"context", "seconds": {nodes: seconds}}
}
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.bench.figures import method_figures
from outpace.bench.harness import completions_of

if TYPE_CHECKING:
    from outpace.bench.arms import Arm
    from outpace.bench.forward_cost import ForwardCost
    from outpace.llm import LLM

_MEASURED_WITH = ("outpace", "torch", "transformers", "tokenizers", "numpy")


def provenance(llm: LLM) -> dict[str, Any]:
    """Command, commit, versions, machine and model of a run."""
    import torch

    info = llm.info()
    return {
        "command": " ".join(["outpace", *sys.argv[1:]]),
        "commit": _commit(),
        "versions": {name: metadata.version(name) for name in _MEASURED_WITH},
        "python": platform.python_version(),
        "machine": {
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "system": platform.platform(),
            "device": info["device"],
        },
        "model": info,
        "dtype": info["dtype"],
    }


def summarise(
    entries: Sequence[dict[str, Any]],
    arms: Sequence[Arm],
    *,
    categories: dict[int, str],
    concurrency: Sequence[int],
    cost: ForwardCost,
) -> dict[str, Any]:
    """The part of the results that the measured entries decide."""
    first = concurrency[0]
    methods = {}
    for arm in arms:
        own = completions_of(entries, arm.name, first)
        methods[arm.name] = {
            "baseline": arm.baseline,
            **method_figures(
                own,
                completions_of(entries, arm.baseline, first),
                categories=categories,
                exact=arm.exact,
                memory=_peak_memory(entries, arm.name, first),
                cost=cost,
            ),
        }
    return {
        "methods": methods,
        "concurrency": {str(num): _throughput(entries, arms, num) for num in concurrency},
        "forward_cost": {"context": cost.context, "seconds": cost.seconds},
    }


def write_atomically(file: Path, text: str) -> None:
    """Replaces a file whole, or leaves the old one."""
    new = file.with_name(f".{file.name}.new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, file)


def write_results(file: Path, results: dict[str, Any]) -> None:
    """Saves the results as JSON."""
    write_atomically(file, json.dumps(results, indent=1) + "\n")


def _throughput(
    entries: Sequence[dict[str, Any]], arms: Sequence[Arm], num: int
) -> dict[str, dict[str, float | None]]:
    """Tokens a second of groups that ran side by side, prefill included, and the ratio.

    There is none where any prompt's ids differ from the baseline's: other texts, other work.
    """
    rates, texts = {}, {}
    arms = [arm for arm in arms if num == 1 or arm.batches]
    for arm in arms:
        own = [e for e in entries if e["arm"] == arm.name and e["concurrency"] == num]
        tokens = sum(len(c["tokens"]) for e in own for c in e["completions"])
        rates[arm.name] = tokens / sum(e["seconds"] for e in own)
        done = completions_of(entries, arm.name, num)
        texts[arm.name] = {number: completion["tokens"] for number, completion in done.items()}
    return {
        arm.name: {
            "tokens_per_second": rates[arm.name],
            "speedup": rates[arm.name] / rates[arm.baseline]
            if texts[arm.name] == texts[arm.baseline]
            else None,
        }
        for arm in arms
    }


def _peak_memory(entries: Sequence[dict[str, Any]], arm: str, num: int) -> dict[str, int]:
    """The largest figure of each part."""
    found: dict[str, int] = {}
    for entry in entries:
        if entry["arm"] == arm and entry["concurrency"] == num:
            for part, size in entry["memory"].items():
                found[part] = max(found.get(part, 0), size)
    return found


def _commit() -> str | None:
    """The commit of the code that runs, where it is a checkout."""
    done = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or None


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
