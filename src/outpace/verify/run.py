"""Methods against plain decoding over many prompts, batch by batch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from outpace.llm import make_params
from outpace.verify.ids import Comparison, compare, tolerance_of

if TYPE_CHECKING:
    from outpace.llm import LLM

_BATCH = 8  # prompts decoded side by side


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
