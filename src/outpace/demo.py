"""`make demo`: the same prompts by plain decoding and by each method that needs no training."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import outpace
from outpace.cli.terminal import LoadProgress, cache_folder

if TYPE_CHECKING:
    from outpace.llm import LLM, Result

METHODS = ("plain", "lookup", "lookahead", "combined")
MAX_NEW_TOKENS = 96
WARM_UP = "Count to twenty."

_NOTE = (
    "The museum opens at nine in the morning and closes at five in the afternoon. On Mondays the "
    "museum is closed. Tickets cost eight euros for adults and three euros for children. The "
    "museum shop sells books, posters and small models of the ships in the main hall."
)
PROMPTS = {
    "code": "Write a Python class BankAccount with the methods deposit, withdraw and transfer.",
    "editing": f"Replace the word museum with the word gallery in this text:\n\n{_NOTE}",
    "question": f"{_NOTE}\n\nWhen is the museum open, and what do the tickets cost?",
    "free writing": "Write a short story about a lighthouse keeper who finds a letter.",
}


def main() -> None:
    """Streams every answer, then compares the methods in a table."""
    console = Console(highlight=False)
    with LoadProgress() as progress:
        llm = outpace.load(cache=cache_folder(), notice=progress.notice, progress=progress)
    llms = {method: llm.with_method(method) for method in METHODS}
    for method_llm in llms.values():  # what is set up at first use is not timed
        method_llm.generate(WARM_UP, max_new_tokens=16)
    results: dict[str, list[Result]] = {method: [] for method in METHODS}
    for kind, prompt in PROMPTS.items():
        console.rule(f"[bold]{kind}")
        console.print(escape(prompt), style="dim")
        for method in METHODS:
            results[method].append(_stream(console, llms[method], prompt))
    console.print(_table(results))
    info = llm.info()
    console.print(
        f"{info['model']}, {info['dtype']} on {info['device']}, greedy, {info['exactness']} "
        f"forwards, {len(PROMPTS)} prompts, at most {MAX_NEW_TOKENS} tokens each"
    )


def _stream(console: Console, llm: LLM, prompt: str) -> Result:
    """Writes an answer as it comes, under its method's name and with its speed."""
    console.print(f"\n[bold cyan]{llm.method.name}")
    result: Result | None = None
    for piece in llm.stream(prompt, max_new_tokens=MAX_NEW_TOKENS):
        console.out(piece.text, end="", highlight=False)
        result = piece.result
    assert result is not None, "a stream ends with its result"
    stats = result.stats
    console.print(
        f"\n[dim]{stats.completion_tokens} tokens, {stats.tokens_per_second or 0:.1f} tokens/s, "
        f"{stats.tokens_per_step or 0:.2f} tokens a step"
    )
    return result


def _table(results: dict[str, list[Result]]) -> Table:
    """Medians over the prompts; a speed-up compares a prompt with plain decoding of the same."""
    table = Table(title="The same prompts by each method")
    table.add_column("method")
    for heading in ("tokens/s", "speed-up", "tokens per step"):
        table.add_column(heading, justify="right")
    table.add_column("same ids as plain")
    plain = results["plain"]
    for method, own in results.items():
        speeds = [_speed(result) for result in own]
        ratios = [speed / _speed(base) for speed, base in zip(speeds, plain, strict=True)]
        num_tokens = sum(result.stats.completion_tokens for result in own)
        table.add_row(
            method,
            f"{median(speeds):.1f}",
            f"{median(ratios):.2f}",
            f"{num_tokens / sum(result.stats.steps for result in own):.2f}",
            _difference(plain, own),
        )
    return table


def _speed(result: Result) -> float:
    """Tokens a second; 0.0 where the text was too short to tell."""
    return result.stats.tokens_per_second or 0.0


def _difference(plain: Sequence[Result], own: Sequence[Result]) -> str:
    """ "yes", or where the first text departs."""
    for kind, base, result in zip(PROMPTS, plain, own, strict=True):
        if base.tokens != result.tokens:
            pairs = zip(base.tokens, result.tokens, strict=False)
            same = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            at = min(len(base.tokens), len(result.tokens)) if same is None else same
            return f"no: {kind} differs from token {at + 1} on"
    return "yes"


if __name__ == "__main__":
    main()
