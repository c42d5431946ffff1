"""Lookup: what followed earlier occurrences of the last few tokens (Saxena's prompt lookup)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from outpace.proposers.base import Method, Proposer
from outpace.sampling import check_int
from outpace.tree import Tree

if TYPE_CHECKING:
    from outpace.proposers.base import Step


VOTE = 5  # votes of a match against those of one that is a token shorter


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup(Method):
    """Copies from prompt and output where the text's end occurred before.

    The first branch goes where most matches go on, a longer match outvoting shorter ones; the
    others follow one match each, longest first.

    Args:
        max_ngram: longest match looked for, in tokens.
        min_ngram: shortest match that is trusted.
        num_tokens: longest continuation; a match of n tokens gives 4 n - 1 at most, which with
            the root fills whole blocks of four rows.
        num_branches: most matches that are continued.

    Raises:
        InvalidRequest: naming the field and its range.
    """

    name: ClassVar[str] = "lookup"

    max_ngram: int = 4
    min_ngram: int = 1
    num_tokens: int = 15
    num_branches: int = 8

    def __post_init__(self) -> None:
        check_int("max_ngram", self.max_ngram, 1)
        check_int("min_ngram", self.min_ngram, 1, self.max_ngram)
        check_int("num_tokens", self.num_tokens, 1)
        check_int("num_branches", self.num_branches, 1)

    def start(self) -> Proposer:
        return LookupProposer(self)


class LookupProposer(Proposer):
    """One text's index: n-gram -> where its latest continuations start."""

    def __init__(self, method: Lookup) -> None:
        self.method = method
        self._starts: dict[tuple[int, ...], list[int]] = {}
        self._num_indexed = 1  # a continuation starts behind the first token at the earliest

    def propose(self, step: Step) -> Tree:
        self._extend(step.tokens)
        paths = self._paths(step.tokens, step.max_depth)
        return Tree.from_paths(step.tokens[-1], paths, max_nodes=step.max_nodes)

    def _extend(self, tokens: Sequence[int]) -> None:
        """Indexes the new tokens as starts; the text's end has none yet, so it finds not itself."""
        method = self.method
        for start in range(self._num_indexed, len(tokens)):
            for n in range(method.min_ngram, min(method.max_ngram, start) + 1):
                starts = self._starts.setdefault(tuple(tokens[start - n : start]), [])
                starts.append(start)
                if len(starts) > method.num_branches:
                    del starts[0]
        self._num_indexed = len(tokens)

    def _matches(self, tokens: Sequence[int]) -> dict[int, int]:
        """Start of a continuation -> tokens matched before it: longest first, then latest."""
        method = self.method
        found: dict[int, int] = {}
        for n in range(min(method.max_ngram, len(tokens)), method.min_ngram - 1, -1):
            for start in reversed(self._starts.get(tuple(tokens[-n:]), ())):
                found.setdefault(start, n)
        return found

    def _paths(self, tokens: Sequence[int], max_depth: int) -> Iterator[list[int]]:
        """Continuations; one that reaches the text's end goes on with what it proposed itself."""
        matches = list(self._matches(tokens).items())[: self.method.num_branches]
        depths = [min(4 * n - 1, self.method.num_tokens, max_depth) for _, n in matches]
        if matches:
            yield self._voted(tokens, matches, depths[0])
        for (start, _), depth in zip(matches, depths, strict=True):
            yield [_following(tokens, start, i) for i in range(depth)]

    def _voted(
        self, tokens: Sequence[int], matches: Sequence[tuple[int, int]], depth: int
    ) -> list[int]:
        """The likeliest continuation: those that it leaves have no say in the rest of it."""
        path: list[int] = []
        for i in range(depth):
            votes: dict[int, int] = {}
            for start, n in matches:
                token = _following(tokens, start, i)
                votes[token] = votes.get(token, 0) + VOTE**n
            path.append(max(votes, key=lambda token: votes[token]))
            matches = [m for m in matches if _following(tokens, m[0], i) == path[-1]]
        return path


def _following(tokens: Sequence[int], start: int, i: int) -> int:
    """The i-th token of the continuation from `start`, which repeats itself past the end."""
    return tokens[start + i % (len(tokens) - start)]
