from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from outpace.errors import InvalidRequest
from outpace.sampling import (
    ACCEPT_STREAM,
    DRAFT_STREAM,
    TOKEN_STREAM,
    Sampler,
    SamplingParams,
    gumbel,
    probabilities,
    uniforms,
)

NAN, INF = math.nan, math.inf


# Noise


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(1, 200), st.integers(1, 200))
def test_gumbel_of_a_short_row_is_a_prefix_of_a_long_one(
    seed: int, position: int, short: int, more: int
) -> None:
    long = gumbel(seed, position, short + more)
    assert long.dtype == torch.float32 and long.shape == (short + more,)
    assert torch.equal(gumbel(seed, position, short), long[:short])


def check_gumbel(noise: Tensor) -> None:
    assert bool(torch.isfinite(noise).all())
    assert stats.kstest(noise.double().numpy(), stats.gumbel_r.cdf).pvalue > oracle.RAREST


@pytest.mark.parametrize("stream", [TOKEN_STREAM, ACCEPT_STREAM, DRAFT_STREAM])
def test_gumbel_is_gumbel_along_the_vocabulary_and_along_positions(stream: int) -> None:
    check_gumbel(gumbel(3, 5, 50_000, stream=stream))
    check_gumbel(torch.stack([gumbel(3, p, 1, stream=stream)[0] for p in range(3000)]))
    check_gumbel(torch.stack([gumbel(s, 7, 1, stream=stream)[0] for s in range(3000)]))


def test_gumbel_is_finite_where_the_random_word_is_near_its_end() -> None:
    # The word of this token rounds to 2**32 in fp32; one word in 2**25 does.
    assert math.isfinite(gumbel(0, 197, 11_215)[11_214])


def test_control_another_distribution_is_caught() -> None:
    with pytest.raises(AssertionError):
        check_gumbel(torch.randn(3000, generator=torch.Generator().manual_seed(0)))


def check_independent(x: Tensor, y: Tensor) -> None:
    assert stats.spearmanr(x.numpy(), y.numpy()).pvalue > oracle.RAREST


NEIGHBOURS: dict[str, Callable[[int], Tensor]] = {
    "the next position": lambda n: gumbel(11, 6, n),
    "the next seed": lambda n: gumbel(12, 5, n),
    "a seed with other high bits": lambda n: gumbel(11 + 2**32, 5, n),
    "seed and position swapped": lambda n: gumbel(5, 11, n),
    "the accept stream": lambda n: gumbel(11, 5, n, stream=ACCEPT_STREAM),
    "the draft stream": lambda n: gumbel(11, 5, n, stream=DRAFT_STREAM),
    "the next token": lambda n: gumbel(11, 5, n + 1)[1:],
    "the next but one token": lambda n: gumbel(11, 5, n + 2)[2:],
}


@pytest.mark.parametrize("other", NEIGHBOURS.values(), ids=NEIGHBOURS)
def test_gumbel_is_independent_of(other: Callable[[int], Tensor]) -> None:
    check_independent(gumbel(11, 5, 20_000), other(20_000))


def test_control_dependence_is_caught() -> None:
    noise = gumbel(11, 5, 20_000)
    with pytest.raises(AssertionError):
        check_independent(noise, noise + gumbel(11, 6, 20_000) * 10)


def test_uniforms_are_uniform_independent_and_keyed() -> None:
    numbers = [uniforms(1, p, 3, stream=ACCEPT_STREAM) for p in range(5000)]
    columns = np.array(numbers).T
    for column in columns:
        assert 0.0 <= column.min() and column.max() < 1.0
        assert stats.kstest(column, "uniform").pvalue > oracle.RAREST
    assert stats.spearmanr(columns[0], columns[1]).pvalue > oracle.RAREST
    assert numbers[7] == uniforms(1, 7, 3, stream=ACCEPT_STREAM)
    assert numbers[7] != uniforms(1, 7, 3, stream=DRAFT_STREAM)


def test_noise_is_keyed_by_the_request_and_absent_when_greedy() -> None:
    sampler = Sampler(SamplingParams(temperature=1.0), prompt=[1], seed=4, vocab_size=9)
    assert torch.equal(sampler.noise(3), gumbel(4, 3, 9))
    assert torch.equal(sampler.noise(3, stream=DRAFT_STREAM), gumbel(4, 3, 9, stream=DRAFT_STREAM))
    assert Sampler(SamplingParams(), prompt=[1], seed=4, vocab_size=9).noise(3) is None


# Processing


def processed(
    logits: Any,
    params: SamplingParams,
    *,
    prompt: list[int],
    output: list[int],
    path: list[int],
    end_ids: tuple[int, ...] = (),
) -> Tensor:
    logits = torch.as_tensor(logits)
    sampler = Sampler(params, prompt=prompt, seed=0, vocab_size=logits.numel(), end_ids=end_ids)
    sampler.commit(output)
    return sampler.process(logits, path)


def check_processing(
    logits: Tensor,
    fields: dict[str, Any],
    *,
    prompt: list[int],
    output: list[int],
    path: list[int],
    end_ids: tuple[int, ...],
    use: dict[str, Any] | None = None,
) -> None:
    """`process` gives the oracle's distribution; tokens on a border may fall either way.

    `use` are other parameters for the project's side: the control.
    """
    before = logits.clone()
    params = SamplingParams(**(fields if use is None else use))
    got = processed(logits, params, prompt=prompt, output=output, path=path, end_ids=end_ids)
    assert torch.equal(logits, before), "the model's logits were changed"
    assert got.dtype == torch.float32
    args = dict(num_prompt=len(prompt), end_ids=end_ids)
    ids = prompt + output + path
    row = logits.double().numpy()
    fields = {k: v for k, v in fields.items() if k != "max_new_tokens"}
    right = oracle.process(row, ids, **args, **fields)
    if params.greedy:
        banned = np.isneginf(right)
        assert np.array_equal(np.isneginf(got.numpy()), banned)
        assert np.allclose(got.numpy()[~banned], right[~banned], atol=1e-4)
        return
    p, q = oracle.softmax(right), torch.softmax(got.double(), dim=-1).numpy()
    differ = (p > 0) != (q > 0)
    if differ.any():  # only by rounding at a border: a slightly other border agrees
        agree = []
        for shift in (-1e-5, 1e-5):
            near = dict(fields)
            for name in ("top_p", "min_p"):
                if near.get(name, 1.0) not in (0.0, 1.0):
                    near[name] = min(max(near[name] + shift, 1e-9), 1.0)
            near_p = oracle.softmax(oracle.process(row, ids, **args, **near))
            agree.append(np.allclose(near_p, q, atol=1e-4))
        assert any(agree), f"{q} is not {p}"
    else:
        assert np.allclose(p, q, atol=1e-4), f"{q} is not {p}"


VOCAB = 8
IDS = st.lists(st.integers(0, VOCAB - 1), max_size=6)


@st.composite
def fields(draw: st.DrawFn) -> dict[str, Any]:
    off_or = lambda off, values: st.one_of(st.just(off), values)  # noqa: E731
    penalty = off_or(0.0, st.floats(-2.0, 2.0))
    return {
        "temperature": draw(off_or(0.0, st.floats(0.05, 5.0))),
        "top_k": draw(st.integers(0, VOCAB + 2)),
        "top_p": draw(off_or(1.0, st.floats(0.01, 1.0))),
        "min_p": draw(off_or(0.0, st.floats(0.0, 1.0))),
        "repetition_penalty": draw(off_or(1.0, st.floats(0.5, 2.0))),
        "presence_penalty": draw(penalty),
        "frequency_penalty": draw(penalty),
        "logit_bias": draw(
            st.dictionaries(st.integers(0, VOCAB - 2), st.floats(-120.0, 100.0), max_size=3)
        ),
        "bad_words": tuple(
            draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, VOCAB - 2)), max_size=3))
        ),
        "min_tokens": draw(st.integers(0, 8)),
    }


@given(
    st.lists(st.integers(-16, 16), min_size=VOCAB, max_size=VOCAB),
    fields(),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6),
    IDS,
    IDS,
    st.sampled_from([(), (0,), (1, 2)]),
)
def test_process_is_the_oracles(
    logits: list[int],
    fields: dict[str, Any],
    prompt: list[int],
    output: list[int],
    path: list[int],
    end_ids: tuple[int, ...],
) -> None:
    check_processing(
        torch.tensor(logits) / 8.0,
        fields,
        prompt=prompt,
        output=output,
        path=path,
        end_ids=end_ids,
    )


def border_row(n: int, seed: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("n", [5, 511, 512, 513, 3000])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 0.999, 1.0 - 1e-7])
def test_nucleus_of_long_rows(n: int, top_p: float) -> None:
    for scale in (0.01, 1.0):  # the nucleus is wider, or narrower, than the first 512 tokens
        fields = {"temperature": 1.0, "top_p": top_p}
        check_processing(
            border_row(n, 1) * scale, fields, prompt=[0], output=[], path=[], end_ids=()
        )


LOGITS = torch.tensor([1.0, 0.5, -0.5, 2.0, 0.0, -1.0, 1.5, 0.25])
CASE: dict[str, Any] = dict(prompt=[3, 1], output=[1, 0, 1], path=[6, 1], end_ids=(3,))
EFFECTS: dict[str, Any] = {
    "temperature": 0.5,
    "top_k": 2,
    "top_p": 0.6,
    "min_p": 0.4,
    "repetition_penalty": 1.3,
    "presence_penalty": 1.0,
    "frequency_penalty": -0.5,
    "logit_bias": {4: 2.0},
    "bad_words": ((6, 1, 3),),
    "min_tokens": 6,
}


@pytest.mark.parametrize("name", EFFECTS)
def test_control_a_parameter_that_is_ignored_is_caught(name: str) -> None:
    base = {"temperature": 1.0}
    check_processing(LOGITS, base | {name: EFFECTS[name]}, **CASE)
    with pytest.raises(AssertionError):
        check_processing(LOGITS, base | {name: EFFECTS[name]}, **CASE, use=base)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition_penalty", 1.3),
        ("presence_penalty", 1.0),
        ("frequency_penalty", -0.5),
        ("min_tokens", 4),
    ],
)
def test_control_a_path_that_is_ignored_is_caught(name: str, value: float) -> None:
    params = SamplingParams(**{name: value})
    here = processed(LOGITS, params, **CASE)
    assert not torch.equal(here, processed(LOGITS, params, **CASE | {"path": []}))


def test_ties_at_a_border_are_all_kept() -> None:
    row = torch.tensor([1.0, 1.0, 1.0, 0.0])
    args: dict[str, Any] = dict(prompt=[0], output=[], path=[])
    for field in ({"top_k": 1}, {"top_p": 0.1}, {"min_p": 1.0}):
        kept = processed(row, SamplingParams(temperature=1.0, **field), **args)
        assert torch.isfinite(kept).tolist() == [True, True, True, False]


def test_top_p_renormalises_what_top_k_left() -> None:
    row = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    params = SamplingParams(temperature=1.0, top_k=2, top_p=0.55)
    kept = processed(row, params, prompt=[0], output=[], path=[])
    assert torch.isfinite(kept).tolist() == [True, False, False, False]  # 4/7 > 0.55


def test_half_precision_rows_are_processed_in_fp32() -> None:
    row = torch.randn(150_000, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    params = SamplingParams(temperature=0.7)
    x = processed(row, params, prompt=[0], output=[], path=[])
    assert x.dtype == torch.float32
    assert abs(float(probabilities(x).sum()) - 1.0) < 1e-6
    right = oracle.softmax(row.double().numpy() / 0.7)
    assert np.allclose(torch.softmax(x, dim=-1).numpy(), right, rtol=1e-4, atol=0)


def test_bad_words_of_all_lengths_and_over_the_border_of_prompt_and_path() -> None:
    row = torch.zeros(6)

    def banned(words: tuple[tuple[int, ...], ...], prompt: list[int], path: list[int]) -> list[int]:
        x = processed(row, SamplingParams(bad_words=words), prompt=prompt, output=[], path=path)
        return torch.isneginf(x).nonzero().ravel().tolist()

    assert banned(((4,),), [1], []) == [4]
    assert banned(((1, 2),), [1], []) == [2]
    assert banned(((1, 2),), [1], [3]) == []
    assert banned(((1, 2, 3), (2, 5)), [1], [2]) == [3, 5]
    assert banned(((0, 1, 2, 3),), [1], [2]) == []  # longer than the text
    assert banned(((1, 1, 1, 4),), [1, 1], [1]) == [4]


def test_processors_come_after_penalties_and_before_temperature() -> None:
    seen = []

    def swap(ids: Any, x: Tensor) -> Tensor:
        seen.append((list(ids), x.clone()))
        return x.flip(0)

    params = SamplingParams(temperature=0.5, top_k=1, logit_bias={0: 5.0}, processors=(swap,))
    x = processed([0.0, 1.0, 2.0], params, prompt=[1], output=[2], path=[0])
    assert seen[0][0] == [1, 2, 0] and seen[0][1].tolist() == [5.0, 1.0, 2.0]
    assert torch.isfinite(x).tolist() == [False, False, True]


NEEDS_A_ROW: dict[str, dict[str, Any]] = {
    name: {name: EFFECTS[name]}
    for name in EFFECTS
    if name not in ("temperature", "top_k", "top_p", "min_p")
} | {"processors": {"processors": (lambda _, x: x,)}}


def test_plain_argmax_only_where_nothing_can_move_the_argmax() -> None:
    def plain(**fields: Any) -> bool:
        params = SamplingParams(**fields)
        return Sampler(params, prompt=[1], seed=0, vocab_size=8, end_ids=(3,)).plain_argmax

    assert plain() and plain(top_k=2, top_p=0.6, min_p=0.4)
    assert not plain(temperature=1.0)
    for fields in NEEDS_A_ROW.values():
        assert not plain(**fields), fields


# Parameters (fault 40: nothing invalid is swallowed)

WRONG: dict[str, list[Any]] = {
    "max_new_tokens": [-1, 1.5, "8", True],
    "temperature": [-0.1, -1e-9, NAN, INF, "1", None, True],
    "top_k": [-1, -5, 1.0, None, True],
    "top_p": [0, 0.0, -0.1, 1.5, NAN, None],
    "min_p": [-0.1, 1.1, NAN, None],
    "repetition_penalty": [0, 0.0, -1, NAN, INF, None],
    "presence_penalty": [-2.1, 2.1, NAN, None],
    "frequency_penalty": [-2.1, 2.1, NAN, None],
    "logit_bias": [{-1: 1.0}, {0: NAN}, {0: INF}, {"0": 1.0}, {0: "1"}, None],
    "bad_words": [((),), ((1,), ()), (1, 2), ("ab",), None],
    "min_tokens": [-1, 1.5, None],
    "seed": [-1, 2**64, 1.5, "1"],
    "n": [0, -1, 1.5, None],
    "stop": [("",), (1,), ("a", ""), "ab", None],  # a bare string would be stops of one letter
    "stop_token_ids": [(1.5,), ("1",), None],
    "ignore_eos": ["no", None],
    "include_stop": ["no", None],
    "logprobs": [-1, 101, 1.5],
    "acceptance": ["", "beam", "Coupled", None],
    "typical_threshold": [-0.1, 1.1, NAN],
    "typical_alpha": [-0.1, NAN, INF],
    "processors": [(3,), None],
}
EDGES: dict[str, list[Any]] = {
    "max_new_tokens": [None, 0, 1],
    "temperature": [0, 0.0, 1e-9, 1, 100.0],
    "top_k": [0, 1, 10**6],
    "top_p": [1, 1.0, 1e-9],
    "min_p": [0, 1, 1.0],
    "repetition_penalty": [1e-3, 1, 2],
    "presence_penalty": [-2, 2, 0],
    "frequency_penalty": [-2, 2, 0],
    "logit_bias": [{}, {0: -100}, {0: 100.0}, {0: -1e9}],
    "bad_words": [(), ((1,), (1, 2))],
    "seed": [None, 0, 2**64 - 1],
    "n": [1, 8],
    "logprobs": [None, 0, 100],
    "acceptance": ["coupled", "rejection", "typical"],
    "typical_threshold": [0, 1],
    "typical_alpha": [0, 10],
}


def test_40_every_field_has_its_wrong_values() -> None:
    assert set(WRONG) == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_40_a_wrong_value_is_an_error_that_names_the_field(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=name) as error:
        SamplingParams(**{name: value})
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in EDGES.items() for value in values]
)
def test_40_an_allowed_edge_is_accepted(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("repetition_penalty", 0, "more than 0"),
        ("repetition_penalty", -1, "more than 0"),
        ("top_p", 0, "more than 0 and at most 1"),
        ("top_p", 1.5, "more than 0 and at most 1"),
        ("top_k", -5, "a whole number of at least 0"),
        ("temperature", NAN, "at least 0"),
        ("frequency_penalty", 3, "at least -2 and at most 2"),
        ("acceptance", "beam", "coupled, rejection, typical"),
    ],
)
def test_40_the_message_gives_the_range(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(InvalidRequest, match=allowed):
        SamplingParams(**{name: value})


def test_40_unknown_settings_are_errors() -> None:
    with pytest.raises(TypeError):
        SamplingParams(num_beams=4)  # type: ignore[call-arg]


def test_40_min_tokens_beyond_the_budget_is_an_error() -> None:
    with pytest.raises(InvalidRequest, match=r"min_tokens 5 .*max_new_tokens 4"):
        SamplingParams(min_tokens=5, max_new_tokens=4)


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {8: 1.0}},
        {"stop_token_ids": (8,)},
        {"stop_token_ids": (-1,)},
        {"bad_words": ((1, 8),)},
        {"bad_words": ((-1,),)},
    ],
)
def test_40_ids_outside_the_vocabulary_are_errors(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    with pytest.raises(InvalidRequest, match=f"{next(iter(fields))} .*at most 7"):
        params.check_vocabulary(8)


def test_40_the_last_id_of_the_vocabulary_is_allowed() -> None:
    SamplingParams(logit_bias={7: 1.0}, stop_token_ids=(7,), bad_words=((0, 7),)).check_vocabulary(
        8
    )


def test_05_greedy_begins_where_a_temperature_differs_by_rounding_only() -> None:
    assert SamplingParams().greedy and SamplingParams(temperature=1e-6).greedy
    assert not SamplingParams(temperature=1e-4).greedy


def test_07_only_the_typical_rule_is_lossy() -> None:
    assert SamplingParams().exact and SamplingParams(acceptance="rejection").exact
    assert not SamplingParams(acceptance="typical").exact
