"""Runs trees on any causal LM of transformers that can roll back, unmodified."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outpace.errors import InvalidRequest, UnsupportedModel
from outpace.runtimes.base import EXACTNESS, Output, Pass, Runtime, check_path, common_prefix
from outpace.runtimes.cache import Plan, SlotCache
from outpace.runtimes.guard import RowClass
from outpace.runtimes.masks import visible_keys
from outpace.runtimes.paths import Paths
from outpace.runtimes.placement import BLOCK, place_aligned, prune
from outpace.runtimes.pretrained import attention_backend, layer_types, max_context, window_sizes
from outpace.runtimes.verdict import Verdicts, judge
from outpace.tree import Tree

MAX_NODES = 256
KEY_STEP = 64
FIRST_BUCKET = 256


@dataclass(slots=True)
class _Sequence:
    slot: int
    tokens: list[int] = field(default_factory=list)
    prefilled: int = 0  # leading tokens whose keys were computed by prefill passes
    running: Pass | None = None
    places: list[int] = field(default_factory=list)
    finite: Tensor | None = None  # whether all that its last pass computed are numbers


class TransformersRuntime(Runtime):
    """A causal LM of transformers as a tree runtime.

    `mode` says how trees run: "tree" passes a mask per layer type, "paths" runs each path from
    root to leaf as a row of a batch, for models that take no such mask (ALiBi, for one).

    Args:
        model: loaded, on its device, in eval mode.
        exactness: "same-shape" runs every decode forward with the same rows, so that half
            precision is exact too; "auto" takes it in half precision where it costs at most 15 %.
        notice: receives one-line messages.
        verdicts: remembers what the checks on the real weights decide; None checks anew.

    Raises:
        UnsupportedModel: naming the class, when the model cannot roll back or its attention
            backend would drop the mask.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        exactness: str = "auto",
        prefill_chunk: int = 256,
        notice: Callable[[str], None] | None = None,
        verdicts: Verdicts | None = None,
    ) -> None:
        if exactness not in EXACTNESS:
            raise InvalidRequest(
                f"exactness must be one of {', '.join(EXACTNESS)}, not {exactness!r}"
            )
        if prefill_chunk < 1:
            raise InvalidRequest(f"prefill_chunk must be at least 1, not {prefill_chunk}")
        self.model = model
        self.prefill_chunk = prefill_chunk
        self.class_name = type(model).__name__
        self.attention = attention_backend(model)
        config = model.config.get_text_config(decoder=True)
        self.layer_types = layer_types(config, self.class_name)
        self._windows = window_sizes(config, self.class_name)
        self._head = model.get_output_embeddings()
        if self._head is None:
            raise UnsupportedModel(f"{self.class_name} has no LM head: load a causal LM")
        self.device = model.get_input_embeddings().weight.device
        self.dtype = model.dtype
        self.vocab_size, self.hidden_size = (int(n) for n in self._head.weight.shape)
        self.max_context = max_context(config)
        self._cache = SlotCache(int(config.num_hidden_layers))
        self._sequences: dict[int, _Sequence] = {}
        self._rows: list[int] = []
        self._hidden: Tensor | None = None
        names = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self.takes_positions = "position_ids" in names
        if model.training:
            model.eval()
            if notice is not None:
                notice(f"{self.class_name} was in training mode: switched to eval mode")
        self.same_shape = False
        self.mode = "tree"
        self.max_nodes = MAX_NODES
        self.row_class: RowClass  # of same-shape forwards
        verdict = (
            judge(self, exactness)
            if verdicts is None
            else verdicts.get(self, exactness, judge=lambda: judge(self, exactness))
        )
        self.close_all()
        self.mode, self.self_check, self.same_shape_cost = verdict.mode, verdict.check, verdict.cost
        self.same_shape = verdict.row_class is not None
        if verdict.row_class is not None:
            self.row_class, self.max_nodes = verdict.row_class, verdict.row_class.most
            self.branches = verdict.row_class.branches
        if verdict.notice is not None and notice is not None:
            notice(verdict.notice)

    # Sequences

    def open(self) -> int:
        slot = next(i for i in range(len(self._sequences) + 1) if i not in self._sequences)
        self._sequences[slot] = _Sequence(slot)
        return slot

    def close(self, sequence: int) -> None:
        state = self._sequences.pop(sequence)
        if self._overflowed(state):
            self._cache.wipe(state.slot)

    @property
    def window(self) -> int:
        """The shortest window that a layer's attention is limited to; 0 without one."""
        return min(
            (w for kind, w in self._windows.items() if w and kind in self.layer_types), default=0
        )

    def close_all(self) -> None:
        """Frees every sequence."""
        self._sequences.clear()

    def tokens(self, sequence: int) -> Sequence[int]:
        return self._sequences[sequence].tokens

    def max_depth(self, sequence: int) -> int:
        start = len(self._sequences[sequence].tokens)
        room = self.max_context - 1 - start
        if self.same_shape:  # a tree must not cross into the next bucket of keys
            room = min(room, self._bucket(start + self._reach) - self._reach - start)
        return max(room, 0)

    def fit(self, sequence: int, tree: Tree) -> Tree:
        if not self.same_shape:
            return tree
        places = place_aligned(tree, len(self._sequences[sequence].tokens))
        if not self.row_class.branches:  # only the first branch stands at its natural index
            n = tree.num_candidates
            places = [p if i >= n or p == tree.depths[i] else None for i, p in enumerate(places)]
        return prune(tree, [place is not None for place in places])

    @torch.inference_mode()
    def keep(self, sequence: int, path: Sequence[int]) -> None:
        state = self._sequences[sequence]
        work = state.running
        if work is None:
            raise ValueError(f"keep without a forward of sequence {sequence}")
        check_path(work.tree, path)
        start = len(state.tokens)
        if self.mode == "paths":
            row = Paths.of(work.tree).holding(path)
            for layer in self._cache.layers:
                layer.commit_pending(state.slot, start, row, len(path))
        else:
            for layer in self._cache.layers:
                if layer.is_initialized:
                    layer.compact(state.slot, start, [state.places[i] for i in path])
        state.running = None
        state.tokens.extend(work.tree.tokens[i] for i in path)
        if not work.rows and state.prefilled == start:
            state.prefilled = len(state.tokens)

    def rewind(self, sequence: int, tokens: Sequence[int]) -> int:
        state = self._sequences[sequence]
        common = common_prefix(state.tokens, tokens)
        if self.same_shape:  # only whole prefill chunks have the bits that a cold start computes
            whole = min(common, state.prefilled) // self.prefill_chunk * self.prefill_chunk
            common = whole
        if self._overflowed(state):  # one token's NaN reaches all that ran beside it
            self._cache.wipe(state.slot)
            common, state.finite = 0, None
        del state.tokens[common:]
        state.prefilled = min(state.prefilled, common)
        state.running = None
        return common

    def _overflowed(self, state: _Sequence) -> bool:
        """Whether the slot may hold NaN, which a mask does not hide: 0 times NaN is NaN."""
        return state.finite is not None and not bool(state.finite)

    # Forward

    def forward(self, batch: Sequence[Pass]) -> list[Output]:
        for work in batch:
            self.check_pass(work)
        if self.mode == "paths":
            outputs = [self._forward_paths(work) for work in batch]
        else:
            found: dict[int, Output] = {}
            for group in self._groups(batch):
                for work, output in zip(group, self._forward_trees(group), strict=True):
                    found[work.sequence] = output
            outputs = [found[work.sequence] for work in batch]
        for work, output in zip(batch, outputs, strict=True):
            state = self._sequences[work.sequence]
            state.running = work
            state.finite = output.hidden.isfinite().all()  # not read before the device is done
        return outputs

    def _groups(self, batch: Sequence[Pass]) -> list[list[Pass]]:
        """The batch in parts that run together; same-shape forwards mix no lengths of keys."""
        if not self.same_shape:
            return [list(batch)]
        groups: list[list[Pass]] = []
        key = None
        for work in sorted(batch, key=lambda w: (self._shape(w), w.sequence)):
            shape = self._shape(work)
            rows = self.row_class.pad(max(len(w.tree) for w in [work, *(groups or [[]])[-1]]))
            full = bool(groups) and (len(groups[-1]) + 1) * rows > self.row_class.most
            if not groups or shape != key or full or not self.row_class.batches:
                groups.append([])
                key = shape
            groups[-1].append(work)
        return groups

    def _shape(self, work: Pass) -> tuple[bool, int]:
        """Prefill or decode, and the number of keys that a same-shape pass reads."""
        start = len(self._sequences[work.sequence].tokens)
        return bool(work.rows), self._bucket(start + self._reach)

    def _forward_trees(self, batch: Sequence[Pass]) -> list[Output]:
        trees = [work.tree for work in batch]
        states = [self._sequences[work.sequence] for work in batch]
        starts = [len(state.tokens) for state in states]
        decoding = bool(batch[0].rows)
        rows = max(len(tree) for tree in trees)
        if self.same_shape and decoding:
            rows = self.row_class.pad(rows)
        places = [
            self._places(tree, start, rows) for tree, start in zip(trees, starts, strict=True)
        ]
        for state, where in zip(states, places, strict=True):
            state.places = where
        need = max(starts) + 1 + max(max(where) for where in places)
        if self.same_shape and decoding:
            need = max(need, max(starts) + self._reach)
        length = self._num_keys(need)
        plan = Plan([state.slot for state in states], starts, places, length)
        ids = [tree.tokens + [tree.tokens[0]] * (rows - len(tree)) for tree in trees]
        positions = [
            [start + d for d in tree.depths] + [start] * (rows - len(tree))
            for tree, start in zip(trees, starts, strict=True)
        ]
        wanted = [i * rows + row for i, work in enumerate(batch) for row in work.rows]
        masks = {
            kind: self._additive(
                visible_keys(
                    kind,
                    trees,
                    starts=starts,
                    places=places,
                    num_keys=length,
                    window=self._windows[kind],
                )
            )
            for kind in set(self.layer_types)
        }
        mask = masks if len(masks) > 1 else next(iter(masks.values()))
        padded = wanted
        if self.same_shape and wanted:  # the head's rows are part of the shape
            padded = wanted + [wanted[0]] * (self.row_class.pad(len(wanted)) - len(wanted))
        logits, hidden = self._run(plan, ids, positions, mask, padded)
        outputs, at = [], 0
        for i, work in enumerate(batch):
            n = len(work.rows)
            outputs.append(Output(logits=logits[at : at + n], hidden=hidden[i, : len(work.tree)]))
            at += n
        return outputs

    def _forward_paths(self, work: Pass) -> Output:
        state = self._sequences[work.sequence]
        start = len(state.tokens)
        paths = Paths.of(work.tree)
        plan = Plan([state.slot], [start], [], start + paths.depth, num_paths=len(paths.nodes))
        positions = [
            [min(start + d, self.max_context - 1) for d in range(paths.depth)] for _ in paths.nodes
        ]
        ids = [[work.tree.tokens[i] for i in row] for row in paths.nodes]
        logits, hidden = self._run(plan, ids, positions, None, [paths.rows[i] for i in work.rows])
        return Output(logits=logits, hidden=hidden.reshape(-1, hidden.shape[-1])[paths.rows])

    @torch.inference_mode()
    def _run(
        self,
        plan: Plan,
        ids: list[list[int]],
        positions: list[list[int]],
        mask: Tensor | dict[str, Tensor] | None,
        rows: list[int],
    ) -> tuple[Tensor, Tensor]:
        """Logits `[rows, vocab]` and hidden states `[batch, nodes, hidden]` of one model call."""
        self._cache.set_plan(plan)
        inputs: dict[str, Any] = {
            "input_ids": torch.tensor(ids, device=self.device),
            "attention_mask": mask,
            self._cache_name: self._cache,
            "use_cache": True,
        }
        if self.takes_positions:
            inputs["position_ids"] = torch.tensor(positions, device=self.device)
        with self._head_reads(rows):
            logits = self.model(**inputs, return_dict=True).logits
        if self._hidden is None:
            raise UnsupportedModel(f"{self.class_name} does not call its LM head")
        hidden, self._hidden = self._hidden, None
        return logits.reshape(-1, logits.shape[-1]), hidden

    @contextmanager
    def _head_reads(self, rows: list[int]) -> Iterator[None]:
        """While active, the LM head computes the given rows of the flattened batch only."""

        def select(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            self._hidden = args[0]
            flat = args[0].reshape(-1, args[0].shape[-1])
            return (flat[rows].unsqueeze(0), *args[1:])

        handle = self._head.register_forward_pre_hook(select)
        try:
            yield
        finally:
            handle.remove()

    @property
    def _reach(self) -> int:
        """Keys from the root on that a same-shape tree may occupy."""
        return BLOCK + self.row_class.most

    def _places(self, tree: Tree, start: int, rows: int) -> list[int]:
        """Where the rows are cached, spare ones behind the nodes."""
        if not self.same_shape:
            return list(range(rows))
        places = [p for p in place_aligned(tree, start) if p is not None]
        behind = max(places) + 1
        return places + list(range(behind, behind + rows - len(tree)))

    def _additive(self, visible: Any) -> Tensor:
        """`[batch, 1, rows, keys]`: 0 where visible, else the dtype's lowest number."""
        seen = torch.from_numpy(visible).unsqueeze(1).to(self.device)
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(~seen, torch.finfo(self.dtype).min)

    def _num_keys(self, need: int) -> int:
        if self.same_shape:
            return self._bucket(need)
        return -(-need // KEY_STEP) * KEY_STEP

    def _bucket(self, need: int) -> int:
        bucket = FIRST_BUCKET
        while bucket < need:
            bucket *= 2
        return bucket

    # What methods ask for

    def info(self) -> dict[str, Any]:
        return {
            "class": self.class_name,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "attention": self.attention,
            "layers": {kind: self.layer_types.count(kind) for kind in set(self.layer_types)},
            "trees": self.mode,
            "verify_gap": self.self_check.gap,
            "bit_lossless": self.same_shape or self.self_check.bit_lossless,
            "same_shape_cost": self.same_shape_cost,
            "row_step": self.row_class.step if self.same_shape else None,
        }

    @torch.inference_mode()
    def project(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._head(hidden)
        return logits

    @torch.inference_mode()
    def embed(self, tokens: Tensor) -> Tensor:
        embeddings: Tensor = self.model.get_input_embeddings()(tokens.to(self.device))
        return embeddings

    def memory(self) -> dict[str, int]:
        tensors = {t.data_ptr(): t for t in [*self.model.parameters(), *self.model.buffers()]}
        weights = sum(t.numel() * t.element_size() for t in tensors.values())
        return {"weights": weights, "cache": self._cache.num_bytes()}
