"""From the options of a command to a loaded model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import outpace
from outpace.cli.terminal import LoadProgress, cache_folder

if TYPE_CHECKING:
    from outpace.llm import LLM


def load(values: dict[str, Any], *, method: str = "plain", **method_arguments: Any) -> LLM:
    """Loads what the options in MODEL and LOADING name; progress and notices go to stderr."""
    with LoadProgress() as progress:
        return outpace.load(
            values["model"],
            method=method,
            device=values["device"],
            dtype=values["dtype"],
            exactness=values["exactness"],
            runtime=values["runtime"],
            cache=cache_folder(),
            notice=progress.notice,
            progress=progress,
            **method_arguments,
        )
