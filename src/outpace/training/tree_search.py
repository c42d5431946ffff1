"""The tree that pays best: nodes in the order of their worth, as many as the machine carries."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from outpace.training.validate import MAX_RANK

if TYPE_CHECKING:
    from outpace.bench.forward_cost import ForwardCost
    from outpace.training.validate import Ranks

BUDGETS = (4, 8, 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a tree of so many nodes, the root included, is expected to give.

    Args:
        nodes: of the tree.
        tokens_per_step: on held-out text.
        speedup: over plain decoding by the cost of a forward and of the heads.
    """

    nodes: int
    tokens_per_step: float
    speedup: float

    def facts(self) -> dict[str, Any]:
        """For a file."""
        return {
            "nodes": self.nodes,
            "tokens_per_step": round(self.tokens_per_step, 4),
            "predicted_speedup": round(self.speedup, 4),
        }


def best_nodes(found: Ranks, max_nodes: int) -> tuple[list[tuple[int, ...]], list[float]]:
    """The `max_nodes - 1` best nodes below the root, best first, and the worth of each.

    A node is worth the share of positions whose right tokens lead through it. No child is worth
    more than its parent, so taking the best one each time gives the best tree of every size.
    """
    everything = torch.arange(len(found.ranks))
    waiting: list[tuple[int, tuple[int, ...]]] = []
    inside: dict[tuple[int, ...], torch.Tensor] = {}

    def open_children(node: tuple[int, ...], rows: torch.Tensor) -> None:
        if len(node) == found.ranks.shape[1]:
            return
        column = found.ranks[rows, len(node)]
        for rank in range(MAX_RANK):
            hits = rows[column == rank]
            if len(hits):
                inside[(*node, rank)] = hits
                heapq.heappush(waiting, (-len(hits), (*node, rank)))

    open_children((), everything)
    nodes: list[tuple[int, ...]] = []
    worth: list[float] = []
    while waiting and len(nodes) < max_nodes - 1:
        count, node = heapq.heappop(waiting)
        nodes.append(node)
        worth.append(-count / len(everything))
        open_children(node, inside.pop(node))
    return nodes, worth


def budgets(
    worth: Sequence[float], cost: ForwardCost, *, heads_seconds: float, max_nodes: int
) -> list[Budget]:
    """Expected tokens per step and speed-up for trees of several sizes.

    Args:
        worth: from `best_nodes`.
        cost: of the target's forwards.
        heads_seconds: of one proposal.
        max_nodes: that the runtime takes.
    """
    plain = cost.at(1)
    sizes = [n for n in BUDGETS if n <= min(max_nodes, len(worth) + 1)] or [len(worth) + 1]
    return [
        Budget(
            nodes=n,
            tokens_per_step=1 + sum(worth[: n - 1]),
            speedup=(1 + sum(worth[: n - 1])) * plain / (cost.at(n) + heads_seconds),
        )
        for n in sizes
    ]
