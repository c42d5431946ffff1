"""Sampling parameters, and how they turn a row of logits into the target's distribution."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from outpace.errors import InvalidRequest

if TYPE_CHECKING:
    from torch import Tensor

GREEDY_BELOW = 1e-5  # a smaller temperature differs from greedy by rounding only
ACCEPTANCE_RULES = ("coupled", "rejection", "typical")
MAX_CHOICES = 1024  # a slip of the finger must not fill the memory

# Streams of the counter-based generator: each purpose draws its own numbers at a position.
TOKEN_STREAM, ACCEPT_STREAM, DRAFT_STREAM = 0, 1, 2

Processor = Callable[[Sequence[int], "Tensor"], "Tensor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are chosen and when it ends; every value is checked here.

    The processed logits are built in this order: logit_bias, repetition, presence and frequency
    penalty, bad words, min_tokens, user processors, temperature, top_k, top_p, min_p.

    Args:
        max_new_tokens: most tokens to emit; None runs to the end of the context.
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens (ties at the border too); 0 keeps all.
        top_p: keep the most likely tokens up to this total probability, in (0, 1].
        min_p: keep tokens of at least this share of the likeliest one's probability, in [0, 1].
        repetition_penalty: divides positive and multiplies negative logits of every token seen in
            prompt or output (CTRL, 1909.05858); 1 is off.
        presence_penalty, frequency_penalty: subtracted once, or once an occurrence, for tokens of
            the output; in [-2, 2].
        logit_bias: token id -> added to its logit; -100 or less bans the token.
        bad_words: token sequences that are never completed.
        min_tokens: end tokens are masked until so many tokens are out, and stop strings are not
            looked for before.
        seed: keys all randomness; None draws one, which the result reports.
        n: number of independent completions, at most 1024.
        stop: strings that end the text; they are cut off unless `include_stop`.
        stop_token_ids: ids that end the text like the model's own end token.
        ignore_eos: the model's own end tokens do not end the text.
        include_stop: keep the stop string in the text.
        logprobs: None, or the number of alternatives reported beside each token's log-probability
            (of the raw model distribution, before any processing).
        acceptance: "coupled", "rejection" or "typical" (lossy); see `outpace.accept`.
        typical_threshold, typical_alpha: of the typical rule: p > min(threshold, alpha*exp(-H)).
        processors: called as f(ids so far, logits [vocab]) -> logits, once a committed row.

    Raises:
        InvalidRequest: naming the field and its range.
    """

    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    logprobs: int | None = None
    acceptance: str = "coupled"
    typical_threshold: float = 0.09
    typical_alpha: float = 0.3
    processors: tuple[Processor, ...] = ()

    def __post_init__(self) -> None:
        unlimited = math.inf
        check_int("max_new_tokens", self.max_new_tokens, 0, optional=True)
        check_number("temperature", self.temperature, 0.0, unlimited)
        check_int("top_k", self.top_k, 0)
        check_number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        check_number("min_p", self.min_p, 0.0, 1.0)
        check_number("repetition_penalty", self.repetition_penalty, 0.0, unlimited, low_open=True)
        check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_int("min_tokens", self.min_tokens, 0)
        check_int("seed", self.seed, 0, 2**64 - 1, optional=True)
        check_int("n", self.n, 1, MAX_CHOICES)
        check_int("logprobs", self.logprobs, 0, 100, optional=True)
        check_number("typical_threshold", self.typical_threshold, 0.0, 1.0)
        check_number("typical_alpha", self.typical_alpha, 0.0, unlimited)
        _check_items("logit_bias", self.logit_bias, Mapping, "ids and numbers")
        for token, bias in self.logit_bias.items():
            check_int("an id in logit_bias", token, 0)
            check_number("a value in logit_bias", bias, -unlimited, unlimited)
        _check_items("stop", self.stop, (tuple, list), "strings")
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise InvalidRequest("stop must hold non-empty strings; leave it out to have none")
        _check_items("stop_token_ids", self.stop_token_ids, (tuple, list), "token ids")
        if any(not isinstance(token, int) for token in self.stop_token_ids):
            raise InvalidRequest(f"stop_token_ids must hold token ids, not {self.stop_token_ids!r}")
        _check_items("bad_words", self.bad_words, (tuple, list), "token sequences")
        for word in self.bad_words:
            ids = isinstance(word, (tuple, list)) and all(isinstance(t, int) for t in word)
            if not ids or not word:
                raise InvalidRequest(f"bad_words must hold non-empty token sequences, not {word!r}")
        _check_items("processors", self.processors, (tuple, list), "callables")
        if not all(callable(processor) for processor in self.processors):
            raise InvalidRequest("processors must hold callables only")
        for name in ("ignore_eos", "include_stop"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} must be true or false, not {getattr(self, name)!r}")
        if self.max_new_tokens is not None and self.min_tokens > self.max_new_tokens:
            raise InvalidRequest(
                f"min_tokens {self.min_tokens} is more than max_new_tokens {self.max_new_tokens}"
            )
        if self.acceptance not in ACCEPTANCE_RULES:
            raise InvalidRequest(
                f"acceptance must be one of {', '.join(ACCEPTANCE_RULES)}, not {self.acceptance!r}"
            )

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def exact(self) -> bool:
        """Whether the acceptance rule keeps the target's output; false for "typical" alone."""
        return self.acceptance != "typical"

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises InvalidRequest for a token id that the target does not have."""
        named = {
            "logit_bias": list(self.logit_bias),
            "stop_token_ids": list(self.stop_token_ids),
            "bad_words": [token for word in self.bad_words for token in word],
        }
        for name, tokens in named.items():
            for token in tokens:
                check_int(f"an id in {name}", token, 0, vocab_size - 1)


class Sampler:
    """One request's distribution: processes logits and gives the noise of each position.

    Args:
        params: checked parameters.
        prompt: the prompt's ids.
        seed: keys the noise.
        vocab_size: width of the target's logits.
        end_ids: tokens masked until `min_tokens` are out.
        device: where the logits live.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt: Sequence[int],
        seed: int,
        vocab_size: int,
        end_ids: Sequence[int] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        self.params = params
        self.seed = seed
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.tokens = list(prompt)
        self.num_prompt = len(self.tokens)
        self._end_ids = list(end_ids)
        self._bias: Tensor | None = None
        if params.logit_bias:
            self._bias = torch.zeros(vocab_size, device=device)
            for token, bias in params.logit_bias.items():
                self._bias[token] = -math.inf if bias <= -100 else bias
        self._repetition = params.repetition_penalty != 1.0
        self._occurrence = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self._seen: Tensor | None = None
        self._counts: Tensor | None = None
        if self._repetition:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self._seen[torch.tensor(self.tokens, dtype=torch.long, device=device)] = True
        if self._occurrence:
            self._counts = torch.zeros(vocab_size, device=device)
        self._masks_end = params.min_tokens > 0 and bool(self._end_ids)
        self.plain_argmax = params.greedy and not (
            params.logit_bias
            or self._repetition
            or self._occurrence
            or params.bad_words
            or self._masks_end
            or params.processors
        )

    def commit(self, tokens: Sequence[int]) -> None:
        """Appends emitted tokens to the context that penalties see."""
        self.tokens.extend(tokens)
        for token in tokens:
            if self._seen is not None:
                self._seen[token] = True
            if self._counts is not None:
                self._counts[token] += 1.0

    def process(self, logits: Tensor, path: Sequence[int], *, drafting: bool = False) -> Tensor:
        """The logits whose softmax is the target's distribution, in fp32; banned tokens at -inf.

        Args:
            logits: `[vocab]` raw logits of one node, any dtype; not changed.
            path: the tokens between the committed text and the token to be chosen: the node's
                ancestors without the root, and the node itself.
            drafting: the row is a draft's, which the user's processors do not see.
        """
        params = self.params
        x = logits.to(torch.float32, copy=True)
        if self._bias is not None:
            x += self._bias
        if self._seen is not None:
            seen = self._with_path(self._seen, path, count=False)
            scaled = torch.where(
                x > 0, x / params.repetition_penalty, x * params.repetition_penalty
            )
            x = torch.where(seen, scaled, x)
        if self._counts is not None:
            counts = self._with_path(self._counts, path, count=True)
            x -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        for word in params.bad_words:
            if self._ends_with(word[:-1], path):
                x[word[-1]] = -math.inf
        num_out = len(self.tokens) - self.num_prompt + len(path)
        if self._masks_end and num_out < params.min_tokens:
            x[self._end_ids] = -math.inf
        for processor in () if drafting else params.processors:
            x = processor([*self.tokens, *path], x)
        if params.greedy:
            return x
        if not bool(torch.isfinite(x.max())):
            return x  # NaN, or every token banned: the rules of acceptance say so
        x = (x - x.max()) / params.temperature
        if 0 < params.top_k < x.numel():
            x = _keep_at_least(x, torch.topk(x, params.top_k).values[-1])
        if params.top_p < 1.0:
            x = _keep_at_least(x, _nucleus_border(x, params.top_p))
        if params.min_p > 0.0:
            x = _keep_at_least(x, x.max() + math.log(params.min_p))
        return x

    def noise(self, position: int, *, stream: int = TOKEN_STREAM) -> Tensor | None:
        """Gumbel noise `[vocab]` of the token at `position` of the text; None when greedy."""
        if self.params.greedy:
            return None
        return gumbel(self.seed, position, self.vocab_size, stream=stream)

    def _with_path(self, base: Tensor, path: Sequence[int], *, count: bool) -> Tensor:
        if not path:
            return base
        base = base.clone()
        for token in path:
            base[token] = base[token] + 1.0 if count else True
        return base

    def _ends_with(self, head: Sequence[int], path: Sequence[int]) -> bool:
        if not head:
            return True
        need = len(head)
        tail = list(path)[-need:]
        if len(tail) < need:
            tail = self.tokens[len(self.tokens) - (need - len(tail)) :] + tail
        return tuple(tail) == tuple(head)


def probabilities(weights: Tensor) -> Tensor:
    """The softmax `[vocab]` of processed logits `[vocab]`, in fp32, summing to one within 1e-6.

    softmax alone may not: on CPUs with short vectors its own sum over 150,000 ids is 5e-6 off.
    """
    probs = torch.softmax(weights, dim=-1)
    return probs / probs.sum()


def gumbel(seed: int, position: int, size: int, *, stream: int = TOKEN_STREAM) -> Tensor:
    """Gumbel(0, 1) noise `[size]` in fp32 on the CPU, a function of its arguments alone.

    A shorter row is a prefix of a longer one, so models with padded vocabularies share noise.
    Philox (Salmon et al. 2011) counts in blocks of its low word; the position is the next word.
    """
    bits = _philox(seed, position, stream).random_raw((size + 1) // 2).view(np.uint32)[:size]
    # v is small where the exponential is small, where its relative precision decides the race.
    v = torch.from_numpy((bits.astype(np.float64) + 0.5).astype(np.float32)) * 2.0**-32
    return -torch.log(-torch.log1p(-v.clamp_max_(1.0 - 2.0**-24)))  # rounding to 1 would ban it


def uniforms(seed: int, position: int, size: int, *, stream: int) -> list[float]:
    """Uniform numbers in [0, 1) with 53 bits, a function of their arguments alone."""
    bits = _philox(seed, position, stream).random_raw(size)
    return [float(b >> np.uint64(11)) * 2.0**-53 for b in bits]


def _philox(seed: int, position: int, stream: int) -> np.random.Philox:
    counter = np.array([0, position, stream, 0], dtype=np.uint64)
    return np.random.Philox(key=np.array([seed, 0], dtype=np.uint64), counter=counter)


def _keep_at_least(x: Tensor, border: Tensor) -> Tensor:
    return x.masked_fill(x < border, -math.inf)


def _nucleus_border(x: Tensor, top_p: float) -> Tensor:
    """The smallest logit inside the nucleus; equal logits are all inside."""
    total = torch.logsumexp(x, dim=-1)
    for k in (min(512, x.numel()), x.numel()):
        values = torch.topk(x, k).values
        before = torch.cumsum(torch.exp(values - total), dim=-1)
        inside = int(torch.searchsorted(before, top_p)) + 1
        if inside <= k:
            break
    return values[min(inside, k) - 1]


def _check_items(name: str, value: object, kind: type | tuple[type, ...], content: str) -> None:
    if not isinstance(value, kind):
        raise InvalidRequest(f"{name} must be a collection of {content}, not {value!r}")


def check_number(
    name: str, value: float, low: float, high: float, *, low_open: bool = False
) -> None:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool)
    ok = ok and abs(value) <= sys.float_info.max  # neither NaN, infinite, nor a longer integer
    ok = ok and low <= value <= high and not (low_open and value == low)
    if not ok:
        allowed = f"{'more than' if low_open else 'at least'} {low:g}"
        allowed += "" if high == math.inf else f" and at most {high:g}"
        allowed = "a finite number" if low == -math.inf else allowed
        raise InvalidRequest(f"{name} must be {allowed}, not {value!r}")


def check_int(
    name: str, value: int | None, low: int, high: int | None = None, *, optional: bool = False
) -> None:
    if value is None and optional:
        return
    ok = isinstance(value, int) and not isinstance(value, bool)
    if not ok or value < low or (high is not None and value > high):  # type: ignore[operator]
        upper = "" if high is None else f" and at most {high}"
        raise InvalidRequest(
            f"{name} must be a whole number of at least {low}{upper}, not {value!r}"
        )
