"""The plots of a report, as PNG; every axis has its unit."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from outpace.errors import MissingExtra

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE = (7.2, 3.6)  # inches


def draw_all(results: dict[str, Any]) -> dict[str, bytes]:
    """File name -> PNG, for what the results hold.

    Raises:
        MissingExtra: without matplotlib.
    """
    plots = {
        "speedup_by_category.png": _speedup_by_category,
        "acceptance_by_depth.png": _acceptance_by_depth,
        "acceptance_by_position.png": _acceptance_by_position,
        "forward_cost.png": _forward_cost,
        "time_split.png": _time_split,
    }
    if len(results["concurrency"]) > 1:
        plots["throughput_by_concurrency.png"] = _throughput
    return {name: _png(draw, results) for name, draw in plots.items()}


def check_available() -> None:
    """Fails early where plots cannot be drawn later.

    Raises:
        MissingExtra: without matplotlib.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MissingExtra("plots need matplotlib: pip install 'outpace[bench]'") from error


def _png(draw: Any, results: dict[str, Any]) -> bytes:
    from matplotlib.figure import Figure  # a figure of its own needs no display and no globals

    figure = Figure(figsize=_SIZE, layout="constrained")
    draw(figure.subplots(), results)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def _speedup_by_category(axes: Axes, results: dict[str, Any]) -> None:
    names = [n for n, m in results["methods"].items() if m["baseline"] != n]
    categories = sorted({c for n in names for c in results["methods"][n]["categories"]})
    width = 0.8 / max(len(names), 1)
    for i, name in enumerate(names):
        found = results["methods"][name]["categories"]
        heights = [(found.get(c) or {}).get("speedup") or 0.0 for c in categories]
        places = [x + (i - (len(names) - 1) / 2) * width for x in range(len(categories))]
        axes.bar(places, heights, width, label=name)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(categories)), categories, rotation=30, ha="right")
    axes.set_ylabel("speed-up (times the baseline)")
    axes.set_title("Median decode speed-up by category")
    if names:
        axes.legend(fontsize=8)


def _acceptance_by_depth(axes: Axes, results: dict[str, Any]) -> None:
    for name, method in results["methods"].items():
        points = method["acceptance_by_depth"]
        if points:
            axes.plot(
                [p["depth"] for p in points],
                [100 * p["acceptance"] for p in points],
                marker="o",
                label=name,
            )
    axes.set_xlabel("depth of a candidate (tokens after the last committed one)")
    axes.set_ylabel("steps that accepted so deep (%)")
    axes.set_ylim(0, 100)
    axes.set_title("Acceptance by depth")
    _legend(axes)


def _acceptance_by_position(axes: Axes, results: dict[str, Any]) -> None:
    for name, method in results["methods"].items():
        points = method["acceptance_by_position"]
        if method["baseline"] != name and points:
            axes.plot(
                [p["from"] for p in points],
                [p["accepted_per_step"] for p in points],
                marker="o",
                label=name,
            )
    axes.set_xlabel("position in the output (tokens)")
    axes.set_ylabel("accepted candidates (tokens a step)")
    axes.set_title("Acceptance by position")
    _legend(axes)


def _forward_cost(axes: Axes, results: dict[str, Any]) -> None:
    cost = results["forward_cost"]
    points = sorted((int(n), s) for n, s in cost["seconds"].items())
    axes.plot([n for n, _ in points], [1e3 * s for _, s in points], marker="o")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("nodes in one forward (tokens)")
    axes.set_ylabel("time (ms)")
    axes.set_title(f"Cost of a forward behind {cost['context']} cached tokens")


def _time_split(axes: Axes, results: dict[str, Any]) -> None:
    methods = {n: m for n, m in results["methods"].items() if m["time_split"]}
    left = [0.0] * len(methods)
    for phase in next(iter(methods.values()))["time_split"] if methods else ():
        parts = []
        for method in methods.values():
            total = sum(method["time_split"].values())
            parts.append(100 * method["time_split"][phase] / total if total else 0.0)
        axes.barh(list(methods), parts, left=left, label=phase)
        left = [a + b for a, b in zip(left, parts, strict=True)]
    axes.set_xlabel("share of the time (%)")
    axes.set_title("Where the time goes (prefill counts as forward)")
    _legend(axes)


def _throughput(axes: Axes, results: dict[str, Any]) -> None:
    numbers = sorted(map(int, results["concurrency"]))
    for name in results["methods"]:
        found = {n: results["concurrency"][str(n)].get(name) for n in numbers}
        rates = {n: f["tokens_per_second"] for n, f in found.items() if f is not None}
        axes.plot(list(rates), list(rates.values()), marker="o", label=name)
    axes.set_xticks(numbers)
    axes.set_xlabel("requests side by side")
    axes.set_ylabel("throughput (tokens/s)")
    axes.set_title("Throughput by concurrency, prefill included")
    _legend(axes)


def _legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8)
