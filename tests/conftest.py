"""Settings of the whole suite: one thread, no hypothesis deadlines on shared machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from outpace import models

torch.set_num_threads(1)
settings.register_profile("outpace", deadline=None, derandomize=True)
settings.load_profile("outpace")


@pytest.fixture(autouse=True)
def packed_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Packed tiny models stay out of the user's cache."""
    load = models._load_native

    def load_aside(
        name: str, folder: Path, tokenizer: Any, cache: Path | None, progress: Any
    ) -> models.Model:
        if cache is None and folder.parent != models._default_cache():
            cache = tmp_path_factory.getbasetemp() / "packed"
        return load(name, folder, tokenizer, cache, progress)

    monkeypatch.setattr(models, "_load_native", load_aside)
