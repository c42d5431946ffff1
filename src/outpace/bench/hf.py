"""transformers' own ways of generating, on the weights that are loaded already."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation.streamers import BaseStreamer

from outpace.bench.arms import Arm, Completion, Measured
from outpace.bench.memory import PeakMemory
from outpace.errors import InvalidRequest
from outpace.proposers.draft import Draft
from outpace.runtimes.transformers import TransformersRuntime

if TYPE_CHECKING:
    from outpace.llm import LLM

LOOKUP_TOKENS = 10  # what transformers' documentation uses


class HFArm(Arm):
    """`model.generate`, greedy, with the arguments that switch a method on.

    Args:
        name: unique in a run.
        llm: holds the model.
        options: further arguments of `generate`.
    """

    batches = False  # its speculative modes take one sequence at a time

    def __init__(self, name: str, llm: LLM, options: dict[str, Any]) -> None:
        self.name, self.baseline = name, "hf"
        self._llm, self._options = llm, options

    def run(self, prompts: Sequence[list[int]], max_new_tokens: int) -> Measured:
        runtime = _runtime(self._llm)
        self._llm.close()
        completions = []
        begin = time.perf_counter()
        with PeakMemory(runtime.device) as peak:
            for prompt in prompts:
                completions.append(self._one(runtime, prompt, max_new_tokens))
        seconds = time.perf_counter() - begin
        memory = {"weights": runtime.memory()["weights"], **peak.parts()}
        return Measured(completions=completions, seconds=seconds, memory=memory)

    @torch.inference_mode()
    def _one(
        self, runtime: TransformersRuntime, prompt: list[int], max_new_tokens: int
    ) -> Completion:
        ids = torch.tensor([prompt], device=runtime.device)
        clock = _StepClock()
        begin = time.perf_counter()
        output = runtime.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=list(self._llm.model.eos_ids) or None,
            pad_token_id=(self._llm.model.eos_ids or (0,))[0],
            streamer=clock,
            **self._options,
        )
        return Completion(
            tokens=output[0, len(prompt) :].tolist(),
            step_tokens=clock.step_tokens,
            seconds=time.perf_counter() - begin,
            first_token_seconds=(clock.first or begin) - begin,
        )


class _StepClock(BaseStreamer):  # type: ignore[misc]
    """Notes how many tokens each step brings, and when the first ones came."""

    def __init__(self) -> None:
        self.step_tokens: list[int] = []
        self.first: float | None = None
        self._seen_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if not self._seen_prompt:
            self._seen_prompt = True
            return
        if self.first is None:
            self.first = time.perf_counter()
        self.step_tokens.append(int(value.numel()))

    def end(self) -> None:
        """Nothing is held back."""


def hf_arms(llm: LLM, others: Sequence[LLM], temperature: float) -> list[Arm]:
    """Plain generation, prompt lookup, and assisted generation by each draft model at hand.

    Raises:
        InvalidRequest: when the model does not run on transformers, or sampling is asked for.
    """
    _runtime(llm)
    if temperature > 0:
        raise InvalidRequest(
            "--peers hf compares greedy texts: transformers' draws follow no seed of a request"
        )
    arms: list[Arm] = [
        HFArm("hf", llm, {}),
        HFArm("hf-lookup", llm, {"prompt_lookup_num_tokens": LOOKUP_TOKENS}),
    ]
    for other in others:
        draft = getattr(other.method, "runtime", None) if isinstance(other.method, Draft) else None
        if isinstance(draft, TransformersRuntime):
            arms.append(HFArm("hf-assisted", llm, {"assistant_model": draft.model}))
    return arms


def _runtime(llm: LLM) -> TransformersRuntime:
    runtime = llm.model.runtime
    if not isinstance(runtime, TransformersRuntime):
        raise InvalidRequest(
            f"--peers hf needs a model that runs on transformers, not {type(runtime).__name__}"
        )
    return runtime
