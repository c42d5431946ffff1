"""The curves of a training, as PNG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from outpace.errors import MissingExtra

if TYPE_CHECKING:
    from outpace.training.medusa import Progress


def check_available() -> None:
    """Fails before training where curves cannot be drawn after it.

    Raises:
        MissingExtra: without matplotlib.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MissingExtra("training needs matplotlib: pip install 'outpace[train]'") from error


def draw(progress: Progress, trees: Sequence[dict[str, Any]]) -> bytes:
    """Loss, held-out accuracy and expected tokens per step, side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.8, 3.4), layout="constrained")
    loss, accuracy, tree = figure.subplots(1, 3)
    loss.plot(*zip(*progress.losses, strict=True), marker=".")
    loss.set(xlabel="step", ylabel="loss (nats)", title="Training loss")
    steps = [step for step, _, _ in progress.evaluations]
    for head in range(len(progress.evaluations[0][2])):
        shares = [top[head] for _, _, top in progress.evaluations]
        accuracy.plot(steps, shares, marker=".", label=f"head {head}")
    accuracy.set(xlabel="step", ylabel="share of positions", title="Held-out top-1")
    accuracy.legend()
    nodes = [entry["nodes"] for entry in trees]
    tree.plot(nodes, [entry["tokens_per_step"] for entry in trees], marker=".", label="tokens/step")
    tree.plot(nodes, [entry["predicted_speedup"] for entry in trees], marker=".", label="speed-up")
    tree.set(xlabel="nodes of the tree", title="Expected from held-out text")
    tree.legend()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    return buffer.getvalue()
