"""The Python API: results, streams, threads, choices, and what it refuses."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import Any

import oracle
import pytest
import torch
from scripted import Bushy, Perfect, Scripted
from test_engine import Overflowing
from tiny import TableRuntime, byte_tokenizer, probs_table, random_table, serve, shared
from torch import Tensor

import outpace
from outpace.errors import InvalidRequest, NumericalError
from outpace.llm import LLM, Piece, Result, make_params
from outpace.proposers import METHODS
from outpace.proposers.lookup import Lookup
from outpace.runtimes.transformers import TransformersRuntime
from outpace.text import Tokenizer

VOCAB = 32
TABLE = random_table(VOCAB, seed=3)
NUM = 12


def right(prompt: Sequence[int], num: int = NUM) -> list[int]:
    return oracle.greedy(oracle.lookup(TABLE), prompt, max_new_tokens=num).tokens


def num_open(llm: LLM) -> int:
    runtime = llm.model.runtime
    assert isinstance(runtime, TableRuntime)
    return runtime.num_open


# Results


def test_a_result_holds_what_was_asked_for() -> None:
    prompt = [1, 2]
    llm = serve(TableRuntime(TABLE), Perfect([*prompt, *right(prompt)], k=3))
    result = llm.generate(prompt, max_new_tokens=NUM)
    assert result.tokens == result.choices[0].tokens == right(prompt)
    assert result.finish_reason == "length"
    assert result.text == ""
    assert result.logprobs == []
    assert result.method == result.stats.method == "scripted"
    assert result.exact is result.stats.exact is True
    assert result.stats.completion_tokens == NUM
    assert result.stats.prompt_tokens == 2
    assert result.stats.steps == 3
    assert result.stats.accepted == 9


def test_text_comes_from_the_tokenizer() -> None:
    llm = serve(TableRuntime(TABLE), tokenizer=byte_tokenizer(VOCAB))
    result = llm.generate("12", max_new_tokens=NUM)
    assert result.tokens == right([1, 2])
    assert result.text == "".join(chr(48 + token) for token in right([1, 2]))


def test_a_lossy_rule_says_so() -> None:
    llm = serve(TableRuntime(TABLE))
    assert llm.generate([1], max_new_tokens=2, acceptance="typical", temperature=1.0).exact is False
    assert llm.generate([1], max_new_tokens=2, acceptance="rejection").exact is True


def test_the_seed_is_reported_and_repeats_the_text() -> None:
    llm = serve(TableRuntime(TABLE))
    first = llm.generate([1], max_new_tokens=NUM, temperature=1.0)
    again = llm.generate([1], max_new_tokens=NUM, temperature=1.0, seed=first.seed)
    assert again.tokens == first.tokens
    other = llm.generate([1], max_new_tokens=NUM, temperature=1.0)
    assert other.seed != first.seed
    assert other.tokens != first.tokens


def test_a_batch_gives_each_prompt_its_solo_text() -> None:
    prompts = [[1], [2, 3, 4], list(range(20)), [9] * 5]
    llm = serve(TableRuntime(TABLE), Lookup())
    results = llm.generate_batch(prompts, max_new_tokens=NUM)
    assert [result.tokens for result in results] == [right(prompt) for prompt in prompts]
    sampled: dict[str, Any] = dict(max_new_tokens=NUM, temperature=0.9, seed=5)
    batch = llm.generate_batch(prompts, **sampled)
    assert [r.tokens for r in batch] == [llm.generate(p, **sampled).tokens for p in prompts]
    assert llm.generate_batch([]) == []


def test_no_budget() -> None:
    result = serve(TableRuntime(TABLE)).generate([1], max_new_tokens=0)
    assert (result.tokens, result.finish_reason) == ([], "length")
    assert result.stats.tokens_per_step is None


# Choices


def test_n_choices_are_independent_and_counted_once() -> None:
    llm = serve(TableRuntime(probs_table([[0.25] * 4])), "lookup")
    result = llm.generate([1, 2, 1], n=3, temperature=1.0, seed=7, max_new_tokens=NUM)
    assert [choice.index for choice in result.choices] == [0, 1, 2]
    texts = [choice.tokens for choice in result.choices]
    assert len({tuple(text) for text in texts}) == 3
    assert result.tokens == texts[0]
    assert result.stats.completion_tokens == 3 * NUM == sum(map(len, texts))
    assert result.stats.prompt_tokens == 3
    again = llm.generate([1, 2, 1], n=3, temperature=1.0, seed=7, max_new_tokens=NUM)
    assert [choice.tokens for choice in again.choices] == texts
    for choice in result.choices:  # each has a seed of its own that repeats it alone
        alone = llm.generate([1, 2, 1], temperature=1.0, seed=choice.seed, max_new_tokens=NUM)
        assert alone.tokens == choice.tokens


def test_the_first_choice_is_the_only_one_of_n_1() -> None:
    llm = serve(TableRuntime(TABLE))
    how: dict[str, Any] = dict(temperature=1.0, seed=7, max_new_tokens=NUM)
    assert llm.generate([1], n=3, **how).tokens == llm.generate([1], **how).tokens


def test_greedy_choices_are_equal() -> None:
    result = serve(TableRuntime(TABLE)).generate([1, 2], n=3, max_new_tokens=NUM)
    assert [choice.tokens for choice in result.choices] == [right([1, 2])] * 3


def test_the_stats_of_a_choice_stay_its_own() -> None:
    result = serve(TableRuntime(TABLE), Lookup()).generate([1, 2], n=2, max_new_tokens=NUM)
    assert [choice.stats.completion_tokens for choice in result.choices] == [NUM, NUM]
    first = result.choices[0].stats
    assert result.stats.time_split is not first.time_split
    assert sum(result.stats.accepted_by_depth) == result.stats.accepted
    assert first.accepted == sum(first.accepted_by_depth)


# Streams


def test_a_stream_is_the_result_in_pieces() -> None:
    prompt = [1, 2]
    llm = serve(
        TableRuntime(TABLE),
        Perfect([*prompt, *right(prompt)], k=2),
        tokenizer=byte_tokenizer(VOCAB),
    )
    pieces = list(llm.stream(prompt, max_new_tokens=NUM))
    whole = llm.generate(prompt, max_new_tokens=NUM)
    assert [len(piece.tokens) for piece in pieces] == [3, 3, 3, 3]
    assert [token for piece in pieces for token in piece.tokens] == whole.tokens
    assert "".join(map(str, pieces)) == whole.text
    assert [piece.result is None for piece in pieces] == [True, True, True, False]
    last = pieces[-1].result
    assert isinstance(last, Result)
    assert last.tokens == whole.tokens
    assert pieces[-1].finish_reason == "length"


def test_the_first_piece_comes_before_the_rest_is_computed() -> None:
    llm = serve(TableRuntime(TABLE))
    stream = llm.stream([1], max_new_tokens=NUM)
    first = next(stream)
    assert first.tokens == right([1], 1)
    assert llm.model.runtime.num_forwards == 1  # type: ignore[attr-defined]


def test_a_closed_stream_stops_the_work_and_frees_its_sequence() -> None:
    llm = serve(TableRuntime(TABLE, max_context=5000), Scripted(lambda *_: []))
    runtime, method = llm.model.runtime, llm.method
    assert isinstance(runtime, TableRuntime)
    assert isinstance(method, Scripted)
    for _ in range(50):
        stream = llm.stream([1], max_new_tokens=2000)
        for _ in range(3):
            next(stream)
        forwards = runtime.num_forwards
        stream.close()  # type: ignore[attr-defined]
        assert runtime.num_forwards == forwards
        assert not llm._engine._engine.busy
    assert num_open(llm) == 1, "one idle sequence, however many streams were dropped"
    assert method.num_closed == 50
    assert llm._engine._inbox == {}
    assert llm.generate([1, 2], max_new_tokens=NUM).tokens == right([1, 2])


def test_a_dropped_stream_is_a_closed_one() -> None:
    llm = serve(TableRuntime(TABLE))
    stream = llm.stream([1], max_new_tokens=200)
    next(stream)
    assert llm._engine._engine.busy
    del stream
    assert not llm._engine._engine.busy


def test_closing_one_stream_leaves_the_other_alone() -> None:
    llm = serve(TableRuntime(TABLE))
    first = llm.stream([1], max_new_tokens=200)
    second = llm.stream([2], max_new_tokens=NUM)
    got = [*next(first).tokens, *next(second).tokens]
    first.close()  # type: ignore[attr-defined]
    got = [*got[1:], *(token for piece in second for token in piece.tokens)]
    assert got == right([2])


def test_two_streams_side_by_side() -> None:
    llm = serve(TableRuntime(TABLE))
    prompts = [[1, 2], [3]]
    streams = [llm.stream(prompt, max_new_tokens=NUM) for prompt in prompts]
    texts: list[list[int]] = [[], []]
    # Uneven turns: while one is read, the other's pieces wait for it.
    for turn in (0, 1, 1, 0, 0, 0, 1, 0, 1, 1, 1):
        texts[turn] += next(streams[turn]).tokens
    for turn in (0, 1):
        texts[turn] += [token for piece in streams[turn] for token in piece.tokens]
    assert texts == [right(prompt) for prompt in prompts]
    assert llm._engine._inbox == {}


def test_methods_side_by_side_on_the_same_weights() -> None:
    plain = serve(TableRuntime(TABLE))
    bushy = plain.with_method(Bushy([4, *right([4])], rights=[2], vocab_size=VOCAB))
    lookup = plain.with_method("lookup", num_tokens=3)
    assert plain.model is bushy.model is lookup.model
    streams = [llm.stream([4], max_new_tokens=NUM) for llm in (plain, bushy, lookup)]
    texts: list[list[int]] = [[], [], []]
    results: list[Result | None] = [None] * 3
    pieces: list[Piece | None] = [*map(next, streams)]
    while any(pieces):
        for i, piece in enumerate(pieces):
            if piece is not None:
                texts[i] += piece.tokens
                results[i] = results[i] or piece.result
                pieces[i] = next(streams[i], None)
    assert texts == [right([4])] * 3
    assert [r.method for r in results if r] == ["plain", "scripted", "lookup"]


def test_threads_share_a_model() -> None:
    llm = serve(TransformersRuntime(shared("llama"), exactness="ordinary"), "lookup")
    prompts = [[(7 * i + j) % 64 for j in range(1 + 3 * i)] for i in range(8)]
    how: dict[str, Any] = dict(max_new_tokens=10, temperature=0.7, seed=2)
    want = [llm.generate(prompt, **how).tokens for prompt in prompts]
    start = threading.Barrier(len(prompts))

    def work(prompt: list[int]) -> list[int]:
        start.wait()
        return [token for piece in llm.stream(prompt, **how) for token in piece.tokens]

    before = threading.active_count()
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(work, prompts, timeout=60)) == want
    assert threading.active_count() == before
    assert not llm._engine._engine.busy


def test_close_and_go_on() -> None:
    llm = serve(TableRuntime(TABLE))
    llm.generate([1], max_new_tokens=2)
    llm.close()
    assert num_open(llm) == 0
    assert llm.generate([1], max_new_tokens=2).tokens == right([1], 2)


def test_a_stream_of_a_closed_llm_says_so() -> None:
    llm = serve(TableRuntime(TABLE))
    stream = llm.stream([1], max_new_tokens=5)
    next(stream)
    llm.close()
    with pytest.raises(InvalidRequest, match="closed while the request ran"):
        next(stream)
    assert num_open(llm) == 0
    assert llm.generate([1], max_new_tokens=2).tokens == right([1], 2)


def test_a_stream_that_the_collector_closes_within_a_step_blocks_nothing() -> None:
    llm = serve(TableRuntime(TABLE))
    stream = llm.stream([2], max_new_tokens=5)
    next(stream)
    cycle: list[Any] = [stream]
    cycle.append(cycle)
    left = weakref.ref(stream)
    del stream, cycle

    def collect(_: Sequence[int], logits: Tensor) -> Tensor:
        gc.collect()
        return logits

    done: list[list[int]] = []
    thread = threading.Thread(
        target=lambda: done.append(
            llm.generate([1], max_new_tokens=3, processors=[collect]).tokens
        ),
        daemon=True,
    )
    gc.disable()
    try:
        assert left() is not None, "control: the stream is still there"
        thread.start()
        thread.join(timeout=20)
    finally:
        gc.enable()
    assert done == [right([1], 3)]
    assert left() is None
    assert num_open(llm) <= 1, "only the idle sequence is left"


@pytest.mark.parametrize("beyond", [-1, VOCAB, 10**9])
def test_end_tokens_that_the_model_does_not_have_do_no_harm(beyond: int) -> None:
    [end] = right([1], 1)
    llm = serve(TableRuntime(TABLE), eos_ids=[beyond, end])
    assert llm.generate([1], max_new_tokens=6).tokens == [end]
    masked = llm.generate([1], max_new_tokens=2, min_tokens=2).tokens
    assert len(masked) == 2 and end not in masked, "control: its own is masked"
    alone = serve(TableRuntime(TABLE), eos_ids=[beyond])
    firsts = [alone.generate([t], max_new_tokens=1, min_tokens=1).tokens for t in range(VOCAB)]
    assert firsts == [right([t], 1) for t in range(VOCAB)]
    assert [VOCAB - 1] in firsts, "control: -1 would mask this one"


# Failures


def overflowing() -> tuple[LLM, int]:
    runtime = Overflowing(TABLE)
    runtime.bad = right([2])[1]
    assert all(runtime.bad not in right([first]) for first in (4, 6))
    return serve(runtime), runtime.bad


def test_a_failing_stream_does_not_take_another_ones_tokens() -> None:
    llm, _ = overflowing()
    good, bad = llm.stream([4], max_new_tokens=NUM), llm.stream([2], max_new_tokens=NUM)
    got = list(next(good).tokens)
    with pytest.raises(NumericalError, match="bfloat16 or float32"):
        list(bad)
    got += [token for piece in good for token in piece.tokens]
    assert got == right([4])


def test_a_failure_is_told_to_its_owner_and_to_nobody_else() -> None:
    """Whoever steps the engine: here the other caller does when the numbers overflow."""
    llm, _ = overflowing()
    good, bad = llm.stream([4], max_new_tokens=NUM), llm.stream([2], max_new_tokens=NUM)
    next(good)
    next(bad)
    assert [token for piece in good for token in piece.tokens] == right([4])[1:]
    told: list[BaseException] = []

    def read() -> None:
        try:
            list(bad)
        except NumericalError as error:
            told.append(error)

    reader = threading.Thread(target=read, daemon=True)  # it must not wait for ever
    reader.start()
    reader.join(10)
    assert len(told) == 1
    assert not reader.is_alive()


def test_after_a_failure_the_model_is_as_before() -> None:
    llm, _ = overflowing()
    for _ in range(3):
        with pytest.raises(NumericalError):
            llm.generate([2], max_new_tokens=NUM)
        assert not llm._engine._engine.busy
        assert llm.generate([4], max_new_tokens=NUM).tokens == right([4])
    assert num_open(llm) == 1


def test_a_users_processor_that_fails_fails_its_own_request() -> None:
    def broken(ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        if len(ids) > 3:
            raise KeyError("the user's own mistake")
        return logits

    llm = serve(TableRuntime(TABLE))
    good = llm.stream([4], max_new_tokens=NUM)
    got = list(next(good).tokens)
    with pytest.raises(KeyError, match="own mistake"):
        llm.generate([2], max_new_tokens=NUM, processors=(broken,))
    got += [token for piece in good for token in piece.tokens]
    assert got == right([4])
    assert not llm._engine._engine.busy


def test_a_proposer_that_fails_fails_its_own_request() -> None:
    def overflow(step: Any, number: int) -> list[int]:
        if number == 2:
            raise NumericalError("the draft's logits are nan")
        return []

    plain = serve(TableRuntime(TABLE))
    good = plain.stream([4], max_new_tokens=NUM)
    got = list(next(good).tokens)
    with pytest.raises(NumericalError, match="the draft's"):
        plain.with_method(Scripted(overflow)).generate([2], max_new_tokens=NUM)
    bad = plain.with_method(Scripted(overflow)).stream([2], max_new_tokens=NUM)
    next(bad)
    got += [token for piece in good for token in piece.tokens]
    assert got == right([4])
    with pytest.raises(NumericalError, match="the draft's"):
        list(bad)
    assert not plain._engine._engine.busy


def test_one_bad_prompt_refuses_the_whole_batch_before_any_work() -> None:
    llm = serve(TableRuntime(TABLE, max_context=20))
    for bad in ([], [VOCAB], [1] * 21):
        with pytest.raises(InvalidRequest):
            llm.generate_batch([[1], bad])
        assert not llm._engine._engine.busy
        assert llm._engine._inbox == {}
    assert llm.model.runtime.num_forwards == 0  # type: ignore[attr-defined]


# Parameters


def test_unknown_parameters_are_refused_by_name() -> None:
    llm = serve(TableRuntime(TABLE))
    for call in (llm.generate, lambda *a, **k: list(llm.stream(*a, **k))):
        with pytest.raises(
            InvalidRequest, match=r"unknown parameter 'max_tokens'; there are: acce"
        ):
            call([1], max_tokens=3)
    with pytest.raises(InvalidRequest, match="unknown parameter 'num_beams'"):
        llm.generate([1], num_beams=4, max_new_tokens=3)


def test_parameters_in_the_shapes_that_people_use() -> None:
    params = make_params(None, {"stop": "x", "stop_token_ids": [3], "bad_words": [[1, 2]]})
    assert params.stop == ("x",)
    assert params.stop_token_ids == (3,)
    assert params.bad_words == ((1, 2),)
    assert make_params(None, {"stop": None, "bad_words": None}).stop == ()
    with pytest.raises(InvalidRequest, match="bad_words as text need a tokenizer"):
        make_params(None, {"bad_words": ["x"]})
    assert make_params(None, {}) == outpace.SamplingParams()


WRONG_TYPES = [float("nan"), float("inf"), 10**400, True, 1.5, b"x", [], {}, object()]
TAKES = {  # what of these a field takes; None is every field's own affair
    "ignore_eos": [True],
    "include_stop": [True],
    "logit_bias": [{}],
    "temperature": [1.5],
    "repetition_penalty": [1.5],
    "presence_penalty": [1.5],
    "frequency_penalty": [1.5],
    "typical_alpha": [1.5],
    **{name: [[]] for name in ("stop", "stop_token_ids", "bad_words", "processors")},
    **{name: [10**400] for name in ("max_new_tokens", "top_k", "min_tokens")},
}


@pytest.mark.parametrize("field", fields(outpace.SamplingParams), ids=lambda field: field.name)
def test_a_value_of_a_wrong_type_or_size_is_refused_by_name(field: Any) -> None:
    for value in WRONG_TYPES:
        if any(value is v or value == v != 1 for v in TAKES.get(field.name, [])):
            make_params(None, {field.name: value})
        else:
            with pytest.raises(InvalidRequest, match=field.name):
                make_params(None, {field.name: value})


def test_one_word_is_not_its_letters() -> None:
    tokenizer = Tokenizer(byte_tokenizer(64))
    one = make_params(tokenizer, {"bad_words": "ab"})
    assert one == make_params(tokenizer, {"bad_words": ["ab"]})
    assert one != make_params(tokenizer, {"bad_words": ["a", "b"]})


def test_so_many_choices_are_a_slip() -> None:
    llm = serve(TableRuntime(TABLE))
    assert len(llm.generate([1], n=1024, max_new_tokens=0).choices) == 1024
    with pytest.raises(InvalidRequest, match=r"n must be .* at most 1024"):
        llm.generate([1], n=10**9)


@pytest.mark.parametrize("prompts", ["text", b"text", 5, None, iter([[1]])])
def test_a_batch_is_a_list_of_prompts(prompts: Any) -> None:
    llm = serve(TableRuntime(TABLE), tokenizer=byte_tokenizer(VOCAB))
    with pytest.raises(InvalidRequest, match="list of prompts"):
        llm.generate_batch(prompts, max_new_tokens=1)
    assert len(llm.generate_batch(("0", [1]), max_new_tokens=1)) == 2


def test_text_needs_a_tokenizer() -> None:
    llm = serve(TableRuntime(TABLE))
    for prompt in ("text", [{"role": "user", "content": "text"}], b"text", 5, None, [True]):
        with pytest.raises(InvalidRequest, match="needs a tokenizer"):
            llm.generate(prompt)
    with pytest.raises(InvalidRequest, match="stop strings need a tokenizer"):
        llm.generate([1], stop=["x"])


def test_methods_are_checked() -> None:
    llm = serve(TableRuntime(TABLE))
    with pytest.raises(InvalidRequest, match=f"method must be one of {', '.join(METHODS)}"):
        llm.with_method("guess")
    with pytest.raises(InvalidRequest, match="lookup has no option 'heads'; it has: max_ngram"):
        llm.with_method("lookup", heads=3)
    with pytest.raises(InvalidRequest, match="go with a method's name only"):
        llm.with_method(Lookup(), max_ngram=3)
    for method in (5, None, [], Lookup):
        with pytest.raises(InvalidRequest, match="method must be one of"):
            llm.with_method(method)  # type: ignore[arg-type]


def test_info_says_what_is_loaded() -> None:
    llm = serve(TransformersRuntime(shared("llama"), exactness="ordinary"), "lookup")
    info = llm.info()
    assert info["method"] == "lookup"
    assert info["vocabulary"] == 64
    assert info["context"] == 256
    assert info["dtype"] == "float32"
    assert info["device"] == "cpu"
    assert info["exactness"] == "ordinary"
    assert info["class"] == "LlamaForCausalLM"
    assert info["memory"]["method"] == 0
    assert info["memory"]["weights"] > 0


# Loading


def test_load_takes_a_model_and_its_tokenizer() -> None:
    llm = outpace.load(shared("llama"), tokenizer=byte_tokenizer(64), method="lookup", min_ngram=2)
    assert isinstance(llm.method, Lookup)
    assert llm.method.min_ngram == 2
    result = llm.generate("0123", max_new_tokens=8)
    right = oracle.greedy(oracle.recompute(shared("llama")), [0, 1, 2, 3], max_new_tokens=8)
    oracle.assert_same(result.tokens, right)
    assert len(result.text) == 8
    with pytest.raises(InvalidRequest, match="go with a method's name only"):
        outpace.load(shared("llama"), method=Lookup(), min_ngram=2)
    with pytest.raises(InvalidRequest, match="method must be one of"):
        outpace.load(shared("llama"), method=5)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"tokenizer must be a loaded one .* not 'gpt2'"):
        outpace.load(shared("llama"), tokenizer="gpt2")


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [([1], {"temprature": 1}, "unknown parameter"), ([], {}, "empty"), ([99], {}, "outside")],
)
def test_a_bad_stream_is_refused_at_the_call(
    prompt: list[int], sampling: dict[str, Any], message: str
) -> None:
    llm = serve(TableRuntime(TABLE))
    with pytest.raises(InvalidRequest, match=message):
        llm.stream(prompt, **sampling)
    assert len(list(llm.stream([1], max_new_tokens=3))) == 3, "control: a good one starts"
