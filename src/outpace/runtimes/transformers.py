"""Runs trees on any causal LM of transformers that can roll back, unmodified."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from outpace.errors import InvalidCheckpoint, InvalidRequest, UnsupportedModel
from outpace.runtimes.base import Output, Pass, Runtime, check_path, common_prefix
from outpace.runtimes.cache import Plan, SlotCache
from outpace.runtimes.guard import (
    RowClass,
    SelfCheck,
    check_model,
    find_row_class,
    measure_cost,
)
from outpace.runtimes.masks import LAYER_TYPES, visible_keys
from outpace.runtimes.placement import BLOCK, place_aligned, prune
from outpace.tree import Tree

EXACTNESS = ("auto", "same-shape", "ordinary")
MAX_NODES = 256
SAME_SHAPE_MAX_COST = 1.15  # the default in half precision only where it costs at most this
KEY_STEP = 64
FIRST_BUCKET = 256


def load_pretrained(
    folder: Path,
    *,
    gguf_file: str | None = None,
    dtype: torch.dtype | None,
    device: torch.device,
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """Loads a causal LM from a folder, dequantised when it is a GGUF file.

    Args:
        folder: holds config.json and weights, or the GGUF file.
        gguf_file: name of the GGUF file in `folder`.
        dtype: None takes the checkpoint's own.
        device: where the weights go.
        attn_implementation: None lets transformers choose.

    Raises:
        InvalidCheckpoint: naming a tensor that is missing or has another shape than the model.
    """
    options: dict[str, Any] = {"dtype": "auto" if dtype is None else dtype}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    if gguf_file is not None:
        options["gguf_file"] = gguf_file
        if hasattr(transformers, "GgufConfig"):  # without it, a GGUF file is always dequantised
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    # transformers fills missing tensors with random numbers
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, ignore_mismatched_sizes=True, **options
    )
    for cause, names in (
        ("lacks", info["missing_keys"]),
        ("has the wrong shape for", {name for name, *_ in info["mismatched_keys"]}),
    ):
        if names:
            first = ", ".join(sorted(names)[:3])
            raise InvalidCheckpoint(f"{folder} {cause} {len(names)} of its tensors: {first}")
    return model.to(device) if not getattr(model, "hf_device_map", None) else model


@dataclass(slots=True)
class _Sequence:
    slot: int
    tokens: list[int] = field(default_factory=list)
    prefilled: int = 0  # leading tokens whose keys were computed by prefill passes
    running: Pass | None = None
    places: list[int] = field(default_factory=list)


class TransformersRuntime(Runtime):
    """A causal LM of transformers as a tree runtime.

    `mode` says how trees run: "tree" passes a mask per layer type, "paths" runs each path from
    root to leaf as a row of a batch, for models that take no such mask (ALiBi, for one).

    Args:
        model: loaded, on its device, in eval mode.
        exactness: "same-shape" runs every decode forward with the same rows, so that half
            precision is exact too; "auto" takes it in half precision where it costs at most 15 %.
        notice: receives one-line messages.

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
    ) -> None:
        if exactness not in EXACTNESS:
            raise InvalidRequest(f"exactness must be one of {EXACTNESS}, not {exactness!r}")
        if prefill_chunk < 1:
            raise InvalidRequest(f"prefill_chunk must be at least 1, not {prefill_chunk}")
        self.model = model
        self.prefill_chunk = prefill_chunk
        self.class_name = type(model).__name__
        self.attention = _attention_backend(model)
        config = model.config.get_text_config(decoder=True)
        self.layer_types = _layer_types(config, self.class_name)
        self._windows = {
            "full_attention": 0,
            "sliding_attention": getattr(config, "sliding_window", None) or 0,
            "chunked_attention": getattr(config, "attention_chunk_size", None) or 0,
        }
        self._head = model.get_output_embeddings()
        if self._head is None:
            raise UnsupportedModel(f"{self.class_name} has no LM head: load a causal LM")
        self.device = model.get_input_embeddings().weight.device
        self.dtype = model.dtype
        self.vocab_size, self.hidden_size = (int(n) for n in self._head.weight.shape)
        self.max_context = _max_context(config)
        self._cache = SlotCache(int(config.num_hidden_layers))
        self._sequences: dict[int, _Sequence] = {}
        self._rows: list[int] = []
        self._hidden: Tensor | None = None
        names = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._takes_positions = "position_ids" in names
        if model.training:
            model.eval()
            if notice is not None:
                notice(f"{self.class_name} was in training mode: switched to eval mode")
        self.same_shape = False
        self.mode = "tree"
        self.max_nodes = MAX_NODES
        self.self_check = self._check_model()
        self.row_class: RowClass
        self.same_shape_cost: float | None = None
        self._choose_shape(exactness, notice)

    # Sequences

    def open(self) -> int:
        slot = next(i for i in range(len(self._sequences) + 1) if i not in self._sequences)
        self._sequences[slot] = _Sequence(slot)
        return slot

    def close(self, sequence: int) -> None:
        del self._sequences[sequence]

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
            self._keep_path(state, work.tree, path)
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
        del state.tokens[common:]
        state.prefilled = min(state.prefilled, common)
        state.running = None
        return common

    # Forward

    def forward(self, batch: Sequence[Pass]) -> list[Output]:
        for work in batch:
            self._check_pass(work)
        if self.mode == "paths":
            outputs = [self._forward_paths(work) for work in batch]
        else:
            found: dict[int, Output] = {}
            for group in self._groups(batch):
                for work, output in zip(group, self._forward_trees(group), strict=True):
                    found[work.sequence] = output
            outputs = [found[work.sequence] for work in batch]
        for work in batch:
            self._sequences[work.sequence].running = work
        return outputs

    def _check_pass(self, work: Pass) -> None:
        start, tree = len(self._sequences[work.sequence].tokens), work.tree
        if work.rows and len(tree) > self.max_nodes and max(tree.parents) != len(tree) - 2:
            raise ValueError(f"a tree of {len(tree)} nodes, at most {self.max_nodes} are possible")
        if start + max(tree.depths) >= self.max_context:
            raise ValueError(
                f"position {start + max(tree.depths)} is past the context of {self.max_context}"
            )

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
        state, tree = self._sequences[work.sequence], work.tree
        paths = _leaf_paths(tree)
        start, depth = len(state.tokens), max(len(path) for path in paths)
        # Rows behind a path's leaf repeat it: nobody reads them, and causality hides them.
        full = [path + [path[-1]] * (depth - len(path)) for path in paths]
        plan = Plan([state.slot], [start], [], start + depth, num_paths=len(paths))
        ids = [[tree.tokens[i] for i in path] for path in full]
        positions = [[min(start + d, self.max_context - 1) for d in range(depth)] for _ in full]
        where = {node: i * depth + d for i, path in enumerate(full) for d, node in enumerate(path)}
        first = {}
        for node, spot in where.items():
            path_row = spot // depth
            first[node] = path_row * depth + tree.depths[node]
        logits, hidden = self._run(plan, ids, positions, None, [first[i] for i in work.rows])
        flat = hidden.reshape(-1, hidden.shape[-1])
        return Output(logits=logits, hidden=flat[[first[i] for i in range(len(tree))]])

    def _keep_path(self, state: _Sequence, tree: Tree, path: Sequence[int]) -> None:
        start = len(state.tokens)
        row = next(i for i, p in enumerate(_leaf_paths(tree)) if p[: len(path)] == list(path))
        for layer in self._cache.layers:
            layer.commit_pending(state.slot, start, row, len(path))

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
        if self._takes_positions:
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

    def _choose_shape(self, exactness: str, notice: Callable[[str], None] | None) -> None:
        half = self.dtype in (torch.bfloat16, torch.float16)
        if exactness == "ordinary" or (exactness == "auto" and not half):
            return
        if self.mode != "tree":
            if exactness == "auto":
                return
            raise UnsupportedModel(
                f"{self.class_name} runs trees as paths, whose shapes vary: use exactness "
                "ordinary, with dtype float32 where near-ties matter"
            )
        self.same_shape = True
        found = find_row_class(self)
        if found is None:
            why = f"the bits of {self.class_name}'s rows depend on the rows beside them"
            if exactness == "same-shape":
                raise UnsupportedModel(f"{why}, in every shape tried: use exactness ordinary")
            self.same_shape = False
            if notice is not None:
                notice(f"{why}: near-ties may fall differently than in plain decoding")
            return
        self.row_class, self.max_nodes = found, found.most
        self.same_shape_cost = measure_cost(self, enough=SAME_SHAPE_MAX_COST)
        if exactness == "auto" and self.same_shape_cost > SAME_SHAPE_MAX_COST:
            self.same_shape, self.max_nodes = False, MAX_NODES
            if notice is not None:
                notice(
                    f"same-shape forwards would cost {self.same_shape_cost - 1:.0%} here: ordinary "
                    "ones are used, so near-ties may fall differently (--exactness same-shape)"
                )

    def _check_model(self) -> SelfCheck:
        failures = []
        for mode in ("tree", "paths"):
            if mode == "tree" and not self._takes_positions:
                failures.append("tree: its forward takes no position_ids")
                continue
            self.mode = mode
            check = check_model(self)
            self._sequences.clear()
            if check.failure is None:
                return check
            failures.append(f"{mode}: {check.failure}")
        raise UnsupportedModel(
            f"{self.class_name} cannot verify several tokens and roll back ({'; '.join(failures)}):"
            " recurrent and convolutional states cannot drop rejected tokens"
        )


def _attention_backend(model: PreTrainedModel) -> str:
    backend = str(model.config._attn_implementation)
    if backend not in ("sdpa", "eager"):
        raise UnsupportedModel(
            f"{type(model).__name__} runs attention with {backend!r}, which drops a tree's mask: "
            "load it with attn_implementation='sdpa' or 'eager'"
        )
    return backend


def _layer_types(config: Any, class_name: str) -> list[str]:
    """The layer type of each layer, by transformers' own rule for configs without the field."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kind = "full_attention"
        if getattr(config, "sliding_window", None) is not None:
            kind = "sliding_attention"
        elif getattr(config, "attention_chunk_size", None) is not None:
            kind = "chunked_attention"
        kinds = [kind] * int(config.num_hidden_layers)
    unknown = sorted(set(kinds) - set(LAYER_TYPES))
    if unknown:
        raise UnsupportedModel(
            f"{class_name} has layers of type {', '.join(unknown)}, whose state cannot drop "
            "rejected tokens: outpace needs attention layers"
        )
    return list(kinds)


def _max_context(config: Any) -> int:
    for name in ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return 2**20  # ALiBi needs no table of positions


def _leaf_paths(tree: Tree) -> list[list[int]]:
    inner = set(tree.parents)
    return [tree.path(node) for node in range(len(tree)) if node not in inner]
