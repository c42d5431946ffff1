"""Settings of the whole suite: one thread, no hypothesis deadlines on shared machines."""

from __future__ import annotations

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("outpace", deadline=None, derandomize=True)
settings.load_profile("outpace")
