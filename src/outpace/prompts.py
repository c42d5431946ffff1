"""Prompts to measure and verify with: from a file, or a few of this project's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outpace.errors import InvalidRequest

_NOTE = (
    "The ferry leaves the harbour at seven, at noon and at six. On Sundays there is no ferry at "
    "noon. A ticket costs four euros, a bicycle two euros more. The harbour office sells tickets "
    "from half past six in the morning until the last ferry has left."
)
_CODE = "def total(prices):\n    sum = 0\n    for i in range(len(prices)):\n        sum = sum + \
prices[i]\n    return sum"

OWN = (
    ("code", "Write a Python class Queue with the methods put, get and size."),
    ("editing", f"Replace the word ferry with the word boat in this text:\n\n{_NOTE}"),
    ("question", f"{_NOTE}\n\nWhen does the last ferry leave, and what does a bicycle cost?"),
    ("writing", "Write a short story about a clockmaker who repairs a broken bell."),
    ("summary", f"Summarise this text in two sentences:\n\n{_NOTE}"),
    ("mathematics", "A farm has 14 hens that lay 5 eggs a week each. How many eggs in 6 weeks?"),
    ("code", f"Rewrite this function so that it is shorter:\n\n{_CODE}"),
    ("lists", "List the months of the year, each with its number of days."),
    ("translation", "Translate into French: The train to the coast leaves in ten minutes."),
    ("chat", "I cannot sleep before exams. What can I do in the evening before one?"),
    ("facts", "Explain why the sky is blue and why sunsets are red."),
    ("json", "Write a JSON array with three books, each with title, author and year."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt as `LLM.generate` takes it, and the category that it is counted in."""

    category: str
    content: str | list[dict[str, str]]


def own_prompts(limit: int) -> list[Prompt]:
    """The first prompts of a small set that ships with the package, `limit` at most."""
    return [Prompt(category=category, content=text) for category, text in OWN[:limit]]


def read_prompts(path: Path, *, limit: int | None = None) -> list[Prompt]:
    """The prompts of a file, `limit` of them spread evenly over it; each non-blank line is one.

    A `.jsonl` file holds objects with `prompt` (text), `messages`, or `turns` (texts, of which
    the first one is taken, as in Spec-Bench), and `category` where they have one. Any other file
    is plain text.

    Raises:
        InvalidRequest: naming the file, the line and what is wrong with it.
    """
    prompts, _ = readable_prompts(path, skip_broken=False)
    count = len(prompts) if limit is None else min(limit, len(prompts))
    return [prompts[i * len(prompts) // count] for i in range(count)]


def readable_prompts(path: Path, *, skip_broken: bool) -> tuple[list[Prompt], list[str]]:
    """All prompts of a file in the formats of `read_prompts`, and what is wrong with other lines.

    Args:
        path: the file.
        skip_broken: leave broken lines out; else the first one is an error.

    Raises:
        InvalidRequest: naming the file, the line and what is wrong with it.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # JSON may hold other line ends
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} cannot be read as UTF-8 text: {error}") from error
    parse = _from_json if path.suffix == ".jsonl" else _from_text
    prompts, broken = [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompts.append(parse(line, f"{path}, line {number}"))
        except InvalidRequest as error:
            if not skip_broken:
                raise
            broken.append(str(error))
    if not prompts:
        raise InvalidRequest(f"{path} holds no prompt")
    return prompts, broken


def _from_text(line: str, _: str) -> Prompt:
    return Prompt(category="all", content=line)


def _from_json(line: str, where: str) -> Prompt:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise InvalidRequest(f"{where} is no JSON: {error}") from error
    if not isinstance(entry, dict):
        raise InvalidRequest(f"{where} is no JSON object")
    return Prompt(category=str(entry.get("category", "all")), content=_content(entry, where))


def _content(entry: Mapping[str, Any], where: str) -> str | list[dict[str, str]]:
    found = [name for name in ("prompt", "messages", "turns") if name in entry]
    if len(found) != 1:
        raise InvalidRequest(f"{where} needs one of prompt, messages and turns")
    value = entry[found[0]]
    if found[0] == "turns":
        value = value[0] if isinstance(value, list) and value else None
    if isinstance(value, str) and value and found[0] != "messages":
        return value
    are_messages = found[0] == "messages" and isinstance(value, list) and value
    if are_messages and all(isinstance(message, Mapping) for message in value):
        return [dict(message) for message in value]
    raise InvalidRequest(f"{where} has an empty or malformed {found[0]}")
