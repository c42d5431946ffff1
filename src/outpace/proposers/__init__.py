"""The table of methods: a new one is one file here and one line below."""

from __future__ import annotations

from typing import Any

from outpace.errors import InvalidRequest
from outpace.proposers.base import Method, Outcome, Proposer, Step, Target
from outpace.proposers.combined import Combined
from outpace.proposers.draft import Draft
from outpace.proposers.lookahead import Lookahead
from outpace.proposers.lookup import Lookup
from outpace.proposers.medusa import Medusa
from outpace.proposers.plain import Plain

__all__ = ["METHODS", "Method", "Outcome", "Proposer", "Step", "Target", "load_method"]

METHODS: dict[str, type[Method]] = {
    method.name: method for method in (Plain, Lookup, Draft, Medusa, Lookahead, Combined)
}


def load_method(name: str, target: Target, **options: Any) -> Method:
    """The named method for a target.

    Raises:
        InvalidRequest: for a name or an option that does not exist; it lists those that do.
    """
    if not isinstance(name, str) or name not in METHODS:
        raise InvalidRequest(f"method must be one of {', '.join(METHODS)}, not {name!r}")
    method = METHODS[name]
    unknown = sorted(set(options) - set(method.options()))
    if unknown:
        allowed = ", ".join(method.options()) or "none"
        raise InvalidRequest(f"method {name} has no option {unknown[0]!r}; it has: {allowed}")
    return method.load(target, **options)
