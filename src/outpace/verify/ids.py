"""Two runs of one request: identical, parted where rounding decides, or wrong."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from outpace.llm import make_params
from outpace.sampling import Sampler
from outpace.verify.teacher import logits_after

if TYPE_CHECKING:
    from torch import Tensor

    from outpace.llm import LLM
    from outpace.runtimes.base import Runtime
    from outpace.sampling import SamplingParams

IDENTICAL, TIE, WRONG = "identical", "numerical tie", "wrong"

# What two row counts may differ by, in units of a logit. Half precision is four steps of a logit
# between 16 and 32: 2^-3 in bfloat16, 2^-6 in float16.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.5, torch.float16: 0.0625}


_BATCH = 8  # prompts decoded side by side


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What became of one request under a method, beside plain decoding.

    Args:
        verdict: "identical", "numerical tie" or "wrong".
        tokens: how many the method emitted.
        at: index of the first differing token in the output; None when there is none.
        margin: by how much the target's best token leads its second one there, in logits.
        gap: by how much the target prefers its best token to the worse of the two that were
            emitted, in logits; the verdict rests on it.
        expected, found: the tokens of plain decoding and of the method there; None past an end.
    """

    verdict: str
    tokens: int
    at: int | None = None
    margin: float | None = None
    gap: float | None = None
    expected: int | None = None
    found: int | None = None


def rounding_of(runtime: Runtime) -> float:
    """The tolerance of the runtime's dtype; that of float32 for one that is not listed."""
    return TOLERANCES.get(runtime.dtype, TOLERANCES[torch.float32])


def tolerance_of(runtime: Runtime) -> float:
    """What a first difference is excused up to: nothing where forwards agree bit by bit."""
    return rounding_of(runtime) if runtime.exactness == "ordinary" else 0.0


def first_difference(a: Sequence[object], b: Sequence[object]) -> int | None:
    """Index of the first differing item; None when the sequences are equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def compare(
    runtime: Runtime,
    prompt: Sequence[int],
    plain: Sequence[int],
    tokens: Sequence[int],
    *,
    params: SamplingParams,
    tolerance: float,
) -> Comparison:
    """Judges a method's output by plain decoding's; the target is asked where they part.

    A text that ends where the other one goes on is wrong: ends do not depend on rounding.

    Args:
        runtime: the target.
        prompt: the request's ids.
        plain: the ids that plain decoding emitted.
        tokens: the ids that the method emitted.
        params: the request's sampling, with its seed.
        tolerance: largest `gap` of a numerical tie.
    """
    at = first_difference(plain, tokens)
    if at is None:
        return Comparison(verdict=IDENTICAL, tokens=len(tokens))
    row = logits_after(runtime, prompt, plain[:at])
    scores = deciding_scores(row, [*prompt, *plain[:at]], len(prompt), params)
    best = torch.topk(scores, 2).values
    here = [side[at] for side in (plain, tokens) if at < len(side)]
    gap = max(float(best[0] - scores[token]) for token in here)
    tie = len(here) == 2 and gap <= tolerance
    return Comparison(
        verdict=TIE if tie else WRONG,
        tokens=len(tokens),
        at=at,
        margin=float(best[0] - best[1]),
        gap=gap,
        expected=plain[at] if at < len(plain) else None,
        found=tokens[at] if at < len(tokens) else None,
    )


def deciding_scores(
    logits: Tensor, text: Sequence[int], num_prompt: int, params: SamplingParams
) -> Tensor:
    """`[vocab]`: what the emitted token is the argmax of, in units of a logit.

    Greedy: the processed logits. Seeded: log-weights plus the position's noise, times the
    temperature, by which rounding errors of a logit were divided.

    Args:
        logits: `[vocab]` raw logits after `text`.
        text: prompt and output.
        num_prompt: length of the prompt.
        params: the request's sampling, with its seed.
    """
    sampler = Sampler(
        params,
        prompt=text[:num_prompt],
        seed=params.seed or 0,
        vocab_size=logits.shape[-1],
        device=logits.device,
    )
    sampler.commit(text[num_prompt:])
    scores = sampler.process(logits, [])
    noise = sampler.noise(len(text))
    if noise is None:
        return scores
    return (scores + noise.to(scores.device)) * params.temperature


def compare_methods(
    llm: LLM,
    methods: Mapping[str, LLM],
    prompts: Sequence[Sequence[int]],
    *,
    sampling: Mapping[str, Any],
    done: Collection[tuple[str, int]] = (),
) -> Iterator[tuple[str, int, Comparison]]:
    """Decodes each prompt plainly and by each method: yields method, number of the prompt, verdict.

    Args:
        llm: decodes plainly.
        methods: name -> the same weights with a method.
        prompts: ids.
        sampling: fields of `SamplingParams`, the seed among them where it is not greedy.
        done: (method, number) that need not be decoded again.
    """
    runtime = llm.model.runtime
    params = make_params(llm.model.tokenizer, sampling)
    for start in range(0, len(prompts), _BATCH):
        numbers = range(start, min(start + _BATCH, len(prompts)))
        open_ = {name: [i for i in numbers if (name, i) not in done] for name in methods}
        needed = sorted({i for left in open_.values() for i in left})
        results = llm.generate_batch([prompts[i] for i in needed], **sampling)
        plain = dict(zip(needed, results, strict=True))
        for name, left in open_.items():
            others = methods[name].generate_batch([prompts[i] for i in left], **sampling)
            for i, other in zip(left, others, strict=True):
                yield (
                    name,
                    i,
                    compare(
                        runtime,
                        prompts[i],
                        plain[i].tokens,
                        other.tokens,
                        params=params,
                        tolerance=tolerance_of(runtime),
                    ),
                )
