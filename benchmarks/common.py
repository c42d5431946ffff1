"""What the benchmark scripts share: prompts, provenance, the first difference."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from outpace.llm import LLM


def read_prompts(path: Path, limit: int) -> list[dict[str, str]]:
    """`limit` prompts spread evenly over a JSONL file with `turns` or `prompt`.

    A file sorted by category is sampled in proportion. Gives dicts with `category` and `prompt`
    (the first turn).
    """
    entries = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.strip():
            entry = json.loads(line)
            prompt = entry["turns"][0] if "turns" in entry else entry["prompt"]
            entries.append({"category": entry.get("category", "all"), "prompt": prompt})
    count = min(limit, len(entries))
    return [entries[i * len(entries) // count] for i in range(count)]


def provenance(llm: LLM) -> dict[str, Any]:
    """Command, commit, versions, machine and model of a run."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [x for x in info.read_text().splitlines() if x.startswith("model name")]
        cpu = names[0].split(":")[1].strip() if names else cpu
    return {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit,
        "versions": {name: metadata.version(name) for name in ("torch", "transformers", "numpy")},
        "python": platform.python_version(),
        "machine": {"cpu": cpu, "threads": torch.get_num_threads()},
        "model": llm.info(),
    }


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first differing token; None when the sequences are equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))
