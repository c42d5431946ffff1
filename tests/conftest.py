"""Settings of the whole suite: one thread, no hypothesis deadlines, a home folder of its own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("outpace", deadline=None, derandomize=True)
settings.load_profile("outpace")


@pytest.fixture(autouse=True)
def _home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read from or left in the user's cache: `~` is a folder of this run."""
    monkeypatch.setenv("HOME", str(tmp_path_factory.getbasetemp()))
