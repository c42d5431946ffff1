"""A preallocated key-value cache with a slot for each sequence, driven by transformers' layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

ROOM = 64  # keys by which a sequence's room grows where paths are appended to it


@dataclass(slots=True)
class Plan:
    """Where the running forward's keys and values go and what its attention reads.

    Args:
        slots: the batch's slots, one a sequence.
        starts: number of cached keys of each.
        places: where each row goes, counted from its start.
        length: keys that attention reads, from index 0.
        num_paths: 0 when rows are tree nodes; else the batch holds so many paths of one sequence,
            each appended to a copy of its cached keys.
    """

    slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    places: list[list[int]] = field(default_factory=list)
    length: int = 0
    num_paths: int = 0

    def index(self, i: int, device: torch.device) -> Tensor | slice:
        """The key indices of sequence `i`'s rows; a slice where they are dense."""
        start, places = self.starts[i], self.places[i]
        if places == list(range(len(places))):
            return slice(start, start + len(places))
        return torch.tensor(places, device=device) + start


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's keys and values, `[slots, heads, capacity, head_dim]`, written by the plan."""

    is_sliding = False
    is_croppable = False

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.pending: dict[int, tuple[Tensor, Tensor]] = {}  # by slot, paths that ran

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Starts with no room; `reserve` makes it."""
        heads = key_states.shape[1]
        self.keys = key_states.new_zeros(0, heads, 0, key_states.shape[-1])
        self.values = value_states.new_zeros(0, heads, 0, value_states.shape[-1])
        self.is_initialized = True

    def reserve(self, slots: int, capacity: int) -> None:
        """Grows to at least so many slots and keys a slot; what is cached stays."""
        have_slots, _, have, _ = self.keys.shape
        if slots <= have_slots and capacity <= have:
            return
        slots = max(slots, have_slots)
        capacity = have if capacity <= have else max(capacity, 2 * have)  # copied log n times
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros(slots, old.shape[1], capacity, old.shape[3])
            new[:have_slots, :, :have] = old
            setattr(self, name, new)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Caches `[batch, heads, rows, head_dim]` and gives what attention reads."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        plan = self.plan
        if plan.num_paths:
            self.pending[plan.slots[0]] = (key_states, value_states)
            self.reserve(plan.slots[0] + 1, plan.starts[0])
            return self._appended(self.keys, key_states), self._appended(self.values, value_states)
        self.reserve(max(plan.slots) + 1, plan.length)
        for i, slot in enumerate(plan.slots):
            index = plan.index(i, self.keys.device)
            self.keys[slot, :, index] = key_states[i]
            self.values[slot, :, index] = value_states[i]
        return self._view(self.keys), self._view(self.values)

    def compact(self, slot: int, start: int, places: Sequence[int]) -> None:
        """Moves the keys at `start + places` to the indices from `start` on, in order."""
        skip = 0
        while skip < len(places) and places[skip] == skip:
            skip += 1
        if skip == len(places):
            return
        source = torch.tensor(places[skip:], device=self.keys.device) + start
        target = slice(start + skip, start + len(places))
        self.keys[slot, :, target] = self.keys[slot].index_select(1, source)
        self.values[slot, :, target] = self.values[slot].index_select(1, source)

    def commit_pending(self, slot: int, start: int, path: int, count: int) -> None:
        """Caches the first `count` nodes of a path that ran in the batch."""
        if slot not in self.pending:
            return
        keys, values = self.pending.pop(slot)
        self.reserve(slot + 1, -(-(start + count) // ROOM) * ROOM)
        self.keys[slot, :, start : start + count] = keys[path, :, :count]
        self.values[slot, :, start : start + count] = values[path, :, :count]

    def get_seq_length(self) -> int:
        """Number of cached keys of the first sequence of the running forward."""
        return self.plan.starts[0] if self.plan.starts else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number and offset of the keys that attention reads."""
        if self.plan.num_paths:
            return self.plan.starts[0] + query_length, 0
        return self.plan.length, 0

    def get_max_length(self) -> int:
        """The cache grows without a maximum of its own."""
        return -1

    def _view(self, store: Tensor) -> Tensor:
        slots, length = self.plan.slots, self.plan.length
        if slots == list(range(slots[0], slots[0] + len(slots))):
            return store[slots[0] : slots[0] + len(slots), :, :length]
        index = torch.tensor(slots, device=store.device)
        return store[:, :, :length].index_select(0, index)

    def _appended(self, store: Tensor, new: Tensor) -> Tensor:
        cached = store[self.plan.slots[0], :, : self.plan.starts[0]]
        return torch.cat([cached.expand(new.shape[0], -1, -1, -1), new], dim=-2)


class SlotCache(Cache):  # type: ignore[misc]
    """All layers of one model; `plan` is set before each forward.

    Args:
        num_layers: layers that cache keys and values.
    """

    def __init__(self, num_layers: int) -> None:
        self.plan = Plan()
        super().__init__(layers=[SlotLayer(self.plan) for _ in range(num_layers)])

    def set_plan(self, plan: Plan) -> None:
        """Points every layer at the next forward's plan."""
        self.plan = plan
        for layer in self.layers:
            layer.plan = plan

    @torch.inference_mode()
    def wipe(self, slot: int) -> None:
        """Zeroes all that a slot holds."""
        for layer in self.layers:
            if layer.is_initialized and slot < layer.keys.shape[0]:
                layer.keys[slot] = layer.values[slot] = 0

    def num_bytes(self) -> int:
        """Bytes of all keys and values, used or free."""
        ready = [layer for layer in self.layers if layer.is_initialized]
        return sum(t.numel() * t.element_size() for x in ready for t in (x.keys, x.values))
