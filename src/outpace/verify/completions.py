"""Completions that any engine produced, as a file holds them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.errors import InvalidRequest

if TYPE_CHECKING:
    from outpace.llm import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine made of a prompt.

    Args:
        line: its number in the file, from 1.
        prompt: text, messages or ids.
        text: what it wrote; None where `tokens` are known.
        tokens: the ids that it emitted, with or without the end token.
        finish_reason: "stop" where the engine says that the model ended the text, "length" where a
            budget did; None where nobody knows.
    """

    line: int
    prompt: Prompt
    text: str | None = None
    tokens: list[int] | None = None
    finish_reason: str | None = None


def read_completions(path: Path) -> list[Completion]:
    """The completions of a JSONL file: `prompt` or `messages`, and `text` or `tokens`.

    `finish_reason` is read where it stands; other keys are somebody else's.

    Raises:
        InvalidRequest: naming the line and what is wrong with it.
    """
    try:
        lines = path.read_bytes().decode().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} cannot be read as UTF-8 text: {error}") from error
    completions = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            completions.append(_completion(number, json.loads(line)))
        except ValueError as error:
            raise InvalidRequest(f"{path}, line {number}: {error}") from error
    if not completions:
        raise InvalidRequest(f"{path} holds no completions: one JSON object a line is expected")
    return completions


def _completion(line: int, entry: Any) -> Completion:
    if not isinstance(entry, Mapping):
        raise ValueError(f"a completion is a JSON object, not {entry!r}")
    prompt = _one_of(entry, "prompt", "messages")
    _one_of(entry, "text", "tokens")
    text, tokens, reason = entry.get("text"), entry.get("tokens"), entry.get("finish_reason")
    if text is not None and not isinstance(text, str):
        raise ValueError(f"text must be a string, not {text!r}")
    if tokens is not None and not _are_ids(tokens):
        raise ValueError(f"tokens must be a list of token ids, not {tokens!r}")
    if reason not in ("stop", "length", None):
        raise ValueError(f"finish_reason must be stop or length, not {reason!r}")
    return Completion(line=line, prompt=prompt, text=text, tokens=tokens, finish_reason=reason)


def _one_of(entry: Mapping[str, Any], first: str, second: str) -> Any:
    given = [entry[name] for name in (first, second) if entry.get(name) is not None]
    if len(given) != 1:
        raise ValueError(f"give either {first} or {second}")
    return given[0]


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int and token >= 0 for token in value)
