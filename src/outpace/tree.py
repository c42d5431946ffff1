"""A proposal: a tree of tokens given by parent pointers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """Tokens to check in one forward; every node sees the cached text, its ancestors and itself.

    Node 0, the root, is the last committed token, whose keys and values are not cached yet. A
    chain is a tree with one branch, plain decoding a tree with one node. Candidates come first;
    nodes from `num_candidates` on are *scratch*: computed for the proposer, never accepted.

    ASCII of `mask()` for tokens=[r, a, b, c], parents=[-1, 0, 1, 0] (rows see columns):

          r a b c
        r x
        a x x
        b x x x
        c x . . x

    Args:
        tokens: token ids, one a node.
        parents: `parents[0] == -1` and `0 <= parents[i] < i` for the others.
        draft_probs: `[nodes, vocab]`, row i = the distribution q that i's children were truly
            drawn from (without replacement, in order); None where they were picked, not drawn.
        num_candidates: nodes that may be accepted (default: all).
        num_scratch_rows: trailing scratch nodes whose logits the proposer will read.

    Raises:
        ValueError: when the arrays do not describe such a tree.
    """

    tokens: list[int]
    parents: list[int]
    draft_probs: Tensor | None = None
    num_candidates: int = -1
    num_scratch_rows: int = 0
    depths: list[int] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        n = len(self.tokens)
        if n == 0 or len(self.parents) != n or self.parents[0] != -1:
            raise ValueError("a tree needs a root with parent -1 and one parent a token")
        if self.num_candidates == -1:
            object.__setattr__(self, "num_candidates", n)
        m = self.num_candidates
        if not 1 <= m <= n or not 0 <= self.num_scratch_rows <= n - m:
            raise ValueError(
                f"{m} candidates and {self.num_scratch_rows} scratch rows of {n} nodes"
            )
        depths = [0] * n
        for i in range(1, n):
            parent = self.parents[i]
            if not 0 <= parent < i:
                raise ValueError(f"parent {parent} of node {i} does not come before it")
            if i < m <= parent:
                raise ValueError(f"candidate {i} hangs from scratch node {parent}")
            depths[i] = depths[parent] + 1
        object.__setattr__(self, "depths", depths)

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def chain(cls, tokens: Sequence[int], *, draft_probs: Tensor | None = None) -> Tree:
        """The tree with one branch: each token's parent is the token before it."""
        n = len(tokens)
        return cls(tokens=list(tokens), parents=list(range(-1, n - 1)), draft_probs=draft_probs)

    @classmethod
    def from_paths(cls, root: int, paths: Iterable[Sequence[int]], *, max_nodes: int) -> Tree:
        """Merges paths by shared prefix, first come first kept, and stops at `max_nodes` nodes.

        Args:
            root: the last committed token.
            paths: token sequences that each continue the root, best first.
            max_nodes: node budget, root included.
        """
        tokens, parents = [root], [-1]
        index: dict[tuple[int, int], int] = {}
        for path in paths:
            node = 0
            for token in path:
                child = index.get((node, token))
                if child is None:
                    if len(tokens) >= max_nodes:
                        break
                    child = len(tokens)
                    index[(node, token)] = child
                    tokens.append(token)
                    parents.append(node)
                node = child
            if len(tokens) >= max_nodes:
                break
        return cls(tokens=tokens, parents=parents)

    @property
    def rows(self) -> list[int]:
        """The nodes whose logits somebody reads: all candidates, then the scratch rows."""
        n = len(self.tokens)
        return [*range(self.num_candidates), *range(n - self.num_scratch_rows, n)]

    def children(self, node: int) -> list[int]:
        """The candidate children of `node`, in order of proposal."""
        return [i for i in range(node + 1, self.num_candidates) if self.parents[i] == node]

    def path(self, node: int) -> list[int]:
        """The nodes from the root down to `node`, both included."""
        nodes = []
        while node != -1:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def path_tokens(self, node: int) -> list[int]:
        """The tokens proposed on the way to `node`: without the root, with `node` itself."""
        return [self.tokens[i] for i in self.path(node)[1:]]

    def mask(self) -> npt.NDArray[np.bool_]:
        """`[nodes, nodes]`: True where the row's node sees the column's."""
        n = len(self.tokens)
        mask = np.zeros((n, n), dtype=np.bool_)
        for i, parent in enumerate(self.parents):
            if parent >= 0:
                mask[i] = mask[parent]
            mask[i, i] = True
        return mask
