"""Lookahead decoding (Fu et al., 2402.02057): the target finds n-grams by Jacobi iteration."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from outpace.proposers.base import Method, Proposer
from outpace.sampling import check_int
from outpace.tree import Tree

if TYPE_CHECKING:
    from torch import Tensor

    from outpace.proposers.base import Outcome, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookahead(Method):
    """Proposes n-grams that the target wrote itself, beside the text, in a window of scratch nodes.

    The window has `window_size` columns and `ngram_size - 1` rows. Row 0 is a chain that hangs
    from the root, every other row hangs column by column under the row above; the target's tokens
    after the last row complete one n-gram a column and become the new last row. For 3 columns and
    n-grams of 3, with candidates a, b behind the root (rows see columns; 10 is row 1, column 0):

           r  a  b  00 01 02 10 11 12
        r  x
        a  x  x
        b  x  x  x
        00 x  .  .  x
        01 x  .  .  x  x
        02 x  .  .  x  x  x
        10 x  .  .  x  .  .  x
        11 x  .  .  x  x  .  .  x
        12 x  .  .  x  x  x  .  .  x

    Args:
        window_size: columns (W of the paper); fewer where the node budget is short, none where
            even one does not fit into half of it or where the window would pass the context's end.
        ngram_size: tokens of an n-gram (N of the paper).
        num_guesses: n-grams kept and proposed for a first token, latest first (G of the paper).
        num_tokens: longest guess: an n-gram goes on with the latest one of its last token.

    Raises:
        InvalidRequest: naming the field and its range.
    """

    name: ClassVar[str] = "lookahead"

    window_size: int = 5
    ngram_size: int = 3
    num_guesses: int = 5
    num_tokens: int = 6

    def __post_init__(self) -> None:
        check_int("window_size", self.window_size, 1)
        check_int("ngram_size", self.ngram_size, 2)
        check_int("num_guesses", self.num_guesses, 1)
        check_int("num_tokens", self.num_tokens, 1)

    def start(self) -> Proposer:
        return LookaheadProposer(self)


class LookaheadProposer(Proposer):
    """One text's pool of n-grams and its window."""

    def __init__(self, method: Lookahead) -> None:
        self.method = method
        self._pool: dict[
            int, dict[tuple[int, ...], None]
        ] = {}  # first token -> the rest, latest last
        self._num_pooled = 0
        self._columns: list[list[int]] = []  # each from row 0 down

    def propose(self, step: Step) -> Tree:
        method, root = self.method, step.tokens[-1]
        if not self._columns:
            most = step.max_nodes  # wider or deeper windows never run
            width, num_rows = min(method.window_size, most), min(method.ngram_size - 1, most)
            self._columns = _first_columns(step.tokens, width, num_rows)
        self._pool_text(step.tokens)
        num_rows = method.ngram_size - 1
        width = min(method.window_size, (step.max_nodes - 1) // 2 // num_rows)
        if method.window_size + num_rows - 1 > step.max_depth:
            width = 0
        max_candidates = step.max_nodes - width * num_rows
        tree = Tree.from_paths(root, self._guesses(root, step.max_depth), max_nodes=max_candidates)
        if width > 0:  # what the candidates left over is the window's
            width = min(method.window_size, (step.max_nodes - len(tree)) // num_rows)
            tree = self._with_window(tree, width)
        return tree

    def observe(self, outcome: Outcome) -> None:
        if not outcome.tokens:
            return  # prefill reads no logits
        tree, said = outcome.tree, _likeliest(outcome.output.logits)
        for node in sorted(set(range(1, tree.num_candidates)) - set(outcome.path)):
            self._pool_ngram([tree.tokens[node], said[node]])
        for i, token in enumerate(said[tree.num_candidates :]):
            ngram = [*self._columns[i], token]
            self._pool_ngram(ngram)
            self._columns[i] = ngram[1:]

    def _pool_text(self, tokens: Sequence[int]) -> None:
        """Pools the n-grams that end in new tokens."""
        size = self.method.ngram_size
        for end in range(max(self._num_pooled + 1, size), len(tokens) + 1):
            self._pool_ngram(tokens[end - size : end])
        self._num_pooled = len(tokens)

    def _pool_ngram(self, ngram: Sequence[int]) -> None:
        guesses = self._pool.setdefault(ngram[0], {})
        guess = tuple(ngram[1:])
        guesses.pop(guess, None)  # so that it becomes the latest
        guesses[guess] = None
        if len(guesses) > self.method.num_guesses:
            del guesses[next(iter(guesses))]

    def _guesses(self, root: int, max_depth: int) -> list[list[int]]:
        """What the pool has for `root`, latest first, then the same with their continuations."""
        pool, depth = self._pool, min(self.method.num_tokens, max_depth)
        guesses = [list(guess) for guess in reversed(pool.get(root, {}))]
        longer = []
        for guess in guesses:
            path = list(guess)
            while len(path) < depth and path[-1] in pool:
                path += next(reversed(pool[path[-1]]))
            longer.append(path)
        return [path[:depth] for path in guesses + longer]

    def _with_window(self, tree: Tree, width: int) -> Tree:
        """The tree with the first `width` columns of the window as scratch."""
        columns, first = self._columns[:width], len(tree)
        tokens = [column[row] for row in range(self.method.ngram_size - 1) for column in columns]
        row_0 = [0, *range(first, first + width - 1)]
        below = range(first, first + len(tokens) - width)  # a node's parent stands `width` before
        return Tree(
            tokens=tree.tokens + tokens,
            parents=[*tree.parents, *row_0, *below],
            num_candidates=first,
            num_scratch_rows=width,
        )


def _likeliest(logits: Tensor) -> list[int]:
    """The argmax of each row of `[rows, vocab]`; on the CPU numpy's is ten times as fast."""
    if logits.device.type != "cpu":
        return [int(token) for token in logits.argmax(dim=-1).tolist()]
    return [int(token) for token in logits.float().numpy().argmax(axis=-1)]


def _first_columns(tokens: Sequence[int], width: int, num_rows: int) -> list[list[int]]:
    """Pieces of the prompt, each at a place drawn from a fixed seed."""
    places = random.Random(0)
    starts = [places.randrange(len(tokens)) for _ in range(width)]
    return [[tokens[(start + i) % len(tokens)] for i in range(num_rows)] for start in starts]
