"""Every error that outpace raises on purpose: each names the cause and what to do about it."""

from __future__ import annotations


class OutpaceError(Exception):
    """Base of all errors whose message is meant for the user, without a traceback."""


class InvalidRequest(OutpaceError, ValueError):
    """A parameter is out of range, a prompt is empty or does not fit: the request is at fault."""


class ModelNotFound(OutpaceError, FileNotFoundError):
    """No model, heads or draft stand under the given name or path."""


class InvalidCheckpoint(OutpaceError, ValueError):
    """A file exists but is truncated, corrupted, or lacks, adds or mis-shapes tensors."""


class UnsupportedModel(OutpaceError, ValueError):
    """The model, or its configuration, cannot run trees; the message names the class and why."""


class IncompatibleModels(OutpaceError, ValueError):
    """Two models cannot work together: another vocabulary, another base for the heads."""


class MissingExtra(OutpaceError, ImportError):
    """An optional dependency is absent; the message holds the exact install line."""


class NumericalError(OutpaceError, ArithmeticError):
    """The target returned NaN or infinite logits; the message names the step and the dtype."""
