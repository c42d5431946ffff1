"""The acceptance rules. Nothing else in outpace decides a token.

Coupled sampling makes the text a function of target, prompt and seed alone (Daliri, Musco,
Suresh, 2408.07978); rejection sampling keeps the distribution only (Leviathan et al. 2211.17192,
Chen et al. 2302.01318, trees as in SpecInfer 2305.09781); typical acceptance is lossy (Medusa,
2401.10774).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from outpace.errors import NumericalError
from outpace.sampling import ACCEPT_STREAM, probabilities, uniforms

if TYPE_CHECKING:
    from torch import Tensor

    from outpace.sampling import Sampler
    from outpace.tree import Tree


@dataclass(frozen=True, slots=True)
class Accepted:
    """Accepted nodes from the root down, and the target's own token after the last of them."""

    path: list[int]
    token: int


class TargetRows:
    """The target's distribution at each candidate node, processed when it is first needed.

    Args:
        tree: the verified tree.
        logits: `[candidates or more, vocab]` raw logits, row i of node i.
        sampler: the request's sampling, at the text before the tree.
    """

    def __init__(self, tree: Tree, logits: Tensor, sampler: Sampler) -> None:
        self.tree = tree
        self.logits = logits
        self.sampler = sampler
        self._tokens: list[tuple[int, float]] | None = None  # of each candidate, with its logit
        if sampler.plain_argmax and logits.device.type != "cpu":
            self._tokens = self._all_tokens()  # one synchronisation instead of one a node

    def position(self, node: int) -> int:
        """Index in the text of the token that is chosen at `node`."""
        return len(self.sampler.tokens) + self.tree.depths[node]

    def weights(self, node: int) -> Tensor:
        """Processed logits `[vocab]` in fp32."""
        return self.sampler.process(self.logits[node], self.tree.path_tokens(node))

    def probs(self, node: int) -> Tensor:
        """The distribution p `[vocab]` in fp32 on the CPU; one-hot when greedy."""
        weights = self.weights(node).cpu()
        _check_value(float(weights[weights.argmax()]), self.position(node))
        if self.sampler.params.greedy:
            probs = torch.zeros_like(weights)
            probs[weights.argmax()] = 1.0
            return probs
        return probabilities(weights)

    def token(self, node: int) -> int:
        """The token that the target itself emits after `node`: argmax of log p + noise."""
        if self._tokens is not None:
            token, value = self._tokens[node]
            _check_value(value, self.position(node))
            return token
        position = self.position(node)
        if self.sampler.plain_argmax:
            return draw(self.logits[node], None, position=position)
        return draw(self.weights(node), self.sampler.noise(position), position=position)

    def _all_tokens(self) -> list[tuple[int, float]]:
        values, tokens = self.logits[: self.tree.num_candidates].max(dim=-1)
        packed = torch.stack([tokens.double(), values.double()]).cpu()
        return [(int(token), float(value)) for token, value in packed.T]


def draw(weights: Tensor, noise: Tensor | None, *, position: int | None = None) -> int:
    """One draw from softmax(weights) by the Gumbel-max trick; the argmax without noise.

    Args:
        weights: `[vocab]` log-weights, -inf for banned tokens.
        noise: `[vocab]` Gumbel noise, or None.
        position: of the token in the text, for errors.

    Raises:
        NumericalError: when the winner's weight is not finite.
    """
    scores = weights.float()  # argmax is ten times slower in half precision on a CPU
    if noise is not None:
        scores = scores + noise.to(weights.device)
    token = int(scores.argmax())
    _check_value(float(weights[token]), position)
    return token


def accept_coupled(tree: Tree, rows: TargetRows) -> Accepted:
    """Follows the token that the target itself emits at each node while a child carries it."""
    path, node = [0], 0
    while True:
        token = rows.token(node)
        for child in tree.children(node):
            if tree.tokens[child] == token:
                path.append(child)
                node = child
                break
        else:
            return Accepted(path, token)


def accept_rejection(tree: Tree, rows: TargetRows) -> Accepted:
    """Accepts each child with min(1, p/q), else goes on with the normalised residual."""
    if rows.sampler.params.greedy:
        return accept_coupled(tree, rows)  # p is one-hot: the two rules are the same
    seed = rows.sampler.seed
    path, node = [0], 0
    while True:
        p = rows.probs(node)
        q = _draft_row(tree, node, p.numel())
        children = tree.children(node)
        chances = uniforms(seed, rows.position(node), len(children), stream=ACCEPT_STREAM)
        for child, chance in zip(children, chances, strict=True):
            token = tree.tokens[child]
            ratio = p[token] if q is None else p[token] / q[token]
            if chance < float(ratio):
                path.append(child)
                node = child
                break
            p, q = _residual(p, q, token)
        else:
            return Accepted(path, draw(p.log(), rows.sampler.noise(rows.position(node))))


def accept_typical(tree: Tree, rows: TargetRows) -> Accepted:
    """Keeps the deepest node whose path is typical: p > min(threshold, alpha * exp(-entropy)).

    Lossy. When greedy it is `accept_coupled`, as in Medusa.
    """
    params = rows.sampler.params
    if params.greedy:
        return accept_coupled(tree, rows)
    typical = [0]
    for node in typical:
        children = tree.children(node)
        if not children:
            continue
        p = rows.probs(node)
        entropy = float(-(p * p.clamp_min(1e-38).log()).sum())
        border = min(params.typical_threshold, params.typical_alpha * math.exp(-entropy))
        typical.extend(child for child in children if float(p[tree.tokens[child]]) > border)
    deepest = max(typical, key=lambda node: tree.depths[node])
    return Accepted(tree.path(deepest), rows.token(deepest))


RULES: dict[str, Callable[[Tree, TargetRows], Accepted]] = {
    "coupled": accept_coupled,
    "rejection": accept_rejection,
    "typical": accept_typical,
}


def accept(tree: Tree, logits: Tensor, sampler: Sampler) -> Accepted:
    """Decides what a verified tree adds to the text, by the request's rule.

    Args:
        tree: the verified tree.
        logits: `[candidates or more, vocab]` the target's raw logits, row i of node i.
        sampler: the request's sampling, at the text before the tree.

    Raises:
        NumericalError: when the target's logits are NaN or infinite, or every token is banned.
    """
    return RULES[sampler.params.acceptance](tree, TargetRows(tree, logits, sampler))


def _draft_row(tree: Tree, node: int, vocab_size: int) -> Tensor | None:
    """q over the children of `node`, as wide as p; None for picked children."""
    if tree.draft_probs is None:
        return None
    q = tree.draft_probs[node].to("cpu", torch.float32)
    if not bool(q.any()):
        return None
    wide = torch.zeros(vocab_size)
    wide[: min(vocab_size, q.numel())] = q[:vocab_size]
    return wide


def _residual(p: Tensor, q: Tensor | None, token: int) -> tuple[Tensor, Tensor | None]:
    """p and q after the rejection of `token`: max(0, p - q) and q without it, normalised."""
    if q is None:
        rest = p.clone()
        rest[token] = 0.0
    else:
        rest = (p - q).clamp_min(0.0)
        q = q.clone()
        q[token] = 0.0
        q = q / q.sum() if float(q.sum()) > 0.0 else None
    total = float(rest.sum())
    # p == q up to rounding leaves nothing: then p itself is what remains.
    return (rest / total if total > 0.0 else p), q


def _check_value(value: float, position: int | None) -> None:
    if math.isfinite(value):
        return
    where = "" if position is None else f" for the token at position {position}"
    if value == -math.inf:
        raise NumericalError(
            f"every token is banned{where}: relax bad_words, logit_bias or the processors"
        )
    raise NumericalError(
        f"the target's logits are {value}{where}: the dtype overflows, "
        "load the model with dtype bfloat16 or float32"
    )
