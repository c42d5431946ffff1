"""How much memory a run needed beyond what was held before it."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


class PeakMemory:
    """Watches the peak while the context is open: of the process, or of a CUDA device.

    Where the system cannot reset a peak, it is the whole process's so far.

    Args:
        device: where the model computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = self._peak = 0

    def __enter__(self) -> PeakMemory:
        if self._device.type == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = int(torch.cuda.memory_allocated(self._device))
            return self
        with suppress(OSError):
            _RESET.write_text("5")  # Linux: the high-water mark starts from here
        self._before = _status("VmRSS") or _process_peak()
        return self

    def __exit__(self, *_: object) -> None:
        if self._device.type == "cuda":
            import torch

            self._peak = int(torch.cuda.max_memory_allocated(self._device))
        else:
            self._peak = _status("VmHWM") or _process_peak()

    def parts(self) -> dict[str, int]:
        """Bytes: `peak`, and `scratch`, by how much it rose above what was held before."""
        return {"peak": self._peak, "scratch": max(self._peak - self._before, 0)}


def _status(name: str) -> int | None:
    """A field of Linux' process status in bytes; None elsewhere."""
    try:
        lines = _STATUS.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return int(found[0]) * 1024 if found else None


def _process_peak() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
