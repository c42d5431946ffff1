from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

def kernel_names() -> list[str]: ...

class Cache:
    @property
    def length(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    def keep(self, path: Sequence[int]) -> None: ...
    def truncate(self, length: int) -> None: ...

class Runtime:
    def __init__(
        self,
        *,
        sizes: dict[str, float],
        windows: Sequence[int],
        arrays: dict[str, npt.NDArray[np.generic]],
        kernels: str,
        threads: int,
    ) -> None: ...
    def open(self) -> Cache: ...
    def set_positions(
        self, cosines: npt.NDArray[np.float32], sines: npt.NDArray[np.float32]
    ) -> None: ...
    def forward(
        self,
        caches: Sequence[Cache],
        nodes: Sequence[int],
        tokens: npt.NDArray[np.int32],
        parents: npt.NDArray[np.int32],
        wanted: Sequence[int],
        logits: npt.NDArray[np.float32],
        hidden: npt.NDArray[np.float32],
    ) -> None: ...
    def project(self, hidden: npt.NDArray[np.float32], logits: npt.NDArray[np.float32]) -> None: ...
    def embed(self, tokens: npt.NDArray[np.int64], out: npt.NDArray[np.float32]) -> None: ...
    @property
    def threads(self) -> int: ...
    @property
    def kernels(self) -> str: ...
