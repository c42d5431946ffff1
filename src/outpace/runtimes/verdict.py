"""What the checks at load decided, remembered for the same weights, code and machine."""

from __future__ import annotations

import hashlib
import json
import platform
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from outpace.errors import UnsupportedModel
from outpace.runtimes.guard import (
    RowClass,
    SelfCheck,
    check_model,
    find_row_class,
    measure_cost,
)

if TYPE_CHECKING:
    from outpace.runtimes.transformers import TransformersRuntime

MODES = ("tree", "paths")
SAME_SHAPE_MAX_COST = 1.15  # the default in half precision only where it costs at most this


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How a model may run trees.

    Args:
        mode: "tree" or "paths".
        check: what the check found in that mode.
        row_class: same-shape forwards' row counts; None where forwards are ordinary ones.
        cost: time of a same-shape step against an ordinary one, where it was measured.
        notice: a line for the user.
    """

    mode: str
    check: SelfCheck
    row_class: RowClass | None = None
    cost: float | None = None
    notice: str | None = None

    @property
    def lasts(self) -> bool:
        """Whether no other load on the machine could have changed it."""
        return self.row_class is not None or self.cost is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdicts:
    """Verdicts on disk, one file for weights, versions and machine together.

    Args:
        folder: made when it is missing.
        fingerprint: identifies the weights.
    """

    folder: Path
    fingerprint: str

    def get(
        self, runtime: TransformersRuntime, exactness: str, *, judge: Callable[[], Verdict]
    ) -> Verdict:
        """The remembered verdict, or a new one; a file that cannot be read or written is none."""
        file = self.folder / f"{self._key(runtime, exactness)}.json"
        try:
            return _parse(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, KeyError):
            verdict = judge()
        if verdict.lasts:
            _write(file, json.dumps(asdict(verdict)))
        return verdict

    def _key(self, runtime: TransformersRuntime, exactness: str) -> str:
        model = runtime.model
        facts = {
            "weights": self.fingerprint,
            "config": model.config.to_json_string(),
            "dtype": str(runtime.dtype),
            "exactness": exactness,
            "versions": [torch.__version__, transformers.__version__],
            "code": _own_code(),
            "machine": [platform.node(), *_processor(runtime.device)],
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]


def judge(runtime: TransformersRuntime, exactness: str) -> Verdict:
    """Runs the checks on the real weights; leaves the runtime in the last state that was tried.

    Raises:
        UnsupportedModel: naming the class, when no mode verifies trees and rolls back, or when
            same-shape forwards were asked for and cannot be had.
    """
    mode, check = _find_mode(runtime)
    half = runtime.dtype in (torch.bfloat16, torch.float16)
    if exactness == "ordinary" or (exactness == "auto" and not half):
        return Verdict(mode=mode, check=check)
    name = runtime.class_name
    if mode != "tree":
        if exactness == "auto":
            return Verdict(mode=mode, check=check)
        raise UnsupportedModel(
            f"{name} runs trees as paths, whose shapes vary: use exactness ordinary, with dtype "
            "float32 where near-ties matter"
        )
    runtime.same_shape = True
    found = find_row_class(runtime)
    if found is None:
        why = f"the bits of {name}'s rows depend on the rows beside them"
        if exactness == "same-shape":
            raise UnsupportedModel(f"{why}, in every shape tried: use exactness ordinary")
        notice = f"{why}: near-ties may fall differently than in plain decoding"
        return Verdict(mode=mode, check=check, notice=notice)
    runtime.row_class = found
    cost = measure_cost(runtime, enough=SAME_SHAPE_MAX_COST)
    if exactness == "auto" and cost > SAME_SHAPE_MAX_COST:
        notice = (
            f"same-shape forwards would cost {cost - 1:.0%} here: ordinary ones are used, so "
            "near-ties may fall differently (--exactness same-shape)"
        )
        return Verdict(mode=mode, check=check, cost=cost, notice=notice)
    return Verdict(mode=mode, check=check, row_class=found, cost=cost)


def _find_mode(runtime: TransformersRuntime) -> tuple[str, SelfCheck]:
    failures = []
    for mode in MODES:
        if mode == "tree" and not runtime.takes_positions:
            failures.append("tree: its forward takes no position_ids")
            continue
        runtime.mode = mode
        check = check_model(runtime)
        runtime.close_all()
        if check.failure is None:
            return mode, check
        failures.append(f"{mode}: {check.failure}")
    raise UnsupportedModel(
        f"{runtime.class_name} cannot verify several tokens and roll back ({'; '.join(failures)}):"
        " recurrent and convolutional states cannot drop rejected tokens"
    )


def _parse(data: dict[str, Any]) -> Verdict:
    rows = data.pop("row_class")
    check = SelfCheck(**data.pop("check"))
    verdict = Verdict(check=check, row_class=None if rows is None else RowClass(**rows), **data)
    if verdict.mode not in MODES or check.failure is not None:
        raise ValueError("not a verdict that a model may run by")
    return verdict


def _write(file: Path, text: str) -> None:
    """Replaces a file whole; where that fails, the checks just run again next time."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{file.name}.", dir=file.parent) as temporary:
            whole = Path(temporary, file.name)
            whole.write_text(text, encoding="utf-8")
            whole.replace(file)
    except OSError:
        pass


def _own_code() -> str:
    """A digest of this package's runtimes: other code may come to another verdict."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _processor(device: torch.device) -> list[str]:
    """What decides which kernels run, and how fast."""
    if device.type == "cuda":
        return [torch.cuda.get_device_name(device), str(torch.version.cuda)]
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    models = sorted({line for line in lines if line.startswith(("model name", "flags"))})
    return [device.type, platform.processor(), str(torch.get_num_threads()), *models]
