"""outpace: a language model that you already run, faster, without changing what it says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outpace.errors import (
    IncompatibleModels,
    InvalidCheckpoint,
    InvalidRequest,
    MissingExtra,
    ModelNotFound,
    NumericalError,
    OutpaceError,
    UnsupportedModel,
)

if TYPE_CHECKING:
    from outpace.llm import LLM, Choice, Piece, Result, load
    from outpace.sampling import SamplingParams
    from outpace.stats import Stats

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "Choice",
    "IncompatibleModels",
    "InvalidCheckpoint",
    "InvalidRequest",
    "MissingExtra",
    "ModelNotFound",
    "NumericalError",
    "OutpaceError",
    "Piece",
    "Result",
    "SamplingParams",
    "Stats",
    "UnsupportedModel",
    "load",
]

_LAZY = {
    "LLM": "outpace.llm",
    "Choice": "outpace.llm",
    "Piece": "outpace.llm",
    "Result": "outpace.llm",
    "load": "outpace.llm",
    "SamplingParams": "outpace.sampling",
    "Stats": "outpace.stats",
}


def __getattr__(name: str) -> object:
    """Imports what needs torch when it is first used, so that `outpace --help` stays quick."""
    if name not in _LAZY:
        raise AttributeError(f"module 'outpace' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
