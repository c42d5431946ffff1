"""The preallocated cache by itself: what is written where, what attention reads, what moves."""

from __future__ import annotations

import pytest
import torch
from kit_runtime import cache_text, load
from tiny import VOCAB, shared
from torch import Tensor

from outpace.runtimes.cache import Plan, SlotCache, SlotLayer

HEADS, DIM = 2, 3


def states(*numbers: float) -> Tensor:
    """`[1, heads, rows, head_dim]`: a row's keys are all one number."""
    return torch.tensor(numbers).view(1, 1, -1, 1).expand(1, HEADS, -1, DIM).clone()


def rows_of(store: Tensor) -> list[list[float]]:
    """The number of each key, a list a sequence."""
    assert torch.equal(store, store[:, :1, :, :1].expand_as(store)), "heads or dims are mixed up"
    return store[:, 0, :, 0].tolist()


def write(layer: SlotLayer, slot: int, start: int, *numbers: float, length: int) -> Tensor:
    layer.plan = Plan([slot], [start], [list(range(len(numbers)))], length)
    return layer.update(states(*numbers), -states(*numbers))[0]


def test_keys_are_written_where_the_plan_says() -> None:
    layer = SlotLayer(Plan([0], [0], [[0, 1, 2]], 4))
    keys, values = layer.update(states(1, 2, 3), states(10, 20, 30))
    assert rows_of(keys) == [[1, 2, 3, 0]]
    assert rows_of(values) == [[10, 20, 30, 0]]
    layer.plan = Plan([0], [3], [[0, 2]], 8)  # grows, leaves a gap
    keys, values = layer.update(states(4, 5), states(40, 50))
    assert rows_of(keys) == [[1, 2, 3, 4, 0, 5, 0, 0]]
    assert rows_of(values) == [[10, 20, 30, 40, 0, 50, 0, 0]]


def test_sequences_do_not_touch_each_other() -> None:
    layer = SlotLayer(Plan())
    write(layer, 0, 0, 1, 2, length=4)
    write(layer, 2, 0, 7, 8, 9, length=4)
    layer.plan = Plan([0, 2], [2, 3], [[0, 1], [0, 1]], 6)
    keys, _ = layer.update(
        torch.cat([states(3, 4), states(10, 11)]), torch.cat([states(0, 0), states(0, 0)])
    )
    assert rows_of(keys) == [[1, 2, 3, 4, 0, 0], [7, 8, 9, 10, 11, 0]]
    layer.plan = Plan([2, 0], [5, 4], [[0], [0]], 6)  # any order of slots
    keys, _ = layer.update(torch.cat([states(12), states(5)]), torch.cat([states(0), states(0)]))
    assert rows_of(keys) == [[7, 8, 9, 10, 11, 12], [1, 2, 3, 4, 5, 0]]


def test_neighbouring_slots_are_read_without_a_copy() -> None:
    layer = SlotLayer(Plan())
    write(layer, 1, 0, 1, length=4)
    layer.plan = Plan([0, 1], [0, 1], [[0], [0]], 4)
    keys, _ = layer.update(torch.cat([states(5), states(2)]), torch.cat([states(5), states(2)]))
    assert keys.untyped_storage().data_ptr() == layer.keys.untyped_storage().data_ptr()
    assert rows_of(keys) == [[5, 0, 0, 0], [1, 2, 0, 0]]


@pytest.mark.parametrize(
    ("places", "left"),
    [
        ([0, 1, 2], [9, 10, 11, 12, 13]),
        ([0, 2, 4], [9, 10, 12, 14]),
        ([0, 3], [9, 10, 13]),
        ([0], [9, 10]),
        ([0, 2, 3, 4], [9, 10, 12, 13, 14]),
    ],
)
def test_compact_moves_a_path_together(places: list[int], left: list[int]) -> None:
    layer = SlotLayer(Plan())
    write(layer, 1, 0, 9, 10, 11, 12, 13, 14, length=8)
    layer.compact(1, 1, places)
    count = 1 + len(places)
    assert rows_of(layer.keys)[1][:count] == left[:count]
    assert rows_of(layer.values)[1][:count] == [-x for x in left[:count]]


def test_paths_share_the_cached_keys_and_one_of_them_is_kept() -> None:
    layer = SlotLayer(Plan())
    write(layer, 0, 0, 1, 2, length=4)
    layer.plan = Plan([0], [2], [], 4, num_paths=2)
    both = torch.cat([states(3, 4), states(3, 5)])
    keys, _ = layer.update(both, -both)
    assert rows_of(keys) == [[1, 2, 3, 4], [1, 2, 3, 5]]
    layer.commit_pending(0, 2, 1, 2)
    assert rows_of(layer.keys)[0][:4] == [1, 2, 3, 5]
    assert rows_of(layer.values)[0][:4] == [-1, -2, -3, -5]


def test_growth_keeps_what_is_cached() -> None:
    layer = SlotLayer(Plan())
    write(layer, 0, 0, 1, 2, 3, length=4)
    before = layer.keys
    layer.reserve(1, 4)
    assert layer.keys is before, "nothing to do"
    layer.reserve(3, 9)
    assert layer.keys.shape == (3, HEADS, 9, DIM)
    assert rows_of(layer.keys)[0] == [1, 2, 3, 0, 0, 0, 0, 0, 0]
    layer.reserve(1, 2)
    assert layer.keys.shape == (3, HEADS, 9, DIM), "it never shrinks under running sequences"


def test_what_models_ask_a_cache() -> None:
    cache = SlotCache(2)
    assert cache.get_seq_length() == 0
    cache.set_plan(Plan([1, 0], [5, 3], [[0], [0]], 64))
    assert cache.get_seq_length() == 5
    assert cache.get_mask_sizes(1, 0) == (64, 0)
    cache.set_plan(Plan([0], [3], [], 5, num_paths=2))
    assert cache.get_mask_sizes(2, 0) == (5, 0)
    assert not any(cache.is_sliding)


def test_bytes_scale_with_the_heads_that_are_cached() -> None:
    sizes = {}
    for name in ("llama-mha", "llama", "llama-mqa"):
        runtime = load(shared(name))
        cache_text(runtime, [t % VOCAB for t in range(40)])
        sizes[name] = runtime.memory()["cache"]
    assert sizes["llama-mha"] == 2 * sizes["llama"] == 4 * sizes["llama-mqa"]
    # layers, keys and values, capacity, width, fp32
    assert sizes["llama-mqa"] == 2 * 2 * 64 * 8 * 4


def test_control_a_layer_that_forgets_the_start_is_seen() -> None:
    layer = SlotLayer(Plan())
    write(layer, 0, 0, 1, 2, length=4)
    assert rows_of(write(layer, 0, 0, 3, length=4)) != [[1, 2, 3, 0]]
    assert rows_of(write(layer, 0, 1, 2, 3, length=4)) == [[3, 2, 3, 0]]
