"""Speed of each method against plain decoding, one request at a time, interleaved per prompt.

    python benchmarks/methods.py --prompts spec_bench.jsonl --limit 60 --out methods.json

Warm-up and loading are not counted. A speed-up is the ratio of the wall times for the same ids:
prompts where the ids differ are reported and left out of the median.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from common import first_difference, provenance, read_prompts

import outpace
from outpace.llm import LLM


def timed(llm: LLM, prompt: str, sampling: dict[str, Any]) -> dict[str, Any]:
    """One completion: its ids, decode seconds and statistics."""
    begin = time.perf_counter()
    result = llm.generate(prompt, **sampling)
    return {
        "tokens": result.tokens,
        "seconds": time.perf_counter() - begin,
        "stats": result.stats.asdict(),
    }


def summary(runs: list[dict[str, dict[str, Any]]], name: str) -> dict[str, Any]:
    """Median and quartiles of the paired ratios over prompts with equal ids."""
    equal = [r for r in runs if first_difference(r["plain"]["tokens"], r[name]["tokens"]) is None]
    ratios = [r["plain"]["seconds"] / r[name]["seconds"] for r in equal]
    tokens = sum(len(r[name]["tokens"]) for r in runs)
    steps = sum(r[name]["stats"]["steps"] for r in runs)
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [float("nan")] * 3
    return {
        "tokens_per_second": tokens / sum(r[name]["seconds"] for r in runs),
        "speedup_quartiles": quartiles,
        "tokens_per_step": tokens / steps,
        "identical": len(equal),
        "prompts": len(runs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("methods.json"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--runtime", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--exactness", default="auto")
    parser.add_argument("--limit", type=int, default=60)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--methods", default="lookup,lookahead,combined")
    args = parser.parse_args()

    plain = outpace.load(
        args.model, runtime=args.runtime, dtype=args.dtype, exactness=args.exactness
    )
    arms = {"plain": plain} | {name: plain.with_method(name) for name in args.methods.split(",")}
    sampling = {
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "seed": 7,
    }
    prompts = read_prompts(args.prompts, args.limit)
    for llm in arms.values():
        timed(llm, "Say hello.", sampling | {"max_new_tokens": 16})
    runs: list[dict[str, Any]] = []
    for i, entry in enumerate(prompts):
        names = list(arms)
        order = names[i % len(names) :] + names[: i % len(names)]
        runs.append({name: timed(arms[name], entry["prompt"], sampling) for name in order})
        ratios = {n: runs[-1]["plain"]["seconds"] / runs[-1][n]["seconds"] for n in names}
        print(i, entry["category"], {n: round(r, 2) for n, r in ratios.items()}, flush=True)
    table = {name: summary(runs, name) for name in arms}
    for name, row in table.items():
        quartiles = " ".join(f"{q:.2f}" for q in row["speedup_quartiles"])
        print(
            f"{name:10} {row['tokens_per_second']:6.1f} tokens/s, speed-up quartiles {quartiles}, "
            f"{row['tokens_per_step']:.2f} tokens/step, "
            f"{row['identical']} of {row['prompts']} equal"
        )
    for run, entry in zip(runs, prompts, strict=True):
        run["category"] = entry["category"]
    args.out.write_text(
        json.dumps({"provenance": provenance(plain), "table": table, "runs": runs}, indent=1)
    )


if __name__ == "__main__":
    main()
