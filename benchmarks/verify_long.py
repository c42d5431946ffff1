"""Every method against plain decoding over many prompts: the ids must be equal, ties aside.

    python benchmarks/verify_long.py --prompts spec_bench.jsonl --out verify.json

Runs in batches, greedy and at a temperature under fixed seeds. A first divergence counts as a tie
only where the deciding margin is below the tolerance; anything else makes the exit code 1. Every
finished batch is saved, and a second run continues where the first one stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from common import first_difference, margin, provenance, read_prompts

import outpace
from outpace.heads import MedusaHeads
from outpace.llm import LLM, make_params

TOLERANCES = {"float32": 1e-4, "bfloat16": 0.5, "float16": 0.1}


def methods(llm: LLM, names: list[str], draft: str) -> dict[str, LLM]:
    """The LLMs to compare; untrained heads stand in where no trained ones are given."""
    chosen = {}
    for name in names:
        if name == "medusa":
            chosen[name] = llm.with_method("medusa", heads=random_heads(llm))
        elif name == "draft":
            chosen[name] = llm.with_method("draft", draft=draft)
        else:
            chosen[name] = llm.with_method(name)
    return chosen


def random_heads(llm: LLM) -> MedusaHeads:
    """Three heads of random residual blocks over the target's own output matrix."""
    runtime = llm.model.runtime
    with torch.random.fork_rng():
        torch.manual_seed(0)
        heads = MedusaHeads(
            hidden_size=runtime.hidden_size,
            vocab_size=runtime.vocab_size,
            num_heads=3,
            num_layers=1,
            output="target",
        )
    return heads.to(runtime.device, runtime.dtype)


def compare(
    llm: LLM, other: LLM, prompts: list[str], sampling: dict[str, Any], tolerance: float
) -> list[dict[str, Any]]:
    """One entry a prompt: identical, or where and by how much the texts part."""
    baseline = llm.generate_batch(prompts, **sampling)
    results = other.generate_batch(prompts, **sampling)
    params = make_params(llm.model.tokenizer, sampling)
    entries = []
    for prompt, plain, result in zip(prompts, baseline, results, strict=True):
        at = first_difference(plain.tokens, result.tokens)
        entry: dict[str, Any] = {
            "tokens": len(result.tokens),
            "tokens_per_step": result.stats.tokens_per_step,
            "verdict": "identical",
        }
        if at is not None:
            ids = llm.model.tokenizer.prompt_ids(prompt, raw=False)
            gap = margin(llm, [*ids, *plain.tokens[:at]], len(ids), params)
            entry |= {"verdict": "tie" if gap <= tolerance else "WRONG", "at": at, "margin": gap}
        entries.append(entry)
    return entries


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("verify.json"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--exactness", default="auto")
    parser.add_argument("--limit", type=int, default=60)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--temperatures", default="0,0.8")
    parser.add_argument("--methods", default="lookup,lookahead,combined,draft,medusa")
    parser.add_argument("--draft", default=None, help="default: the model itself")
    args = parser.parse_args()

    llm = outpace.load(args.model, dtype=args.dtype, exactness=args.exactness)
    prompts = [entry["prompt"] for entry in read_prompts(args.prompts, args.limit)]
    tolerance = 0.0 if llm.model.runtime.same_shape else TOLERANCES[args.dtype]
    report: dict[str, Any] = {"provenance": provenance(llm), "tolerance": tolerance, "runs": {}}
    if args.out.exists():
        report["runs"] = json.loads(args.out.read_text())["runs"]
    for name, other in methods(llm, args.methods.split(","), args.draft or args.model).items():
        for temperature in map(float, args.temperatures.split(",")):
            entries = report["runs"].setdefault(f"{name} T={temperature:g}", [])
            sampling = {
                "max_new_tokens": args.max_new_tokens,
                "temperature": temperature,
                "seed": 7,
            }
            while len(entries) < len(prompts):
                part = prompts[len(entries) : len(entries) + args.batch]
                entries.extend(compare(llm, other, part, sampling, tolerance))
                args.out.write_text(json.dumps(report, indent=1))
            verdicts = [entry["verdict"] for entry in entries]
            counts = {v: verdicts.count(v) for v in ("identical", "tie", "WRONG")}
            rates = [e["tokens_per_step"] for e in entries if e["tokens_per_step"]]
            print(f"{name} T={temperature:g}: {counts}, {sum(rates) / len(rates):.2f} tokens/step")
    wrong = sum(e["verdict"] == "WRONG" for run in report["runs"].values() for e in run)
    print(f"{wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
