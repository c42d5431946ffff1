"""From a target to a folder with trained heads: text, states, training, tree, provenance."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from outpace import heads as head_files
from outpace.bench.forward_cost import measure_forward_cost
from outpace.bench.results import provenance, write_atomically
from outpace.errors import InvalidRequest
from outpace.training import curves, data, medusa
from outpace.training.examples import Base, Positions, split
from outpace.training.hidden import cached_texts
from outpace.training.tree_search import Budget, best_nodes, budgets
from outpace.training.validate import Ranks, ranks

if TYPE_CHECKING:
    from outpace.heads import MedusaHeads
    from outpace.llm import LLM

Report = Callable[[str], None]
NUM_RANKS = 4  # shown of each head


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a training left.

    Args:
        folder: with the heads.
        budgets: what their trees are expected to give.
        best: the one whose tree is saved with the heads.
        facts: as in provenance.json.
    """

    folder: Path
    budgets: list[Budget]
    best: Budget
    facts: dict[str, Any]


def train_medusa(
    llm: LLM,
    folder: Path,
    *,
    num_tokens: int,
    recipe: data.Recipe,
    settings: medusa.Settings,
    prompts: Sequence[str | list[dict[str, str]]] = (),
    cache_gb: float = 8.0,
    dtype: torch.dtype = torch.bfloat16,
    report: Report | None = None,
) -> Trained:
    """Trains heads for a target and saves them; run again, it goes on where it was killed.

    Text, states and checkpoint lie in the folder's `work`, which may be deleted afterwards.

    Args:
        llm: the target.
        folder: takes the heads.
        num_tokens: of answers to train on.
        recipe: of the text.
        settings: of the heads and their training.
        prompts: answered by the target; none lets it write user turns.
        cache_gb: most 10^9 bytes of hidden states on disk.
        dtype: of the saved heads.
        report: receives lines of progress.

    Raises:
        InvalidRequest: saying what is wrong with the settings, the text or the disk.
    """
    report = report or (lambda _: None)
    curves.check_available()
    runtime, work = llm.model.runtime, folder / "work"
    if settings.num_heads + 1 >= runtime.max_context:
        raise InvalidRequest(
            f"{settings.num_heads} heads reach past the context of {runtime.max_context} tokens: "
            "train fewer"
        )
    seconds, begin = {}, time.perf_counter()

    def lap(name: str) -> None:
        nonlocal begin
        now = time.perf_counter()
        seconds[name], begin = round(now - begin, 1), now

    counts = data.generate(
        llm, work / "data", num_tokens, recipe=recipe, prompts=prompts, report=report
    )
    lap("text")
    texts = cached_texts(runtime, work / "data", limit_gb=cache_gb, report=report)
    lap("hidden states")
    base = Base.of(runtime)
    learning, held = split(texts)
    positions = Positions(learning, num_heads=settings.num_heads, base=base)
    held_out = Positions(held, num_heads=settings.num_heads, base=base)
    report(
        f"{len(positions):,} positions to learn from, {len(held_out):,} held out; "
        f"{positions.num_masked + held_out.num_masked} answers are too short for any"
    )
    heads, progress = medusa.train(
        positions, held_out, settings=settings, folder=work, report=report
    )
    lap("training")
    heads = heads.to(dtype)
    found = ranks(heads.float(), held_out)
    nodes, worth = best_nodes(found, min(64, runtime.max_nodes))
    cost = measure_forward_cost(runtime)
    table = budgets(
        worth, cost, heads_seconds=_seconds(heads, held_out), max_nodes=runtime.max_nodes
    )
    best = max(table, key=lambda budget: budget.speedup)
    head_files.save(
        heads.to(dtype),
        folder,
        base_fingerprint=llm.model.fingerprint,
        choices=nodes[: best.nodes - 1],
    )
    lap("tree")
    facts = {
        **provenance(llm),
        "recipe": asdict(recipe),
        "settings": asdict(settings),
        "data": asdict(counts),
        "positions": {"trained": len(positions), "held_out": len(held_out)},
        "seconds": seconds,
        "forward_cost": {"context": cost.context, "seconds": cost.seconds},
        "losses": progress.losses,
        "evaluations": progress.evaluations,
        "held_out": _facts(found),
        "trees": [budget.facts() for budget in table],
    }
    trees = {
        str(budget.nodes): {
            **budget.facts(),
            "choices": [list(node) for node in nodes[: budget.nodes - 1]],
        }
        for budget in table
    }
    write_atomically(folder / "trees.json", json.dumps(trees) + "\n")
    write_atomically(folder / "provenance.json", json.dumps(facts, indent=1) + "\n")
    (folder / "curves.png").write_bytes(curves.draw(progress, facts["trees"]))
    return Trained(folder=folder, budgets=table, best=best, facts=facts)


def _facts(found: Ranks) -> list[dict[str, Any]]:
    """Of each head: top-k shares, and the share of each rank where the path before was found."""
    return [
        {
            "top": [round(found.top(head, k), 4) for k in range(1, NUM_RANKS + 1)],
            "conditional": [round(found.conditional(head, r), 4) for r in range(NUM_RANKS)],
        }
        for head in range(found.ranks.shape[1])
    ]


@torch.inference_mode()
def _seconds(heads: MedusaHeads, positions: Positions) -> float:
    """Median seconds of the heads over one position; a tree takes about as many rows again."""
    batch = positions.batch(torch.arange(1))
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        heads(batch.hidden, batch.embeddings, project=positions.project)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)
