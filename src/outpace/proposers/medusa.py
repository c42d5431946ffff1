"""Medusa: small heads on the target's hidden state guess the next tokens at once."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from outpace.errors import InvalidRequest
from outpace.heads import MedusaHeads, check_target
from outpace.heads import load as load_heads
from outpace.proposers.base import Method, Proposer
from outpace.runtimes.base import Runtime
from outpace.sampling import check_int
from outpace.tree import Tree

if TYPE_CHECKING:
    from torch import Tensor

    from outpace.proposers.base import Outcome, Step, Target

Choice = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Medusa(Method):
    """Proposes a sparse tree of the heads' likeliest tokens (2401.10774; Hydra 2402.05109).

    Args:
        heads: trained on the target's hidden states.
        runtime: the target's; lends its LM head and its embeddings to heads that use them.
        num_heads: heads in use, from the first one; None uses all.
        choices: nodes of the tree, best first, as ranks from the first head down: (0, 2) is the
            third guess of head 1 below the best guess of head 0. Parents that are left out are
            added. None takes those stored with the heads, or `default_choices`.
        num_nodes: most nodes of a tree, the root included; the runtime's own limit holds too.

    Raises:
        InvalidRequest: naming the field and its range.
        IncompatibleModels: when the heads belong to another target.
    """

    name: ClassVar[str] = "medusa"

    heads: MedusaHeads
    runtime: Runtime
    num_heads: int | None = None
    choices: Sequence[Sequence[int]] | None = None
    num_nodes: int = 32

    def __post_init__(self) -> None:
        heads = self.heads
        check_target(heads.hidden_size, heads.vocab_size, self.runtime)
        check_int("num_heads", self.num_heads, 1, optional=True)
        check_int("num_nodes", self.num_nodes, 1)
        num_heads = heads.num_heads if self.num_heads is None else self.num_heads
        if num_heads > heads.num_heads:
            raise InvalidRequest(
                f"num_heads is {num_heads}, but this checkpoint has {heads.num_heads} heads; "
                f"use <= {heads.num_heads}"
            )
        num_nodes = min(self.num_nodes, self.runtime.max_nodes)
        choices = self.choices
        if choices is None and heads.choices is not None:
            choices = [choice for choice in heads.choices if len(choice) <= num_heads]
        if choices is None:
            choices = default_choices(num_heads, num_nodes, width=heads.width)
        tree = _with_parents(choices)
        for choice in tree:
            if len(choice) > num_heads:
                raise InvalidRequest(
                    f"choices contain {choice}, {len(choice)} tokens deep, but this checkpoint has "
                    f"{heads.num_heads} heads, of which {num_heads} are in use; use <= {num_heads}"
                )
            if not 0 <= choice[-1] < heads.width:
                raise InvalidRequest(
                    f"choices contain {choice}: a rank must be at least 0 and less than the "
                    f"heads' vocabulary of {heads.width} tokens"
                )
        object.__setattr__(self, "num_heads", num_heads)
        object.__setattr__(self, "choices", tree[: num_nodes - 1])

    @classmethod
    def options(cls) -> tuple[str, ...]:
        return ("heads", "num_heads", "choices", "num_nodes")

    @classmethod
    def load(cls, target: Target, **options: Any) -> Medusa:
        """The method with the option `heads` as a folder for `outpace.heads.load`, or loaded."""
        heads = options.pop("heads", None)
        if isinstance(heads, (str, Path)):
            heads = load_heads(heads, target=target)
        if not isinstance(heads, MedusaHeads):
            raise InvalidRequest(f"heads must be the folder with trained heads, not {heads!r}")
        return cls(heads=heads, runtime=target.runtime, **options)

    def start(self) -> Proposer:
        return MedusaProposer(self)

    def memory(self) -> int:
        return sum(tensor.nbytes for tensor in self.heads.state_dict().values())


class MedusaProposer(Proposer):
    """One text's last hidden state."""

    def __init__(self, method: Medusa) -> None:
        self.method = method
        self._hidden: Tensor | None = None  # [hidden] of the token before the root

    def observe(self, outcome: Outcome) -> None:
        self._hidden = outcome.output.hidden[outcome.path[-1]]

    @torch.inference_mode()
    def propose(self, step: Step) -> Tree:
        root, choices = step.tokens[-1], self._choices(step)
        if self._hidden is None or not choices:
            return Tree.chain([root])
        guess = self._guess_by_level if self.method.heads.dependent else self._guess_at_once
        index: dict[Choice, int] = {(): 0}
        index.update((choice, node) for node, choice in enumerate(choices, start=1))
        return Tree(
            tokens=[root, *guess(root, self._hidden, choices)],
            parents=[-1, *(index[choice[:-1]] for choice in choices)],
        )

    def _choices(self, step: Step) -> list[Choice]:
        """The best part of the tree within the step's budget: parents come before children."""
        choices = self.method.choices or ()
        fitting = [tuple(choice) for choice in choices if len(choice) <= step.max_depth]
        return fitting[: step.max_nodes - 1]

    def _guess_at_once(self, _: int, hidden: Tensor, choices: Sequence[Choice]) -> list[int]:
        """The token of each choice: independent heads say the same on every branch."""
        heads = self.method.heads
        inputs = hidden.to(heads.weight).unsqueeze(0)
        depth = max(len(choice) for choice in choices)
        logits = heads(inputs, num_heads=depth, project=self._project)[0]
        best = logits.topk(1 + max(choice[-1] for choice in choices), dim=-1).indices
        tokens: list[list[int]] = heads.tokens(best).tolist()
        return [tokens[len(choice) - 1][choice[-1]] for choice in choices]

    def _guess_by_level(self, root: int, hidden: Tensor, choices: Sequence[Choice]) -> list[int]:
        """The token of each choice: dependent heads read `[nodes, hidden * (depth + 2)]`.

        A row is one node with children: its parent's row and the embedding of its own token.
        """
        heads, runtime = self.method.heads, self.method.runtime
        inputs = hidden.to(heads.weight).unsqueeze(0)
        tokens = torch.tensor([root], device=inputs.device)
        above: dict[Choice, int] = {(): 0}  # node of the level above -> its place in `tokens`
        rows: dict[Choice, int] = {(): 0}  # its parent -> the row of `inputs`
        found, order = [], []
        for i in range(max(len(choice) for choice in choices)):
            level = [choice for choice in choices if len(choice) == i + 1]
            inner = list(dict.fromkeys(choice[:-1] for choice in level))
            own = tokens[[above[node] for node in inner]]
            embeddings = runtime.embed(own.to(runtime.device)).to(inputs)
            inputs = torch.cat([inputs[[rows[node[:-1]] for node in inner]], embeddings], dim=-1)
            rows = {node: row for row, node in enumerate(inner)}
            logits = heads.head(i, inputs, project=self._project)
            best = logits.topk(1 + max(choice[-1] for choice in level), dim=-1).indices
            columns = best[
                [rows[choice[:-1]] for choice in level], [choice[-1] for choice in level]
            ]
            tokens = heads.tokens(columns)
            above = {choice: place for place, choice in enumerate(level)}
            found.append(tokens)
            order.extend(level)
        token_of = dict(zip(order, torch.cat(found).tolist(), strict=True))
        return [token_of[choice] for choice in choices]

    def _project(self, hidden: Tensor) -> Tensor:
        runtime = self.method.runtime
        return runtime.project(hidden.to(runtime.device, runtime.dtype))


def default_choices(num_heads: int, num_nodes: int, *, width: int) -> list[Choice]:
    """The likeliest nodes below the root, `num_nodes - 1` of them at most, best first.

    A path is as likely as the product of a rough prior of its guesses: 0.6 for the best one of
    head 0, 0.85 times as much each head further down, and (r + 1) ** -2 times that at rank r.

    Args:
        num_heads: deepest node.
        num_nodes: the root included.
        width: guesses that a head has.
    """
    choices: list[Choice] = []
    waiting: list[tuple[float, Choice]] = [(-1.0, (0,))]
    while waiting and len(choices) < num_nodes - 1:
        weight, choice = heapq.heappop(waiting)
        choices.append(choice)
        depth, rank = len(choice), choice[-1]
        if depth < num_heads:
            heapq.heappush(waiting, (weight * 0.6 * 0.85**depth, (*choice, 0)))
        if rank + 1 < width:
            ratio = ((rank + 1) / (rank + 2)) ** 2
            heapq.heappush(waiting, (weight * ratio, (*choice[:-1], rank + 1)))
    return choices


def _with_parents(choices: Sequence[Sequence[int]]) -> list[Choice]:
    """Each choice once, behind its parent."""
    if not isinstance(choices, Sequence) or not all(isinstance(c, Sequence) for c in choices):
        raise InvalidRequest(f"choices must be a list of lists of ranks, not {choices!r}")
    tree: dict[Choice, None] = {}
    for choice in choices:
        if len(choice) == 0:
            raise InvalidRequest("choices contain an empty one, which would be the root")
        for depth in range(1, len(choice) + 1):
            for rank in choice:
                check_int("a rank in choices", rank, 0)
            tree[tuple(choice[:depth])] = None
    return list(tree)
