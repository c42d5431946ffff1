"""How well heads guess held-out text, and what that is worth: tokens per step and speed-up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from outpace.heads import MedusaHeads
    from outpace.training.examples import Positions

MAX_RANK = 16
ROWS = 256  # rows of logits at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Where the target's own tokens stood among the heads' guesses.

    Args:
        ranks: `[positions, K]`: rank of the right token in head i's guesses along the right path,
            MAX_RANK where it is further down, -1 behind the end of the text.
    """

    ranks: Tensor

    def top(self, head: int, k: int) -> float:
        """Share of positions whose token is among the first k guesses of a head."""
        own = self.ranks[:, head]
        own = own[own >= 0]
        return float((own < k).float().mean()) if len(own) else 0.0

    def conditional(self, head: int, rank: int, *, beyond: int = 4) -> float:
        """Share of positions with this rank, where all heads before had theirs below `beyond`."""
        own = self.ranks[(self.ranks[:, :head] < beyond).all(dim=1) & (self.ranks[:, head] >= 0)]
        return float((own[:, head] == rank).float().mean()) if len(own) else 0.0


@torch.inference_mode()
def ranks(heads: MedusaHeads, positions: Positions, *, max_positions: int | None = None) -> Ranks:
    """The ranks of every position of held-out text, or of so many spread evenly over it."""
    chosen = torch.arange(len(positions))
    if max_positions is not None and len(chosen) > max_positions:
        chosen = chosen[torch.linspace(0, len(chosen) - 1, max_positions).long()]
    found = []
    for index in torch.split(chosen, ROWS):
        batch = positions.batch(index)
        logits = heads(batch.hidden, batch.embeddings, project=positions.project)
        best = heads.tokens(logits.topk(min(MAX_RANK, logits.shape[-1]), dim=-1).indices)
        hit = best == batch.labels.unsqueeze(-1)
        rank = torch.where(hit.any(-1), hit.int().argmax(-1), MAX_RANK)
        found.append(torch.where(batch.labels < 0, -1, rank))
    return Ranks(ranks=torch.cat(found))


def tokens_per_step(found: Ranks, choices: Sequence[Sequence[int]]) -> float:
    """Expected tokens of a step with a tree: 1 and the share of positions that pass each node."""
    rows = found.ranks
    share = 1.0
    for choice in choices:
        wanted = torch.tensor(list(choice))
        share += float((rows[:, : len(choice)] == wanted).all(dim=1).float().mean())
    return share
