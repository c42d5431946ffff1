"""Training text from the target itself: it writes user turns, or reads them, and answers them."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.errors import InvalidRequest
from outpace.llm import prompt_ids
from outpace.sampling import check_int
from outpace.training import turns

if TYPE_CHECKING:
    from outpace.llm import LLM

Report = Callable[[str], None]

SETTINGS_FILE = "data.json"
SHARD_TURNS = 64  # user turns that are written, or taken, for one shard
MAX_PERIOD = 48  # longest loop that is looked for, in tokens
MIN_REPEATED = 24  # fewest tokens in a row that repeat what stands a period before
MIN_ANSWER = 4
NUM_OPENINGS = 16  # different ones in a shard, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A prompt as the target reads it, up to its answer, and the answer with its end token."""

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What decides on the text; a folder holds the text of one recipe.

    Args:
        base_fingerprint: of the target.
        seed: keys all draws.
        max_turn: most tokens of a user turn.
        max_answer: most tokens of an answer.
        turn_temperature: of user turns that the target writes.
        answer_temperature: of the answers; 0 is greedy.
        prompts: how many were given; 0 lets the target write them.
    """

    base_fingerprint: str
    seed: int = 0
    max_turn: int = 96
    max_answer: int = 192
    turn_temperature: float = 0.9
    answer_temperature: float = 0.0
    prompts: int = 0


@dataclass(slots=True, kw_only=True)
class Counts:
    """What became of the turns: kept answers, and why others or parts of them were dropped."""

    examples: int = 0
    answer_tokens: int = 0
    duplicates: int = 0
    empty: int = 0
    unfinished_turns: int = 0
    loops_cut: int = 0
    truncated: int = 0

    def add(self, other: Counts) -> None:
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)


def generate(
    llm: LLM,
    folder: Path,
    num_tokens: int,
    *,
    recipe: Recipe,
    prompts: Sequence[str | list[dict[str, str]]] = (),
    report: Report | None = None,
) -> Counts:
    """Fills a folder with shards until they hold `num_tokens` tokens of answers, or prompts end.

    Shards that are there already are counted, not written again; one is there once it is whole.
    An answer that starts to repeat itself is cut there, and one that reaches `max_answer` loses
    nothing but has no end: no false end is ever learnt.

    Args:
        llm: the target with any method; answers are greedy or sampled from its distribution.
        folder: made when it is missing.
        num_tokens: of answers, at least.
        recipe: must equal that of the shards that are there.
        prompts: answered in this order; none lets the target write user turns.
        report: receives a line after each shard: tokens, speed, time left.

    Raises:
        InvalidRequest: for a folder of another recipe, a target without a chat template that is
            to write turns itself, or a disk that takes no more.
    """
    check_int("num_tokens", num_tokens, 1)
    _claim(folder, recipe)
    prefix = [] if prompts else turns.user_prefix(llm)
    counts, seen, number, last = Counts(), set[tuple[int, ...]](), 0, list[Example]()
    for number, path in enumerate(shard_files(folder), start=1):  # noqa: B007
        own, last = read_shard(path)
        counts.add(own)
        seen.update(tuple(example.prompt) for example in last)
    begin, before = time.perf_counter(), counts.answer_tokens
    while counts.answer_tokens < num_tokens:
        batch = prompts[number * SHARD_TURNS : (number + 1) * SHARD_TURNS]
        if prompts and not batch:
            break
        own = Counts()
        seed = random.Random(f"{recipe.seed}/{number}").getrandbits(62)
        asked = list(batch) or _write_turns(llm, prefix, recipe, number, seed, last, own)
        ids = [prompt_ids(llm.model.tokenizer, turn, raw=False) for turn in asked]
        fresh = [p for p in dict.fromkeys(map(tuple, ids)) if p not in seen]
        own.duplicates += len(ids) - len(fresh)
        seen.update(fresh)
        examples = _answer(llm, fresh, recipe, seed, own)
        _write(folder / f"shard-{number:05d}.jsonl", own, examples)
        last = examples
        counts.add(own)
        number += 1
        if report is not None:
            speed = (counts.answer_tokens - before) / (time.perf_counter() - begin)
            left = max(num_tokens - counts.answer_tokens, 0) / max(speed, 1e-9)
            report(
                f"Writing text: {counts.answer_tokens:,} of {num_tokens:,} tokens, "
                f"{speed:.0f} tokens/s, {left / 60:.0f} min left"
            )
    return counts


def read(folder: Path) -> tuple[Counts, list[Example]]:
    """All examples of a folder in the order of its shards.

    Raises:
        InvalidRequest: when it holds none, or a line is broken: it names the file and the line.
    """
    counts, examples = Counts(), list[Example]()
    for path in shard_files(folder):
        own, found = read_shard(path)
        counts.add(own)
        examples += found
    if not examples:
        raise InvalidRequest(f"{folder} holds no examples: generate some")
    return counts, examples


def shard_files(folder: Path) -> list[Path]:
    """The whole shards of a folder, in order."""
    return sorted(folder.glob("shard-*.jsonl"))


def loop_start(tokens: Sequence[int]) -> int | None:
    """Where a text starts to repeat what stands up to MAX_PERIOD tokens before; None: nowhere.

    A loop repeats at least MIN_REPEATED tokens and its period twice.
    """
    found: int | None = None
    for period in range(1, MAX_PERIOD + 1):
        need, run = max(MIN_REPEATED, 2 * period), 0
        for i in range(period, len(tokens) if found is None else found + need):
            if i >= len(tokens):
                break
            run = run + 1 if tokens[i] == tokens[i - period] else 0
            if run >= need:
                start = i - run + 1
                found = start if found is None else min(found, start)
                break
    return found


def _write_turns(
    llm: LLM,
    prefix: list[int],
    recipe: Recipe,
    number: int,
    seed: int,
    last: Sequence[Example],
    counts: Counts,
) -> list[str]:
    """A shard's user turns: free every other time, else with openings or about answers."""
    rng, tokenizer = random.Random(seed), llm.model.tokenizer
    assert tokenizer is not None, "a prefix comes from a tokenizer"
    if number % 4 == 3 and last:
        return turns.about([tokenizer.decode(example.answer) for example in last], rng)
    openings = rng.choices(turns.OPENINGS, k=NUM_OPENINGS) if number % 4 == 1 else [""]
    written = turns.write(
        llm,
        prefix,
        openings,
        count=SHARD_TURNS,
        seed=seed,
        temperature=recipe.turn_temperature,
        limit=recipe.max_turn,
    )
    counts.unfinished_turns += written.unfinished
    counts.empty += written.empty
    return written.texts


def _answer(
    llm: LLM, prompts: Sequence[Sequence[int]], recipe: Recipe, seed: int, counts: Counts
) -> list[Example]:
    examples = []
    results = llm.generate_batch(
        prompts,
        seed=seed,
        temperature=recipe.answer_temperature,
        max_new_tokens=recipe.max_answer,
    )
    for prompt, result in zip(prompts, results, strict=True):
        answer = list(result.tokens)
        start = loop_start(answer)
        if start is not None:
            answer = answer[:start]
            counts.loops_cut += 1
        elif result.finish_reason == "length":
            counts.truncated += 1
        if len(answer) < MIN_ANSWER:
            counts.empty += 1
            continue
        counts.examples += 1
        counts.answer_tokens += len(answer)
        examples.append(Example(prompt=list(prompt), answer=answer))
    return examples


def _claim(folder: Path, recipe: Recipe) -> None:
    """Writes the recipe into a new folder; refuses one with another recipe."""
    path, own = folder / SETTINGS_FILE, asdict(recipe)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            differing = sorted(name for name in own if found.get(name) != own[name])
            if differing:
                raise InvalidRequest(
                    f"{folder} holds text of another recipe, which differs in "
                    f"{', '.join(differing)}: name another folder"
                )
        else:
            _replace(path, json.dumps(own, indent=2) + "\n")
    except (OSError, json.JSONDecodeError) as error:
        raise InvalidRequest(f"{path} cannot be written or read: {error}") from error


def _write(path: Path, counts: Counts, examples: Sequence[Example]) -> None:
    lines: list[dict[str, Any]] = [asdict(counts), *(asdict(example) for example in examples)]
    try:
        _replace(path, "".join(json.dumps(line) + "\n" for line in lines))
    except OSError as error:
        raise InvalidRequest(
            f"{path} cannot be written ({error}): make room and run the same command again, "
            "which goes on behind the last whole shard"
        ) from error


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def read_shard(path: Path) -> tuple[Counts, list[Example]]:
    """What a shard holds.

    Raises:
        InvalidRequest: when it is broken: it names the line.
    """
    try:
        entries = list(_entries(path))
        return Counts(**entries[0]), [Example(**entry) for entry in entries[1:]]
    except (OSError, TypeError, IndexError) as error:
        raise InvalidRequest(f"{path} is no shard ({error}): delete it") from error


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            yield json.loads(line)
        except ValueError as error:
            raise InvalidRequest(f"{path}, line {number} is no JSON: delete the shard") from error
