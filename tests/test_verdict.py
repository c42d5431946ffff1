"""Verdicts are remembered for the same weights, code and machine, and for nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import build

from outpace.errors import UnsupportedModel
from outpace.runtimes import verdict as module
from outpace.runtimes.transformers import TransformersRuntime
from outpace.runtimes.verdict import Verdicts

SIZED = {"hidden_size": 64, "max_position_embeddings": 512}


class Counted:
    """Counts how often the checks run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num = 0
        self._judge = module.judge
        monkeypatch.setattr("outpace.runtimes.transformers.judge", self)

    def __call__(self, *args: Any) -> module.Verdict:
        self.num += 1
        return self._judge(*args)


def load(folder: Path, *, weights: str = "w", **options: Any) -> TransformersRuntime:
    model = build("llama", dtype=torch.bfloat16, **SIZED)
    verdicts = Verdicts(folder=folder / "verdicts", fingerprint=weights)
    return TransformersRuntime(model, verdicts=verdicts, **options)


def state(runtime: TransformersRuntime) -> tuple[Any, ...]:
    rows = runtime.row_class if runtime.same_shape else None
    return (
        runtime.mode,
        runtime.self_check,
        runtime.same_shape,
        rows,
        runtime.same_shape_cost,
        runtime.max_nodes,
        runtime.open(),
    )


def test_a_second_load_takes_the_first_ones_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(monkeypatch)
    first = state(load(tmp_path, exactness="same-shape"))
    assert counted.num == 1
    assert state(load(tmp_path, exactness="same-shape")) == first
    assert counted.num == 1, "it was checked again"


@pytest.mark.parametrize("change", ["weights", "exactness", "versions", "code", "threads"])
def test_another_model_mode_version_or_machine_is_checked_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    counted = Counted(monkeypatch)
    options = {"weights": "w", "exactness": "same-shape"}
    load(tmp_path, **options)
    if change == "versions":
        monkeypatch.setattr("outpace.runtimes.verdict.transformers.__version__", "5.99")
    elif change == "code":
        monkeypatch.setattr(module, "_own_code", lambda: "other")
    elif change == "threads":
        monkeypatch.setattr("torch.get_num_threads", lambda: 77)
    else:
        options |= {"weights": "v"} if change == "weights" else {"exactness": "ordinary"}
    load(tmp_path, **options)
    assert counted.num == 2


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"mode": "trees"}'])
def test_a_broken_file_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    counted = Counted(monkeypatch)
    load(tmp_path, exactness="ordinary")
    (file,) = (tmp_path / "verdicts").iterdir()
    good = file.read_text()
    file.write_text(content)
    load(tmp_path, exactness="ordinary")
    assert counted.num == 2
    assert file.read_text() == good
    assert [f.name for f in file.parent.iterdir()] == [file.name], "something was left behind"


def test_a_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(monkeypatch)
    (tmp_path / "verdicts").write_text("a file")
    for _ in range(2):
        assert not load(tmp_path, exactness="ordinary").same_shape
    assert counted.num == 2


def test_what_a_busy_machine_measured_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "measure_cost", lambda *_, **__: 3.0)
    notices: list[str] = []
    assert not load(tmp_path, notice=notices.append).same_shape
    assert "would cost 200%" in notices[0]
    monkeypatch.setattr(module, "measure_cost", lambda *_, **__: 1.0)
    assert load(tmp_path).same_shape
    monkeypatch.setattr(module, "measure_cost", lambda *_, **__: 3.0)
    assert load(tmp_path).same_shape, "control: the cheap verdict lasts"


def test_a_refusal_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_row_class", lambda _: None)
    with pytest.raises(UnsupportedModel, match="in every shape tried"):
        load(tmp_path, exactness="same-shape")
    assert not (tmp_path / "verdicts").exists()


def test_a_loaded_model_is_always_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    model = build("llama", **SIZED)
    for _ in range(2):
        TransformersRuntime(model)
    assert counted.num == 2
