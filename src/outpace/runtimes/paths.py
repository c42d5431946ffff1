"""A tree as the batch of its paths, for models that take no mask of a tree (ALiBi, for one)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outpace.tree import Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """Each path from the root to a leaf as one row; causality alone is then the right mask.

    The tree r - a - b, r - c has the rows r a b and r c c. What stands behind a leaf repeats it:
    nobody reads it, and causality hides it.

    Args:
        nodes: the tree's node at each place, one row a leaf, all of one length.
        rows: for each node, the place in the flattened batch at which it is read.
    """

    nodes: list[list[int]]
    rows: list[int]

    @classmethod
    def of(cls, tree: Tree) -> Paths:
        """The rows of a tree, leaves in their order."""
        inner = set(tree.parents)
        paths = [tree.path(node) for node in range(len(tree)) if node not in inner]
        depth = max(len(path) for path in paths)
        rows = [0] * len(tree)
        for i, path in reversed(list(enumerate(paths))):
            for at, node in enumerate(path):
                rows[node] = i * depth + at
        return cls(nodes=[path + path[-1:] * (depth - len(path)) for path in paths], rows=rows)

    @property
    def depth(self) -> int:
        """Places of a row."""
        return len(self.nodes[0])

    def holding(self, path: Sequence[int]) -> int:
        """The first row that begins with a path from the root."""
        return next(i for i, row in enumerate(self.nodes) if row[: len(path)] == list(path))
