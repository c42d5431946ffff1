"""`report.html`: one file with the measured trade-offs, the plots and the reasons."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from typing import Any

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
  color: #1a1a1a; background: #fff; }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; }
th, td { border: 1px solid #ccc; padding: .3rem .6rem; text-align: right; vertical-align: top; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; border: 1px solid #ddd; background: #fff; }
.bad { color: #a40000; font-weight: 600; }
small { color: #555; }
"""


def render(results: dict[str, Any], plots: dict[str, bytes]) -> str:
    """The page; plots are embedded, nothing is fetched."""
    title = f"outpace bench: {results['model']['model']}, {results['dtype']}"
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>",
        f"<p><code>{escape(results['command'])}</code><br><small>{_machine(results)}</small></p>",
        "<h2>Methods</h2>",
        _table(overview(results)),
        _divergences(results),
        "<h2>Trade-offs, as measured</h2>",
        _table(trade_offs(results)),
        "<h2>Why</h2>",
        _reasons(results),
        "<h2>By category</h2>",
        _table(by_category(results)),
        *(_figure(name, png) for name, png in plots.items()),
        "</body></html>\n",
    ]
    return "\n".join(parts)


def overview(results: dict[str, Any]) -> list[list[str]]:
    """Heading and one row a method, as text; the terminal shows the same table."""
    rows = [
        [
            "method",
            "tokens/s",
            "speed-up",
            "quartiles",
            "without loops",
            "tokens per step",
            "acceptance",
            "first token (ms)",
            "same ids",
        ]
    ]
    for name, m in results["methods"].items():
        spread = m["speedup_spread"]
        rows.append(
            [
                name,
                number(m["tokens_per_second"], 1),
                number(m["speedup"], 2),
                f"{number(spread['lower'], 2)} to {number(spread['upper'], 2)}",
                number(m["speedup_without_degenerate"]["median"], 2),
                number(m["tokens_per_step"], 2),
                percent(m["acceptance"]),
                number(1e3 * m["first_token_seconds"], 0),
                f"{m['identical']} of {m['prompts']}",
            ]
        )
    return rows


def trade_offs(results: dict[str, Any]) -> list[list[str]]:
    """The criteria of a choice down the side, a column a method."""
    methods = results["methods"]
    rows = [["criterion", *methods]]
    memory = {n: m["memory"] for n, m in methods.items()}
    rows.append(
        ["extra weights and caches (MiB)", *(_mib(memory[n].get("method")) for n in methods)]
    )
    rows.append(["target weights (MiB)", *(_mib(memory[n].get("weights")) for n in methods)])
    rows.append(["key-value cache (MiB)", *(_mib(memory[n].get("cache")) for n in methods)])
    rows.append(["scratch of a run (MiB)", *(_mib(memory[n].get("scratch")) for n in methods)])
    rows.append(["peak of the process (MiB)", *(_mib(memory[n].get("peak")) for n in methods)])
    for which, label in ((max, "pays most on"), (min, "pays least on")):
        rows.append([label, *(_extreme(m, which) for m in methods.values())])
    for number_of, figures in results["concurrency"].items():
        rows.append(
            [
                f"throughput, {number_of} at a time (tokens/s)",
                *(number((figures.get(n) or {}).get("tokens_per_second"), 1) for n in methods),
            ]
        )
    rows.append(
        [
            "equivalence",
            *(
                ("exact" if m["exact"] else "approximate")
                + f", {m['identical']} of {m['prompts']} equal"
                for m in methods.values()
            ),
        ]
    )
    return rows


def by_category(results: dict[str, Any]) -> list[list[str]]:
    """Speed-up of each method in each category, and the mean over all prompts."""
    methods = results["methods"]
    categories = sorted({c for m in methods.values() for c in m["categories"]})
    rows = [["category", "prompts", *methods]]
    for category in categories:
        found = [m["categories"].get(category) for m in methods.values()]
        count = max(f["prompts"] for f in found if f is not None)
        rows.append([category, str(count), *(number(f and f["speedup"], 2) for f in found)])
    means = [number(m["speedup_spread"]["mean"], 2) for m in methods.values()]
    total = max(m["prompts"] for m in methods.values())
    rows.append(["mean over all", str(total), *means])
    return rows


def reasons(results: dict[str, Any]) -> list[tuple[str, str]]:
    """(method, sentence): what a step costs and brings."""
    found = []
    for name, method in results["methods"].items():
        balance = method.get("break_even")
        if balance is not None and name != method["baseline"]:
            needed = percent(balance["acceptance_needed"])
            sentence = f"{balance['why']} (acceptance {percent(balance['acceptance'])} of the "
            found.append((name, sentence + f"candidates, break-even at {needed})"))
    return found


def number(value: float | None, digits: int) -> str:
    """A figure, or a dash where there is none."""
    return "-" if value is None else f"{value:,.{digits}f}"


def percent(value: float | None) -> str:
    """A share as per cent, or a dash."""
    return "-" if value is None else f"{100 * value:.0f} %"


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:,.1f}"


def _extreme(method: dict[str, Any], which: Any) -> str:
    found = {c: f["speedup"] for c, f in method["categories"].items() if f["speedup"] is not None}
    if not found:
        return "-"
    category = which(found, key=lambda c: found[c])
    return f"{category} ({found[category]:.2f})"


def _machine(results: dict[str, Any]) -> str:
    machine, versions = results["machine"], results["versions"]
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    return escape(
        f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, "
        f"{machine['device']}; Python {results['python']}, {listed}; commit {results['commit']}; "
        f"forwards: {results['model']['exactness']}; tokens/s and speed-up count decoding after "
        "the first step, medians over prompts"
    )


def _divergences(results: dict[str, Any]) -> str:
    parts = []
    for name, method in results["methods"].items():
        for at in method["divergences"]:
            parts.append(
                f'<li class="bad">{escape(name)} parts from {escape(method["baseline"])} at token '
                f"{at['at']} of prompt {at['prompt']}: {at['found']} instead of {at['expected']}; "
                "the prompt has no speed-up</li>"
            )
    return f"<ul>{''.join(parts)}</ul>" if parts else ""


def _reasons(results: dict[str, Any]) -> str:
    found = reasons(results)
    if not found:
        return "<p>No method was measured beside plain decoding.</p>"
    lines = (f"<li><b>{escape(name)}</b>: {escape(text)}</li>" for name, text in found)
    return f"<ul>{''.join(lines)}</ul>"


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in body)
    return f"<table><tr>{cells}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _figure(name: str, png: bytes) -> str:
    data = base64.b64encode(png).decode()
    text = name.removesuffix(".png").replace("_", " ")
    return f'<p><img alt="{escape(text)}" src="data:image/png;base64,{data}"></p>'
