"""What the scripts for other engines share: prompts as ids, outpace beside them, results.json."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import outpace
from outpace.bench.arms import Arm, MethodArm
from outpace.bench.forward_cost import measure_forward_cost
from outpace.bench.harness import Item, run
from outpace.bench.results import provenance, summarise, write_results
from outpace.errors import OutpaceError
from outpace.journal import Journal
from outpace.llm import LLM, prompt_ids
from outpace.prompts import OWN, own_prompts, read_prompts


class EngineMissing(Exception):
    """The engine is not installed; the message says how to install it."""


def parser(description: str) -> argparse.ArgumentParser:
    """The options that every script takes."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--model", default="smollm2", help="what outpace loads")
    options.add_argument("--methods", default="plain", help="of outpace, run in the same order")
    options.add_argument("--prompts", type=Path, help="as for outpace bench")
    options.add_argument("--limit", type=int)
    options.add_argument("--max-new-tokens", type=int, default=128)
    options.add_argument("--out", type=Path, required=True, help="folder of results.json")
    options.add_argument("--resume", action="store_true")
    return options


def measure(
    args: argparse.Namespace,
    engine: Callable[[LLM], AbstractContextManager[tuple[dict[str, str], Sequence[Arm]]]],
) -> int:
    """Runs an engine's arms beside outpace's methods and writes `results.json`.

    Args:
        args: of `parser`.
        engine: starts the engine for the loaded model; gives its facts (name, version, format)
            and its arms, the plain one first, and stops it at the end.

    Returns:
        The exit status: 2 where the engine is missing or a request is wrong.
    """
    try:
        llm = outpace.load(args.model)
        items = list(_items(llm, args))
        with engine(llm) as (facts, arms):
            _measure(args, llm, items, facts, arms)
    except (EngineMissing, OutpaceError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _measure(
    args: argparse.Namespace,
    llm: LLM,
    items: Sequence[Item],
    facts: dict[str, str],
    peers: Sequence[Arm],
) -> None:
    greedy = {"temperature": 0.0, "seed": 7}
    names = list(dict.fromkeys(["plain", *args.methods.split(",")]))
    arms = [MethodArm(name, llm.with_method(name), greedy) for name in names]
    everything = [*arms, *peers]
    header = {
        **{name: str(value) for name, value in vars(args).items() if name not in ("out", "resume")},
        **facts,
        "fingerprint": llm.model.fingerprint,
    }
    with Journal(args.out / "journal.jsonl", header, resume=args.resume) as journal:
        run(everything, items, journal, max_new_tokens=args.max_new_tokens, progress=_progress)
        summary = summarise(
            journal.entries,
            everything,
            categories={item.number: item.category for item in items},
            concurrency=[1],
            cost=measure_forward_cost(llm.model.runtime),
        )
    results = {
        **provenance(llm),
        "command": " ".join(["python", *sys.argv]),
        "engine": facts,
        "settings": header,
        **summary,
    }
    write_results(args.out / "results.json", results)
    print(table(results))


def table(results: dict[str, object]) -> str:
    """The methods as a Markdown table."""
    rows = [
        "| | tokens/s | speed-up | first token (ms) | identical to its plain |",
        "|" + "---|" * 5,
    ]
    methods = results["methods"]
    assert isinstance(methods, dict)
    for name, figures in methods.items():
        rate, speedup = figures["tokens_per_second"], figures["speedup"]
        cells = [
            name,
            "" if rate is None else f"{rate:.1f}",
            "" if speedup is None else f"{speedup:.2f}",
            f"{1e3 * figures['first_token_seconds']:.0f}",
            f"{figures['identical']} of {figures['prompts']}",
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _items(llm: LLM, args: argparse.Namespace) -> Iterator[Item]:
    """The same ids for every engine: templates and tokenizers are not what is compared."""
    if args.prompts is None:
        prompts = own_prompts(args.limit or len(OWN))
    else:
        prompts = read_prompts(args.prompts, limit=args.limit)
    for number, prompt in enumerate(prompts):
        ids = prompt_ids(llm.model.tokenizer, prompt.content, raw=False)
        yield Item(number=number, category=prompt.category, prompt=ids)


def _progress(done: int, total: int, what: str) -> None:
    print(f"\r{what} {done}/{total}", end="" if done < total else "\n", file=sys.stderr, flush=True)
