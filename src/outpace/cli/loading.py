"""Loading a model for a command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import outpace
from outpace.cli.terminal import LoadProgress, cache_folder

if TYPE_CHECKING:
    from outpace.llm import LLM


def load(values: dict[str, Any], *, method: str = "plain", **method_arguments: Any) -> LLM:
    """The model that the options name, its progress on stderr."""
    with LoadProgress() as progress:
        return outpace.load(
            values["model"],
            method=method,
            device=values["device"],
            dtype=values["dtype"],
            exactness=values["exactness"],
            cache=cache_folder(),
            notice=progress.notice,
            progress=progress,
            **method_arguments,
        )
