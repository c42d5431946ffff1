"""The check at load: what it lets through, what it refuses, and what it says about rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit_runtime import CLOSE, TREES, cache_text, distance, load, recomputed, run_one, text_of
from tiny import FAMILIES, build, shared
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel

from outpace.errors import UnsupportedModel
from outpace.runtimes.guard import RowClass, find_row_class
from outpace.runtimes.transformers import TransformersRuntime
from outpace.tree import Tree

FORK = Tree(tokens=[9, 1, 2, 3], parents=[-1, 0, 1, 0])


def disguised(base: PreTrainedModel, **methods: Any) -> PreTrainedModel:
    """A copy of a model whose class differs in some methods."""
    model = build("llama")
    model.load_state_dict(base.state_dict())
    model.__class__ = type("Disguised", (type(base),), methods)
    return model


def forward_without_mask(
    self: Any,
    input_ids: Tensor,
    attention_mask: Any = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    use_cache: bool | None = None,
    **inputs: Any,
) -> Any:
    """Causal whatever the mask says: it counts on rows being a text."""
    return LlamaForCausalLM.forward(
        self, input_ids, None, position_ids, past_key_values, use_cache=use_cache, **inputs
    )


def forward_with_state(
    self: Any,
    input_ids: Tensor,
    attention_mask: Any = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    use_cache: bool | None = None,
    **inputs: Any,
) -> Any:
    """Adds what was ever read to the logits, as a recurrent state does."""
    if not use_cache or past_key_values.get_seq_length() == 0:
        self.state = torch.zeros(self.config.hidden_size)
    states = self.state + self.model.embed_tokens(input_ids).cumsum(dim=1)
    self.state = states[0, -1].detach()
    out = LlamaForCausalLM.forward(
        self,
        input_ids,
        attention_mask,
        position_ids,
        past_key_values,
        use_cache=use_cache,
        **inputs,
    )
    rows = self.lm_head(states)
    if rows.shape == out.logits.shape:
        out.logits = out.logits + rows
    return out


# What is right passes, what is wrong does not


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes(family: str) -> None:
    check = load(shared(family)).self_check
    assert check.failure is None
    assert check.gap < CLOSE
    assert check.noise < CLOSE


def test_a_model_that_ignores_the_mask_runs_its_paths_one_by_one() -> None:
    model = disguised(shared("llama"), forward=forward_without_mask)
    runtime = load(model)
    assert runtime.mode == "paths"
    text = text_of(20)
    got = run_one(runtime, cache_text(runtime, text), FORK)
    assert distance(got, recomputed(shared("llama"), text, FORK)) < CLOSE


def test_control_trees_under_an_ignored_mask_are_wrong() -> None:
    model = disguised(shared("llama"), forward=forward_without_mask)
    runtime = load(model)
    runtime.mode = "tree"  # what the check prevents
    text = text_of(20)
    got = run_one(runtime, cache_text(runtime, text), FORK)
    assert distance(got, recomputed(shared("llama"), text, FORK)) > 100 * CLOSE


def test_a_state_that_cannot_roll_back_is_refused_by_its_effect() -> None:
    model = disguised(shared("llama"), forward=forward_with_state)
    with pytest.raises(UnsupportedModel, match=r"Disguised .*cannot verify .*roll back"):
        load(model)


@pytest.mark.parametrize("seed", range(3))
def test_attention_to_later_tokens_is_not_taken_for_rounding(seed: int) -> None:
    """Its rows do depend on their neighbours, as those of a coarse quantisation do."""
    with pytest.raises(UnsupportedModel, match="BertLMHeadModel cannot verify"):
        load(build("llama", model_type="bert", seed=seed))
    causal = build("llama", model_type="bert", seed=seed, is_decoder=True)
    assert load(causal).self_check.failure is None


def test_a_model_whose_code_fails_is_refused_with_its_words() -> None:
    def forward(self: Any, input_ids: Tensor, position_ids: Any = None, **inputs: Any) -> Any:
        if inputs.get("use_cache"):
            raise IndexError("one token at a time, please")
        return LlamaForCausalLM.forward(self, input_ids, **inputs)

    with pytest.raises(UnsupportedModel, match=r"Disguised.*IndexError: one token at a time"):
        load(disguised(shared("llama"), forward=forward))


def test_nan_is_no_pass() -> None:
    def forward(self: Any, *args: Any, position_ids: Any = None, **inputs: Any) -> Any:
        out = LlamaForCausalLM.forward(self, *args, position_ids=position_ids, **inputs)
        if inputs.get("use_cache"):
            out.logits = out.logits * float("nan")
        return out

    with pytest.raises(UnsupportedModel, match="Disguised"):
        load(disguised(shared("llama"), forward=forward))


# Rounding that depends on the neighbours


class Int8Linear(nn.Module):
    """A quantised linear layer: activations in 8 bits, one scale a row or one a call."""

    def __init__(self, linear: nn.Linear, *, per_row: bool) -> None:
        super().__init__()
        self.scale = linear.weight.abs().amax(dim=1, keepdim=True) / 127
        self.weight = (linear.weight / self.scale).round()
        self.per_row = per_row

    def forward(self, x: Tensor) -> Tensor:
        top = x.abs().amax(dim=-1, keepdim=True) if self.per_row else x.abs().amax()
        scale = top.clamp_min(1e-9) / 127
        return ((x / scale).round() @ self.weight.T) * scale * self.scale.T


def quantised(*, per_row: bool, **how: Any) -> PreTrainedModel:
    model = build("llama", **how)
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, child in list(part.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(part, name, Int8Linear(child, per_row=per_row))
    return model.requires_grad_(False)


def test_one_scale_a_call_is_told_and_not_refused() -> None:
    runtime = load(quantised(per_row=False))
    assert runtime.self_check.failure is None
    assert runtime.info()["bit_lossless"] is False
    assert runtime.info()["verify_gap"] > 10 * CLOSE
    assert runtime.self_check.noise > CLOSE


def test_one_scale_a_row_is_as_good_as_none() -> None:
    runtime = load(quantised(per_row=True))
    assert runtime.self_check.gap < CLOSE


def test_same_shapes_do_not_make_one_scale_a_call_exact() -> None:
    model = quantised(per_row=False, max_position_embeddings=512)
    assert not says_lossless(model), "a row's bits still depend on its neighbours"


def test_experts_that_gather_rows_are_not_called_exact_without_being_so() -> None:
    """An expert computes the rows that chose it: as many as the neighbours make them."""
    model = build("mixtral", max_position_embeddings=512)
    if says_lossless(model):
        runtime = load(model, exactness="same-shape")
        sequence = cache_text(runtime, text_of(100))
        chain = text_of(8, first=30)
        together = run_one(runtime, sequence, Tree.chain(chain))
        for node, token in enumerate(chain):
            assert torch.equal(run_one(runtime, sequence, Tree.chain([token]))[0], together[node])
            runtime.keep(sequence, [0])


def says_lossless(model: PreTrainedModel) -> bool:
    """What a runtime says of its same-shape forwards; refusing them is an answer too."""
    try:
        runtime = load(model, exactness="same-shape")
    except UnsupportedModel:
        return False
    return bool(runtime.info()["bit_lossless"])


# Which row counts share their bits


def test_row_classes_pad_to_their_step() -> None:
    rows = RowClass(step=4, most=64, branches=True, batches=True)
    assert [rows.pad(n) for n in (1, 4, 5, 8, 63)] == [4, 4, 8, 8, 64]
    rows = RowClass(step=1, most=64, branches=True, batches=True)
    assert [rows.pad(n) for n in (1, 2, 63)] == [1, 2, 63]


def found(model: PreTrainedModel) -> RowClass | None:
    """The search on a runtime whose class must not matter."""
    runtime = load(model)
    runtime.same_shape = True
    rows = find_row_class(runtime)
    assert not runtime._sequences, "the search leaves nothing behind"
    return rows


def test_arithmetic_that_needs_no_care_gets_the_finest_rows() -> None:
    """A model of whole numbers: no rounding, so any count of rows has the same bits."""
    model = build("llama", max_position_embeddings=512, attn_implementation="eager")
    for layer in model.model.layers:
        layer.self_attn.forward = lambda hidden_states, **_: (torch.zeros_like(hidden_states), None)
        layer.mlp.forward = torch.zeros_like
    rows = found(model)
    assert rows is not None
    assert rows.branches
    assert rows.batches


@pytest.mark.parametrize("counts", [range(1, 2), range(8, 9)], ids=["a single row", "eight rows"])
def test_a_kernel_that_differs_for_some_counts_is_found(counts: range) -> None:
    class Fussy(nn.Module):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.linear(x)
            return torch.nextafter(out, out + 1) if x.shape[-2] in counts else out

    model = build("llama", max_position_embeddings=512)
    model.model.layers[1].mlp.up_proj = Fussy(model.model.layers[1].mlp.up_proj)
    rows = found(model)
    if rows is not None:
        allowed = {rows.pad(n) for n in range(1, rows.most + 1)}
        assert not allowed & set(counts) or len(allowed) == 1, "always this count, or never"


def test_rows_that_depend_on_their_place_are_found() -> None:
    class ByPlace(nn.Module):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.linear(x).clone()
            out[:, 5:] = torch.nextafter(out[:, 5:], out[:, 5:] + 1)
            return out

    model = build("llama", max_position_embeddings=512)
    model.model.layers[1].mlp.up_proj = ByPlace(model.model.layers[1].mlp.up_proj)
    assert found(model) is None


@pytest.mark.parametrize("family", [name for name in TREES if name not in ("gpt2", "opt")])
def test_auto_is_ordinary_in_single_precision(family: str) -> None:
    runtime = TransformersRuntime(shared(family))
    assert not runtime.same_shape
    assert runtime.same_shape_cost is None, "nothing is measured for nothing"
