"""One token a forward: the baseline that every other method must reproduce."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from outpace.proposers.base import Method, Proposer
from outpace.tree import Tree

if TYPE_CHECKING:
    from outpace.proposers.base import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain(Method):
    """Proposes nothing."""

    name: ClassVar[str] = "plain"

    def start(self) -> Proposer:
        return PlainProposer()


class PlainProposer(Proposer):
    """The root alone."""

    def propose(self, step: Step) -> Tree:
        return Tree.chain([step.tokens[-1]])
