"""Trains Medusa heads on a frozen target's hidden states."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from outpace.errors import InvalidRequest
from outpace.heads import MedusaHeads
from outpace.sampling import check_int
from outpace.training.tree_search import best_nodes
from outpace.training.validate import ranks

if TYPE_CHECKING:
    from outpace.training.examples import Batch, Positions

Report = Callable[[str], None]
CHECKPOINT = "checkpoint.pt"
TREE_NODES = 16  # of the tree by which training states are compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How heads are shaped and trained; a checkpoint goes on under the same ones only.

    Args:
        num_heads: K.
        num_layers: residual blocks of each head.
        dependent: whether heads read their path (Hydra).
        vocab_size: most frequent ids with a matrix shared by all heads, which starts as the
            target's rows and is trained; None uses the target's own LM head, frozen.
        epochs: passes over the positions.
        batch_size: positions of a step.
        learning_rate: its highest value, of AdamW.
        weight_decay: of AdamW.
        warm_up: share of the steps in which the rate rises, before it falls as a cosine.
        clip: largest norm of the gradient.
        head_weight: head i counts head_weight ** i.
        evaluations: on held-out text, for each epoch.
        patience: evaluations without a better one after which training ends.
        max_held_out: most positions of an evaluation.
        seed: of the order of positions.
    """

    num_heads: int = 4
    num_layers: int = 1
    dependent: bool = False
    vocab_size: int | None = None
    epochs: int = 4
    batch_size: int = 256
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    warm_up: float = 0.05
    clip: float = 1.0
    head_weight: float = 0.8
    evaluations: int = 2
    patience: int = 3
    max_held_out: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        for name in (
            "num_heads",
            "num_layers",
            "epochs",
            "batch_size",
            "evaluations",
            "patience",
            "max_held_out",
        ):
            check_int(name, getattr(self, name), 1)
        check_int("vocab_size", self.vocab_size, 1, optional=True)
        if not self.learning_rate > 0:
            raise InvalidRequest(f"learning_rate must be above 0, not {self.learning_rate}")


@dataclass(slots=True, kw_only=True)
class Progress:
    """Where training stands.

    Args:
        step: optimiser steps that are done.
        losses: (step, mean loss since the entry before).
        evaluations: (step, tokens per step, top-1 share of each head) on held-out text.
        bad: evaluations since the best one.
    """

    step: int = 0
    losses: list[tuple[int, float]] = field(default_factory=list)
    evaluations: list[tuple[int, float, list[float]]] = field(default_factory=list)
    bad: int = 0

    @property
    def best(self) -> tuple[float, float]:
        """Tokens per step; the top-1 shares decide between equal ones."""
        worth = [(value, sum(top)) for _, value, top in self.evaluations]
        return max(worth, default=(-math.inf, 0.0))


def new_heads(settings: Settings, positions: Positions) -> MedusaHeads:
    """Heads that say what the target's own head says of the state that they read."""
    base = positions.base
    token_map, output = None, "target"
    if settings.vocab_size is not None:
        if settings.vocab_size > len(base.output):
            raise InvalidRequest(
                f"vocab_size is {settings.vocab_size}, the target has {len(base.output)} tokens"
            )
        output = "shared"
        if settings.vocab_size < len(base.output):
            token_map = positions.frequent(settings.vocab_size)
    heads = MedusaHeads(
        hidden_size=base.output.shape[1],
        vocab_size=len(base.output),
        num_heads=settings.num_heads,
        num_layers=settings.num_layers,
        dependent=settings.dependent,
        output=output,
        token_map=token_map,
        zero_init=True,
    )
    for matrix in heads.outputs:
        rows = base.output if token_map is None else base.output[token_map]
        matrix.weight.data.copy_(rows)  # type: ignore[operator]
    return heads


def train(
    positions: Positions,
    held_out: Positions,
    *,
    settings: Settings,
    folder: Path,
    report: Report | None = None,
) -> tuple[MedusaHeads, Progress]:
    """The heads of the best evaluation; a run that was killed goes on from its checkpoint.

    A checkpoint is written with every evaluation. What follows it is the same, bit by bit, as
    without the interruption.

    Args:
        positions: to learn from.
        held_out: to evaluate with.
        settings: see there.
        folder: takes the checkpoint.
        report: receives a line for each evaluation.

    Raises:
        InvalidRequest: for a checkpoint of other settings or text, or a full disk.
    """
    folder.mkdir(parents=True, exist_ok=True)
    heads = new_heads(settings, positions)
    steps = math.ceil(len(positions) / settings.batch_size) * settings.epochs
    every = max(steps // (settings.epochs * settings.evaluations), 1)
    optimizer = torch.optim.AdamW(
        heads.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: _rate(step, steps, settings)
    )
    progress = Progress()
    best = {name: tensor.clone() for name, tensor in heads.state_dict().items()}
    header = {**asdict(settings), "positions": len(positions), "held_out": len(held_out)}
    path = folder / CHECKPOINT
    if path.exists():
        saved = _read(path, header)
        heads.load_state_dict(saved["heads"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        progress, best = Progress(**saved["progress"]), saved["best"]
    total = 0.0
    for step, index in _batches(len(positions), settings):
        if step < progress.step:
            continue
        if progress.bad >= settings.patience:
            break
        optimizer.zero_grad()
        loss = batch_loss(heads, positions, positions.batch(index), settings)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(heads.parameters(), settings.clip)
        optimizer.step()
        schedule.step()
        total += loss.item()
        progress.step = step + 1
        if progress.step % every and progress.step != steps:
            continue
        since = progress.step - (progress.losses[-1][0] if progress.losses else 0)
        progress.losses.append((progress.step, total / since))
        total = 0.0
        if evaluate(heads, held_out, settings, progress):
            best = {name: tensor.clone() for name, tensor in heads.state_dict().items()}
        if report is not None:
            report(_line(progress, steps))
        _write(path, header, heads, optimizer, schedule, progress, best)
    heads.load_state_dict(best)
    return heads.requires_grad_(False), progress


def batch_loss(
    heads: MedusaHeads, positions: Positions, batch: Batch, settings: Settings
) -> Tensor:
    """Cross-entropy with the target's own distribution, a weighted mean over heads.

    Positions whose token lies behind the end or outside the reduced vocabulary do not count.
    """
    logits = heads(batch.hidden, batch.embeddings, project=positions.project)  # [n, K, width]
    keep = batch.labels >= 0
    with torch.no_grad():
        if heads.token_map is not None:
            keep = keep & torch.isin(batch.labels, heads.token_map)
            output = positions.base.output[heads.token_map]
            bias = None if positions.base.bias is None else positions.base.bias[heads.token_map]
        else:
            output, bias = positions.base.output, positions.base.bias
        wanted = nn.functional.linear(batch.teacher, output, bias).softmax(dim=-1)
    each = -(wanted * logits.log_softmax(dim=-1)).sum(dim=-1)  # [n, K]
    weight = settings.head_weight ** torch.arange(heads.num_heads)
    per_head = (each * keep).sum(dim=0) / keep.sum(dim=0).clamp(min=1)
    loss: Tensor = (per_head * weight).sum() / weight.sum()
    return loss


def evaluate(
    heads: MedusaHeads, held_out: Positions, settings: Settings, progress: Progress
) -> bool:
    """Adds an evaluation; whether it is the best one."""
    found = ranks(heads, held_out, max_positions=settings.max_held_out)
    value = 1 + sum(best_nodes(found, TREE_NODES)[1])
    top = [found.top(i, 1) for i in range(heads.num_heads)]
    better = (value, sum(top)) > progress.best
    progress.bad = 0 if better else progress.bad + 1
    progress.evaluations.append((progress.step, value, top))
    return better


def _batches(count: int, settings: Settings) -> Any:
    """(step, positions) in an order that the seed and the epoch decide."""
    step = 0
    for epoch in range(settings.epochs):
        generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + epoch)
        order = torch.randperm(count, generator=generator)
        for index in torch.split(order, settings.batch_size):
            yield step, index
            step += 1


def _rate(step: int, steps: int, settings: Settings) -> float:
    warm_up = max(int(settings.warm_up * steps), 1)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * min((step - warm_up) / max(steps - warm_up, 1), 1.0)))


def _line(progress: Progress, steps: int) -> str:
    _, value, top = progress.evaluations[-1]
    shares = " ".join(f"{share:.3f}" for share in top)
    return (
        f"Step {progress.step:,} of {steps:,}: loss {progress.losses[-1][1]:.4f}, held-out top-1 "
        f"of each head {shares}, {value:.2f} tokens per step with {TREE_NODES} nodes"
    )


def _write(
    path: Path,
    header: dict[str, Any],
    heads: MedusaHeads,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    progress: Progress,
    best: dict[str, Tensor],
) -> None:
    temporary = path.with_suffix(".part")
    state = {
        "header": header,
        "heads": heads.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "progress": asdict(progress),
        "best": best,
    }
    try:
        torch.save(state, temporary)
        temporary.replace(path)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as the latter
        raise InvalidRequest(
            f"{path} cannot be written ({error}): make room; the same command goes on from the "
            "checkpoint before"
        ) from error


def _read(path: Path, header: dict[str, Any]) -> dict[str, Any]:
    try:
        saved: dict[str, Any] = torch.load(path, weights_only=True)
        found = saved["header"]
    except Exception as error:  # a damaged pickle may raise anything
        raise InvalidRequest(f"{path} is broken: delete it to train anew") from error
    differing = sorted(name for name in header if found.get(name) != header[name])
    if differing:
        raise InvalidRequest(
            f"{path} is of another training, which differs in {', '.join(differing)}: delete it "
            "to train anew, or name another folder"
        )
    return saved
