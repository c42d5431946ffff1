"""What the engine needs of a method: propose a tree, look at what became of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from pathlib import Path

    from outpace.runtimes.base import Output, Runtime
    from outpace.sampling import Sampler
    from outpace.tree import Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a proposer may know before a forward.

    Args:
        tokens: the committed ids, prompt included; the last one is the root of the tree. The
            list grows between calls and is never rewritten within a request.
        max_nodes: node budget of the tree, root and scratch included.
        max_depth: deepest candidate that could still be emitted or cached.
        sampler: the request's sampling: processed distributions and the noise of a position.
    """

    tokens: Sequence[int]
    max_nodes: int
    max_depth: int
    sampler: Sampler


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a tree.

    Args:
        tree: the tree that ran; during prefill a chain of prompt tokens, all kept.
        path: the accepted nodes, from the root down.
        tokens: the tokens that this forward added to the text: the accepted ones and the target's
            own next token; empty during prefill.
        output: the forward's logits (rows as in `tree.rows`) and hidden states.
    """

    tree: Tree
    path: Sequence[int]
    tokens: Sequence[int]
    output: Output


class Proposer(ABC):
    """One request's state of a method; never decides a token."""

    @abstractmethod
    def propose(self, step: Step) -> Tree:
        """A tree whose root is `step.tokens[-1]`, within `max_nodes` and `max_depth`."""

    def observe(self, outcome: Outcome) -> None:  # noqa: B027 - most methods need no feedback
        """Told after every forward of the request, prefill included."""

    def close(self) -> None:  # noqa: B027 - only a proposer with a cache of its own overrides it
        """The request ended: frees what this proposer holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a method may ask of the model that it serves, once, when it is loaded.

    Args:
        runtime: the target's runtime.
        token_texts: id -> the token's own string in the vocabulary; compared with a draft's.
        fingerprint: identifies the weights; trained heads carry their base's.
        cache: folder for converted models; None is the default one.
    """

    runtime: Runtime
    token_texts: dict[int, str]
    fingerprint: str
    cache: Path | None = None


class Method(ABC):
    """A configured way of proposing: shared by all requests, holds weights, starts proposers.

    Every method is a dataclass whose fields are its options.
    """

    name: ClassVar[str]

    @classmethod
    def options(cls) -> tuple[str, ...]:
        """The names that `load` takes."""
        return tuple(f.name for f in fields(cls))  # type: ignore[arg-type]

    @classmethod
    def load(cls, target: Target, **options: Any) -> Method:
        """The method for a target; loads what it needs.

        Raises:
            InvalidRequest: for an option that the method does not have.
        """
        return cls(**options)

    @abstractmethod
    def start(self) -> Proposer:
        """A proposer with fresh per-request state."""

    def memory(self) -> int:
        """Bytes that this method adds to the target's: weights, and a draft's own cache."""
        return 0
