"""What `outpace verify` reports: the verdicts counted, for a program or in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

IDENTICAL, TIE, WRONG, NO_POWER = "identical", "numerical tie", "wrong", "no power"

_COMPARED = {
    "ids": "",
    "respelt ids": "; the text's own spelling by the target, not the tokenizer's",
    "text": "; compared as text, since the tokenizer does not give it back",
}
_ENDED = {
    "with the target": "it ends where the target does",
    "early": "it ends early: the target goes on",
    "cut": "it is cut: the target goes on",
    "late": "it goes on behind the target's end",
}


def summary(entries: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The verdict of all entries, and those of each kind; ids are counted by run.

    Gives `verdict`, `runs` (a method at a temperature), `fits` and `completions`.
    """
    runs: dict[tuple[str, float], list[Mapping[str, Any]]] = {}
    others: dict[str, list[dict[str, Any]]] = {"fit": [], "completion": []}
    verdicts = set()
    for entry in entries:
        verdicts.add(entry["verdict"])
        rest = {name: value for name, value in entry.items() if name != "test"}
        if entry["test"] == "ids":
            runs.setdefault((rest.pop("method"), rest.pop("temperature")), []).append(rest)
        else:
            others[entry["test"]].append(rest)
    return {
        "verdict": next((v for v in (WRONG, NO_POWER, TIE) if v in verdicts), IDENTICAL),
        "runs": [
            {
                "method": method,
                "temperature": temperature,
                "identical": _count(found, IDENTICAL),
                "ties": _count(found, TIE),
                "wrong": _count(found, WRONG),
                "prompts": sorted(found, key=lambda entry: entry["prompt"]),
            }
            for (method, temperature), found in runs.items()
        ],
        "fits": others["fit"],
        "completions": sorted(others["completion"], key=lambda entry: entry["line"]),
    }


def text(report: Mapping[str, Any]) -> str:
    """The report in words, one line a finding, the verdict last."""
    lines = [
        f"{report['model']}: {report['dtype']}, {report['exactness']} forwards, "
        f"ties up to {report['tolerance']:g}"
    ]
    for run in report["runs"]:
        lines.append(
            f"{run['method']:10} T={run['temperature']:<4g} {len(run['prompts'])} prompts: "
            f"{run['identical']} identical, {run['ties']} ties, {run['wrong']} wrong"
        )
        lines += [_difference(entry) for entry in run["prompts"] if entry["at"] is not None]
    lines += [_fit(entry) for entry in report["fits"]]
    lines += [_completion(entry) for entry in report["completions"]]
    return "\n".join([*lines, f"verdict: {report['verdict']}"])


def _count(entries: Iterable[Mapping[str, Any]], verdict: str) -> int:
    return sum(entry["verdict"] == verdict for entry in entries)


def _difference(entry: Mapping[str, Any]) -> str:
    place = f"  prompt {entry['prompt']}, token {entry['at']}: {entry['verdict']}, "
    if entry["expected"] is None:
        return place + f"token {entry['found']} where plain decoding ends"
    if entry["found"] is None:
        return place + f"an end where plain decoding goes on with token {entry['expected']}"
    return place + (
        f"{entry['found']} where plain decoding has {entry['expected']}; "
        f"margin {entry['margin']:.2g}, gap {entry['gap']:.2g}"
    )


def _fit(entry: Mapping[str, Any]) -> str:
    line = (
        f"{entry['method']:10} T={entry['temperature']:<4g} {entry['acceptance']}: "
        f"{entry['verdict']}, p = {entry['p_value']:.2g} over {entry['samples']} draws in "
        f"{entry['cells']} cells, {entry['accepted']} of {entry['drafted']} proposed accepted; "
        f"the control, {entry['control_distance']:.0%} of it elsewhere, has p = "
        f"{entry['control_p_value']:.2g}"
    )
    if entry["verdict"] == NO_POWER:
        line += ": this test has no power; raise --samples, or --temperature"
    return line


def _completion(entry: Mapping[str, Any]) -> str:
    line = f"line {entry['line']}: {entry['verdict']}"
    if entry["at"] is not None:
        line += f" at token {entry['at']}"
        line += "" if entry["offset"] is None else f" (character {entry['offset']})"
        shown = [_shown(entry, name) for name in ("found", "expected")]
        line += f", {shown[0]} where the target has {shown[1]}"
        line += "" if entry["gap"] is None else f" by {entry['gap']:.2g}"
    line += f"; {entry['tokens']} tokens"
    line += "" if entry["ended"] is None else f", {_ENDED[entry['ended']]}"
    return line + _COMPARED[entry["compared"]]


def _shown(entry: Mapping[str, Any], name: str) -> str:
    if entry[name] is None:
        return "nothing" if name == "found" else "its end"
    spelling = entry[f"{name}_text"]
    return str(entry[name]) if spelling is None else f"{spelling!r}"
