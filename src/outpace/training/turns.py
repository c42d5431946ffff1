"""User turns that a target writes: what it may be asked, in its own words."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outpace.errors import InvalidRequest

if TYPE_CHECKING:
    from outpace.llm import LLM

# Left alone, a small model asks for advice only; these make it ask what people ask for, too.
OPENINGS = (
    "Write a Python function",
    "Write a short story about",
    "Write an email",
    "Write a poem",
    "Translate this German sentence into English:",
    "Translate into Spanish:",
    "Calculate",
    "Solve this problem:",
    "How many",
    "If a train",
    "Question:",
    "Who",
    "When did",
    "Where is",
    "What is the capital",
    "What is the name of the",
    "Which country",
    "Explain",
    "Compare",
    "Imagine you are",
    "Pretend to be",
    "Classify",
    "Give me a list of",
    "Extract",
)
TASKS = (
    "Summarize this text in two sentences:\n\n{}",
    "{}\n\nSummarize the text above.",
    "Translate into German:\n\n{}",
    "Translate into English:\n\n{}",
    "Answer from this text:\n\n{}\n\nWhat does it say first?",
    "{}\n\nQuestion: what is this text about?\nAnswer:",
    "Read this:\n\n{}\n\nWho should do what, and why?",
    "Rewrite this text in simple words:\n\n{}",
    "Correct this text:\n\n{}",
    "Give this text a title and list its facts:\n\n{}",
    "{}\n\nWrite what comes next.",
    "Is this true?\n\n{}",
)
_MARK = "\N{BLACK STAR}user-turn\N{BLACK STAR}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Turns that the target ended itself, and how many of the others there were."""

    texts: list[str]
    unfinished: int
    empty: int


def user_prefix(llm: LLM) -> list[int]:
    """The ids before a user's own words in the target's chat template.

    Raises:
        InvalidRequest: when there is none.
    """
    tokenizer = llm.model.tokenizer
    if tokenizer is None or not tokenizer.inner.chat_template:
        raise InvalidRequest(
            "the model has no chat template from which it could write user turns: give --prompts"
        )
    text = str(
        tokenizer.inner.apply_chat_template(
            [{"role": "user", "content": _MARK}], tokenize=False, add_generation_prompt=True
        )
    )
    if text.count(_MARK) != 1:
        raise InvalidRequest("the chat template changes the user's words: give --prompts")
    return tokenizer.encode(text[: text.index(_MARK)], special=False)


def write(
    llm: LLM,
    prefix: Sequence[int],
    openings: Sequence[str],
    *,
    count: int,
    seed: int,
    temperature: float,
    limit: int,
) -> Written:
    """About `count` sampled turns, each of them behind one of the openings.

    Args:
        llm: the target.
        prefix: from `user_prefix`.
        openings: first words; "" leaves them to the target.
        count: of turns, split evenly over the openings.
        seed: keys the draws.
        temperature: of the draws.
        limit: most tokens behind the opening.
    """
    tokenizer = llm.model.tokenizer
    assert tokenizer is not None, "a prefix comes from a tokenizer"
    texts: list[str] = []
    unfinished = empty = 0
    for i, opening in enumerate(openings):
        result = llm.generate(
            [*prefix, *(tokenizer.encode(opening, special=False) if opening else [])],
            n=-(-count // len(openings)),  # each choice has a seed of its own
            seed=seed + i,
            temperature=temperature,
            max_new_tokens=limit,
        )
        for choice in result.choices:
            if choice.finish_reason != "stop":
                unfinished += 1
            elif not choice.text.strip():
                empty += 1
            else:
                texts.append(opening + choice.text.rstrip() if opening else choice.text.strip())
    return Written(texts=texts, unfinished=unfinished, empty=empty)


def about(passages: Sequence[str], rng: random.Random) -> list[str]:
    """A task about each of the passages."""
    return [rng.choice(TASKS).format(passage.strip()) for passage in passages]
