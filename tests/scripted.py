"""Methods that propose what a test tells them to."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outpace.accept import Accepted, accept
from outpace.proposers.base import Method, Outcome, Proposer, Step
from outpace.sampling import DRAFT_STREAM, TOKEN_STREAM, Sampler, SamplingParams
from outpace.tree import Tree

Guess = Callable[[Step, int], "Sequence[int] | Tree"]  # step, its number -> tokens or a tree


class Scripted(Method):
    """Proposes `guess(step, number)`, clipped to the step's budget, and records what happens.

    Args:
        guess: gives the tokens after the root, or a whole tree.
    """

    name = "scripted"

    def __init__(self, guess: Guess) -> None:
        self.guess = guess
        self.steps: list[tuple[int, int]] = []  # max_depth and max_nodes of each step
        self.trees: list[Tree] = []
        self.outcomes: list[Outcome] = []
        self.num_closed = 0

    def start(self) -> Proposer:
        return _Player(self)


class _Player(Proposer):
    def __init__(self, method: Scripted) -> None:
        self.method = method
        self.number = 0

    def propose(self, step: Step) -> Tree:
        guess = self.method.guess(step, self.number)
        self.number += 1
        if not isinstance(guess, Tree):
            deepest = min(step.max_depth, step.max_nodes - 1)
            guess = Tree.chain([step.tokens[-1], *list(guess)[:deepest]])
        self.method.steps.append((step.max_depth, step.max_nodes))
        self.method.trees.append(guess)
        return guess

    def observe(self, outcome: Outcome) -> None:
        self.method.outcomes.append(outcome)

    def close(self) -> None:
        self.method.num_closed += 1


def _following(texts: Sequence[Sequence[int]], tokens: Sequence[int], k: int) -> list[int]:
    """The next k tokens of the text that starts with `tokens`; none if there is no such text."""
    for text in texts:
        if list(text[: len(tokens)]) == list(tokens):
            return list(text[len(tokens) : len(tokens) + k])
    return []


class Perfect(Scripted):
    """Always right: the next k tokens of one of the known texts (prompt and output)."""

    def __init__(self, *texts: Sequence[int], k: int = 8) -> None:
        super().__init__(lambda step, _: _following(texts, step.tokens, k))


class HalfRight(Scripted):
    """Right for the first `rights[round]` tokens of k, then wrong; the rounds repeat."""

    def __init__(
        self, *texts: Sequence[int], rights: Sequence[int], vocab_size: int, k: int = 8
    ) -> None:
        def guess(step: Step, number: int) -> list[int]:
            tokens = _following(texts, step.tokens, k)
            right = rights[number % len(rights)]
            return tokens[:right] + [(t + 1) % vocab_size for t in tokens[right:]]

        super().__init__(guess)


class Bushy(Scripted):
    """Right for a few tokens, each behind a wrong sibling that has a child of its own.

    With r right tokens a, b: root - x - x          (x is any wrong token)
                                   - a  - y - y
                                        - b
    """

    def __init__(self, *texts: Sequence[int], rights: Sequence[int], vocab_size: int) -> None:
        def guess(step: Step, number: int) -> Tree:
            right = min(rights[number % len(rights)], step.max_depth - 1)
            tokens, parents, node = [step.tokens[-1]], [-1], 0
            for token in _following(texts, step.tokens, right):
                if len(tokens) + 3 > step.max_nodes:
                    break
                wrong = (token + 1) % vocab_size
                tokens += [wrong, wrong, token]
                parents += [node, len(tokens) - 3, node]
                node = len(tokens) - 1
            return Tree(tokens=tokens, parents=parents)

        super().__init__(guess)


class RandomTrees(Scripted):
    """Trees of any shape, some nodes right and some wrong, the last few of them scratch."""

    def __init__(self, *texts: Sequence[int], vocab_size: int, max_nodes: int = 12) -> None:
        def guess(step: Step, number: int) -> Tree:
            rng = random.Random(len(step.tokens) * 1000 + number)
            size = rng.randint(1, min(max_nodes, step.max_nodes))
            candidates = rng.randint(1, size)
            following = _following(texts, step.tokens, size)
            tokens, parents, depths = [step.tokens[-1]], [-1], [0]
            while len(tokens) < size:
                parent = rng.randrange(min(len(tokens), candidates))
                depth = depths[parent] + 1
                if depth > step.max_depth:
                    break
                right = depth <= len(following) and rng.random() < 0.7
                tokens.append(following[depth - 1] if right else rng.randrange(vocab_size))
                parents.append(parent)
                depths.append(depth)
            candidates = min(candidates, len(tokens))
            rows = rng.randint(0, len(tokens) - candidates)
            return Tree(
                tokens=tokens, parents=parents, num_candidates=candidates, num_scratch_rows=rows
            )

        super().__init__(guess)


class AlwaysWrong(HalfRight):
    """Never right: every token differs from the known text's."""

    def __init__(self, *texts: Sequence[int], vocab_size: int, k: int = 8) -> None:
        super().__init__(*texts, rights=[0], vocab_size=vocab_size, k=k)


class Script(Scripted):
    """Plays a list of token lists or trees, one a step, then proposes nothing."""

    def __init__(self, *plays: Sequence[int] | Tree) -> None:
        super().__init__(lambda _, number: plays[number] if number < len(plays) else [])


class Empty(Script):
    """Proposes nothing."""


class Drawn(Scripted):
    """Draws children from a table's rows, without replacement, and says so in `draft_probs`.

    Args:
        table: `[vocab, vocab]` logits of the draft.
        branching: number of children at each depth.
    """

    def __init__(self, table: Tensor, *, branching: Sequence[int]) -> None:
        super().__init__(
            lambda step, _: draw_tree(
                table, step.tokens, step.sampler, branching=branching[: step.max_depth]
            )
        )


def draw_tree(
    table: Tensor,
    tokens: Sequence[int],
    sampler: Sampler,
    *,
    branching: Sequence[int],
    drawn: bool = True,
) -> Tree:
    """A tree below the last of `tokens`, children drawn from `table`'s rows or picked.

    Args:
        table: `[vocab, vocab]` logits of the draft.
        tokens: the text; the last token is the root.
        sampler: gives the noise: the target's own when coupled, a stream of its own else.
        branching: number of children at each depth.
        drawn: False takes the likeliest children and leaves `draft_probs` out.
    """
    stream = TOKEN_STREAM if sampler.params.acceptance == "coupled" else DRAFT_STREAM
    ids, parents, level = [tokens[-1]], [-1], [0]
    for depth, width in enumerate(branching):
        noise = sampler.noise(len(tokens) + depth, stream=stream) if drawn else None
        nodes, level = level, []
        for node in nodes:
            scores = table[ids[node]]
            if noise is not None:
                scores = torch.log_softmax(scores, dim=-1) + noise
            for token in scores.topk(width).indices.tolist():
                level.append(len(ids))
                ids.append(token)
                parents.append(node)
    probs = torch.softmax(table[ids], dim=-1) if drawn else None
    return Tree(tokens=ids, parents=parents, draft_probs=probs)


def play(
    table: Tensor,
    tree_of: Callable[[Sampler], Tree],
    *,
    seed: int,
    num: int,
    params: SamplingParams,
    prompt: Sequence[int] = (0,),
    rule: Callable[[Tree, Tensor, Sampler], Accepted] = accept,
) -> list[list[int]]:
    """Runs the loop without an engine until `num` tokens are out: what each step added.

    Args:
        table: `[vocab, vocab]` logits of the target.
        tree_of: proposes after the sampler's tokens.
        seed: keys the noise.
        num: tokens to emit; the last step may emit more.
        params: the request's.
        prompt: ids before the output.
        rule: decides; a control passes a broken one.
    """
    sampler = Sampler(params, prompt=prompt, seed=seed, vocab_size=table.shape[0])
    added: list[list[int]] = []
    while sum(map(len, added)) < num:
        tree = tree_of(sampler)
        got = rule(tree, table[tree.tokens], sampler)
        assert got.path == tree.path(got.path[-1]), "not a path from the root"
        added.append([*tree.path_tokens(got.path[-1]), got.token])
        sampler.commit(added[-1])
    return added
