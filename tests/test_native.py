"""The native runtime: the model's own logits, its sequences, its refusals."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from kit_runtime import cache_text, recomputed, run_one, text_of
from native_kit import LONG, NATIVE, native, original, packed, packed_of
from tiny import FAMILIES, VOCAB, build

from outpace.errors import InvalidCheckpoint, InvalidRequest, UnsupportedModel
from outpace.llm import LLM
from outpace.proposers import METHODS
from outpace.proposers.draft import Draft
from outpace.runtimes import native as module
from outpace.runtimes.architecture import Architecture
from outpace.runtimes.base import Pass
from outpace.runtimes.native import NativeRuntime, kernel_names
from outpace.runtimes.prepare import check_packed
from outpace.tree import Tree
from outpace.verify.ids import tolerance_of

pytestmark = pytest.mark.skipif(not kernel_names(), reason="built without a compiler")

TREE = Tree(tokens=[9, 4, 7, 4, 30, 31], parents=[-1, 0, 0, 1, 3, 2])


def likeness(got: torch.Tensor, want: torch.Tensor) -> float:
    """Mean cosine of logits, less their mean; int8 leaves 0.998."""
    a, b = (x.float() - x.float().mean(-1, keepdim=True) for x in (got, want))
    return float(torch.nn.functional.cosine_similarity(a, b, dim=-1).mean())


@pytest.mark.parametrize("name", NATIVE)
def test_its_logits_are_the_models_but_for_rounding(name: str) -> None:
    """After 60 tokens, past every window and every stretched wavelength."""
    runtime = native(name)
    text = text_of(60)
    want = recomputed(original(name), text, TREE)
    assert likeness(run_one(runtime, cache_text(runtime, text), TREE), want) > 0.99
    other = recomputed(original(name), text_of(60, step=13), TREE)
    assert likeness(run_one(runtime, cache_text(runtime, text), TREE), other) < 0.9


@pytest.mark.parametrize(
    "broken",
    [
        {"frequencies": (0.5, 0.1, 0.01, 0.001)},
        {"windows": (1, 1)},
        {"norm_eps": 3.0},
    ],
)
def test_a_model_that_computes_something_else_is_refused(broken: dict[str, Any]) -> None:
    model = original("llama")
    whole = packed("llama")
    check_packed(whole, lambda ids: model(ids, use_cache=False).logits)
    wrong = replace(whole, architecture=replace(whole.architecture, **broken))
    with pytest.raises(UnsupportedModel, match="--runtime transformers"):
        check_packed(wrong, lambda ids: model(ids, use_cache=False).logits)


def test_hidden_states_feed_the_head() -> None:
    runtime = native()
    sequence = cache_text(runtime, text_of(9))
    output = runtime.forward([Pass(sequence=sequence, tree=TREE, rows=[1, 4])])[0]
    assert output.logits.shape == (2, VOCAB) and output.hidden.shape == (6, 32)
    assert torch.equal(runtime.project(output.hidden)[[1, 4]], output.logits)
    assert not torch.equal(runtime.project(output.hidden)[[1, 3]], output.logits)
    assert runtime.project(output.hidden[:0]).shape == (0, VOCAB)


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_embeddings_are_the_models_but_for_rounding(name: str) -> None:
    ids = torch.tensor([0, 5, VOCAB - 1, 33])
    got = native(name).embed(ids)
    want = original(name).get_input_embeddings().weight.detach()[ids]
    assert float((got - want).abs().max()) < 0.01 * float(want.abs().max())
    with pytest.raises(ValueError, match="vocabulary"):
        native(name).embed(torch.tensor([VOCAB]))


def test_rewinding_keeps_the_common_beginning() -> None:
    runtime = native()
    text = text_of(30)
    sequence = cache_text(runtime, text)
    assert runtime.rewind(sequence, [*text[:17], 1, 2]) == 17
    assert list(runtime.tokens(sequence)) == text[:17]
    cold = native()
    want = run_one(cold, cache_text(cold, text[:17]), TREE)
    assert torch.equal(run_one(runtime, sequence, TREE), want)


def test_memory_grows_by_pages_and_falls_with_the_sequence() -> None:
    sizes = []
    for name in ("llama-mha", "llama", "llama-mqa"):
        runtime = native(name)
        sequence = cache_text(runtime, text_of(5))
        sizes.append(runtime.memory()["cache"])
        cache_text(runtime, text_of(300), sequence)
        assert runtime.memory()["cache"] == 2 * sizes[-1]
        runtime.close(sequence)
        assert runtime.memory()["cache"] == 0
    assert sizes[0] == 2 * sizes[1] == 4 * sizes[2]


def test_what_is_no_tree_of_this_model_is_refused() -> None:
    runtime = native()
    sequence = cache_text(runtime, text_of(LONG - 2))
    with pytest.raises(ValueError, match="past the context"):
        run_one(runtime, sequence, Tree.chain([1, 2, 3]))
    assert runtime.max_depth(sequence) == 1
    run_one(runtime, sequence, Tree.chain([1, 2]))
    with pytest.raises(ValueError, match="vocabulary"):
        run_one(runtime, sequence, Tree.chain([VOCAB]))
    with pytest.raises(ValueError, match="rows"):
        runtime.forward([Pass(sequence=sequence, tree=Tree.chain([1]), rows=[1])])
    wide = Tree(tokens=[1] * 258, parents=[-1] + [0] * 257)
    with pytest.raises(ValueError, match="258 nodes"):
        run_one(runtime, runtime.open(), wide)
    with pytest.raises(ValueError, match="keep without"):
        runtime.keep(runtime.open(), [0])


def test_the_kernels_check_what_they_are_given() -> None:
    """Whatever the Python side lets through, nothing is read out of bounds."""
    inner = native()._native
    cache = inner.open()
    logits, hidden = torch.empty(1, VOCAB).numpy(), torch.empty(2, 32).numpy()

    def forward(tokens: list[int], parents: list[int], rows: list[int]) -> None:
        arrays = (torch.tensor(x, dtype=torch.int32).numpy() for x in (tokens, parents))
        inner.forward([cache], [len(tokens)], *arrays, rows, logits, hidden)

    with pytest.raises(ValueError, match="past the last position"):
        forward([1, 2], [-1, 0], [0])  # no positions were made
    ready = native()
    run_one(ready, ready.open(), TREE)
    inner, cache = ready._native, ready._native.open()
    for tokens, parents, rows in (
        ([1, 2], [-1, 1], [0]),
        ([1, 2], [0, 0], [0]),
        ([1, 2], [-1, -2], [0]),
        ([1, -1], [-1, 0], [0]),
        ([1, 2], [-1, 0], [2]),
        ([1, 2], [-1, 0], [-1]),
        ([1, 2, 3], [-1, 0, 1], [0]),
    ):
        with pytest.raises(ValueError):
            forward(tokens, parents, rows)
    forward([1, 2], [-1, 0], [1])
    for path in ([2], [1, 0], [-1], [0, 0]):
        with pytest.raises(ValueError, match="path"):
            cache.keep(path)
    cache.keep([0, 1])
    with pytest.raises(ValueError, match="cut"):
        cache.truncate(3)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "rope_type"),
        ({"layer_types": ["chunked_attention"] * 2}, "layer_types"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"head_dim": 7}, "head_dim"),
    ],
)
def test_a_configuration_that_it_cannot_follow_is_refused(
    fields: dict[str, Any], named: str
) -> None:
    config = original("llama").config.to_dict()
    Architecture.from_config(config)
    with pytest.raises(UnsupportedModel, match=f"{named}.*--runtime transformers"):
        Architecture.from_config(config | fields)


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "mixtral", "bloom", "falcon-rope"])
def test_other_families_are_refused_by_a_field(family: str) -> None:
    config = build(family).config.to_dict()
    with pytest.raises(UnsupportedModel, match="--runtime transformers"):
        Architecture.from_config(config)


def test_tensors_that_it_has_no_use_for_are_refused() -> None:
    model = build("llama")
    packed_of(model)
    model.model.layers[0].extra = torch.nn.Linear(2, 2)
    with pytest.raises(UnsupportedModel, match=r"layers\.0\.extra"):
        packed_of(model)
    lacking = build("llama")
    del lacking.model.layers[1].mlp.up_proj
    with pytest.raises(UnsupportedModel, match="up_proj"):
        packed_of(lacking)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("tensor", ["norm", "embed_tokens", "layers.1.mlp.down_proj"])
def test_weights_that_are_no_numbers_are_refused(value: float, tensor: str) -> None:
    model = build("llama")
    with torch.no_grad():
        model.get_submodule(f"model.{tensor}").weight.view(-1)[3] = value
    with pytest.raises(InvalidCheckpoint, match=tensor):
        packed_of(model)


def test_settings_out_of_range_are_refused() -> None:
    for how, match in (
        ({"threads": 0}, "threads"),
        ({"kernels": "avx1024"}, "kernels"),
        ({"prefill_chunk": 0}, "prefill_chunk"),
    ):
        with pytest.raises(InvalidRequest, match=match):
            native(**how)


def test_without_its_compiled_part_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_native", None)
    with pytest.raises(UnsupportedModel, match="compiler"):
        native()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_computes_the_same() -> None:
    """The threads of the parent do not exist in the child."""
    runtime = native()
    sequence = cache_text(runtime, text_of(20))
    want = run_one(runtime, sequence, TREE)
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child runs no other thread's code
        child = os.fork()
    if child == 0:
        same = torch.equal(run_one(runtime, sequence, TREE), want)
        os.write(write, b"same" if same else b"other")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 9) == b"same"
    assert torch.equal(run_one(runtime, sequence, TREE), want)


@pytest.mark.parametrize("method", ["lookup", "lookahead", "combined", "draft"])
def test_every_method_writes_what_plain_decoding_writes(method: str) -> None:
    runtime = native()
    chosen = Draft(runtime=native("llama-mqa")) if method == "draft" else METHODS[method]()
    plain = LLM.from_runtime(runtime, method=METHODS["plain"]())
    other = LLM.from_runtime(runtime, method=chosen)
    prompts = [text_of(n, first=n) for n in (1, 7, 40)]
    for how in ({}, {"temperature": 1.0, "seed": 3}):
        want = plain.generate_batch(prompts, max_new_tokens=40, **how)
        got = other.generate_batch(prompts, max_new_tokens=40, **how)
        assert [r.tokens for r in got] == [r.tokens for r in want]
        assert got[0].stats.exactness == "bit-exact"
    assert sum(r.stats.drafted for r in got) > 0


def test_families_here_are_those_of_the_suite() -> None:
    assert NATIVE["mistral"] is FAMILIES["mistral"]
    assert isinstance(native("mistral"), NativeRuntime)


def test_nothing_excuses_a_difference_between_methods() -> None:
    runtime = native()
    assert runtime.exactness == "bit-exact"
    assert tolerance_of(runtime) == 0.0
