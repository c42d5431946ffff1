"""What the right answer is, by code that shares nothing with outpace: full recompute and numpy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy import stats
from transformers import PreTrainedModel

Array = npt.NDArray[np.float64]
Logits = Callable[[list[int]], Array]  # ids so far -> raw logits of the next token, [vocab]

NEAR_TIE = 1e-4  # two top logits this close may fall either way in fp32
RAREST = 1e-5  # a correct sampler fails a distribution check with this probability


@dataclass(frozen=True, slots=True)
class Decoded:
    """One greedy completion.

    Args:
        tokens: the new ids, the end token included.
        gaps: per token, how far the best processed logit is above the second.
        finish_reason: "stop" or "length".
    """

    tokens: list[int]
    gaps: list[float]
    finish_reason: str


def recompute(model: PreTrainedModel) -> Logits:
    """Next-token logits by a forward over the whole text, without cache, mask or positions."""
    memo: dict[tuple[int, ...], Array] = {}

    def logits(ids: list[int]) -> Array:
        key = tuple(ids)
        if key not in memo:
            with torch.inference_mode():
                row = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
            memo[key] = row.double().numpy()
        return memo[key]

    return logits


def lookup(table: torch.Tensor) -> Logits:
    """Next-token logits of a table model: the last token's row of `[vocab, vocab]`."""
    rows = table.double().numpy()
    return lambda ids: rows[ids[-1]]


def greedy(
    logits: Logits,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    context: int = 2**30,
    end_ids: Sequence[int] = (),
    **processing: Any,
) -> Decoded:
    """One token at a time: the likeliest one after `process`, until an end."""
    ids, gaps = list(prompt), []
    while len(ids) < min(len(prompt) + max_new_tokens, context):
        x = process(logits(ids), ids, num_prompt=len(prompt), end_ids=end_ids, **processing)
        best, second = np.sort(x)[::-1][:2]
        gaps.append(float(best - second))
        ids.append(int(np.argmax(x)))
        if ids[-1] in end_ids:
            return Decoded(ids[len(prompt) :], gaps, "stop")
    return Decoded(ids[len(prompt) :], gaps, "length")


def process(
    logits: Array,
    ids: Sequence[int],
    *,
    num_prompt: int,
    end_ids: Sequence[int] = (),
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
    bad_words: Sequence[Sequence[int]] = (),
    min_tokens: int = 0,
) -> Array:
    """The processed logits after `ids`, of which the first `num_prompt` are the prompt."""
    x = np.array(logits, dtype=np.float64)
    output = list(ids)[num_prompt:]
    for token, bias in (logit_bias or {}).items():
        x[token] = -np.inf if bias <= -100 else x[token] + bias
    for token in set(ids):
        x[token] *= repetition_penalty if x[token] < 0 else 1 / repetition_penalty
    for token in set(output):
        x[token] -= presence_penalty + frequency_penalty * output.count(token)
    for word in bad_words:
        head = list(word[:-1])
        if list(ids)[len(ids) - len(head) :] == head:
            x[word[-1]] = -np.inf
    if len(output) < min_tokens:
        x[list(end_ids)] = -np.inf
    if temperature == 0.0:
        return x
    x = x / temperature
    if top_k:
        x[x < np.sort(x)[::-1][min(top_k, x.size) - 1]] = -np.inf
    if top_p < 1.0:
        p = softmax(x)
        order = np.argsort(-p, kind="stable")
        inside = int(np.sum(np.cumsum(p[order]) < top_p)) + 1
        x[p < p[order[min(inside, x.size) - 1]]] = -np.inf
    if min_p > 0.0:
        p = softmax(x)
        x[p < min_p * p.max()] = -np.inf
    return x


def softmax(x: Array) -> Array:
    """`[..., n]` logits to probabilities."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def probabilities(table: torch.Tensor, **processing: Any) -> Array:
    """`[vocab, vocab]` transition matrix of a table model whose processing needs no history."""
    rows = table.double().numpy()
    return np.stack([softmax(process(row, [], num_prompt=0, **processing)) for row in rows])


def marginals(transition: Array, last: int, num: int) -> list[Array]:
    """The exact distribution of each of the next `num` tokens after `last`."""
    row, rows = transition[last], []
    for _ in range(num):
        rows.append(row)
        row = row @ transition
    return rows


def joint(next_probs: Callable[[list[int]], Array], prompt: Sequence[int], num: int) -> Array:
    """`[vocab] * num`: the exact probability of each continuation of `prompt`."""
    vocab = next_probs(list(prompt)).size
    table = np.zeros((vocab,) * num)
    for tokens in itertools.product(range(vocab), repeat=num):
        chance = 1.0
        for i, token in enumerate(tokens):
            if chance > 0.0:
                chance *= float(next_probs([*prompt, *tokens[:i]])[token])
        table[tokens] = chance
    return table


def assert_distribution(counts: npt.ArrayLike, probs: npt.ArrayLike) -> None:
    """Fails where `counts` are no draws from `probs`, by a chi-square test; rare cells pooled."""
    seen = np.asarray(counts, dtype=np.float64).ravel()
    expected = np.asarray(probs, dtype=np.float64).ravel() * seen.sum()
    assert math.isclose(expected.sum(), seen.sum(), rel_tol=1e-6)
    impossible = expected == 0.0
    assert not seen[impossible].any(), f"impossible tokens: {np.flatnonzero(seen * impossible)}"
    common = expected >= 5.0
    rare = ~common & ~impossible
    seen = np.append(seen[common], seen[rare].sum())
    expected = np.append(expected[common], expected[rare].sum())
    if expected[-1] < 5.0:  # too little even together: goes to the smallest common cell
        smallest = int(np.argmin(expected[:-1]))
        expected[smallest] += expected[-1]
        seen[smallest] += seen[-1]
        seen, expected = seen[:-1], expected[:-1]
    if expected.size > 1:
        chance = float(stats.chisquare(seen, expected, sum_check=False).pvalue)
        assert chance > RAREST, f"counts {seen} where {expected.round(1)} are expected"


def assert_rate(hits: int, trials: int, rate: float) -> None:
    """Fails where `hits` of `trials` is no binomial draw with this rate."""
    assert_distribution([hits, trials - hits], [rate, 1.0 - rate])


def assert_same(tokens: Sequence[int], right: Decoded) -> None:
    """Fails where ids differ from the oracle's before a near-tie of the oracle's."""
    for i, (got, want) in enumerate(zip(tokens, right.tokens, strict=False)):
        if got != want:
            assert right.gaps[i] <= NEAR_TIE, (
                f"token {i} is {got}, not {want} (ahead by {right.gaps[i]:.2g})"
            )
            return
    assert len(tokens) == len(right.tokens), f"{len(tokens)} tokens, not {len(right.tokens)}"
