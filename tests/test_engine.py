"""The loop: who runs when, what ends a request, and what one request does to the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import oracle
import pytest
import torch
from scripted import Bushy, HalfRight, Perfect, Script, Scripted
from tiny import TableRuntime, random_table, shared

from outpace.engine import Engine, Event, Request
from outpace.errors import InvalidRequest, NumericalError
from outpace.proposers.base import Method, Proposer
from outpace.proposers.plain import Plain
from outpace.runtimes.transformers import TransformersRuntime
from outpace.sampling import SamplingParams
from outpace.tree import Tree

VOCAB = 32
TABLE = random_table(VOCAB, seed=3)
NUM = 12


def right(prompt: Sequence[int], num: int = NUM, **how: Any) -> list[int]:
    return oracle.greedy(oracle.lookup(TABLE), prompt, max_new_tokens=num, **how).tokens


def request(
    number: int, prompt: Sequence[int], method: Method | None = None, **params: Any
) -> Request:
    params = {"max_new_tokens": NUM} | params
    return Request(
        id=number,
        prompt=list(prompt),
        params=SamplingParams(**params),
        seed=1,
        method=method or Plain(),
    )


def drain(engine: Engine) -> list[Event]:
    """Steps until nothing is left."""
    events = []
    for _ in range(1000):
        if not engine.busy:
            return events
        events += engine.step()
    raise AssertionError("the engine does not come to an end")


def tokens_of(events: Sequence[Event]) -> dict[int, list[int]]:
    """Ids a request; checks that it ends once, and last."""
    texts: dict[int, list[int]] = {}
    ended: set[int] = set()
    for event in events:
        assert event.request not in ended, "an event after the end"
        texts.setdefault(event.request, []).extend(event.tokens)
        if event.finish_reason is not None:
            ended.add(event.request)
    return texts


PROMPTS = [[1], [2, 3, 4], list(range(20)), [9, 8], [5] * 9, [30, 1, 30]]


def some_method(prompt: Sequence[int]) -> Method:
    """A method of its own for each prompt."""
    text = [*prompt, *right(prompt)]
    choices: list[Callable[[], Method]] = [
        Plain,
        lambda: Perfect(text, k=3),
        lambda: HalfRight(text, rights=[0, 2, 1], vocab_size=VOCAB, k=3),
        lambda: Bushy(text, rights=[2, 1], vocab_size=VOCAB),
    ]
    return choices[sum(prompt) % 4]()


# Schedule


@pytest.mark.parametrize("max_batch", [1, 2, 8])
@pytest.mark.parametrize("gap", [0, 1, 3])
def test_requests_join_and_leave_and_each_has_its_own_text(max_batch: int, gap: int) -> None:
    runtime = TableRuntime(TABLE)
    engine = Engine(runtime, max_batch=max_batch)
    events: list[Event] = []
    for number, prompt in enumerate(PROMPTS):
        engine.add(request(number, prompt, some_method(prompt), max_new_tokens=3 + number))
        for _ in range(gap):
            events += engine.step()
            assert runtime.num_open <= max_batch + 1
    events += drain(engine)
    texts = tokens_of(events)
    assert texts == {n: right(prompt, 3 + n) for n, prompt in enumerate(PROMPTS)}
    assert runtime.num_open <= 1, "one idle sequence is kept"


def test_first_come_first_served() -> None:
    engine = Engine(TableRuntime(TABLE), max_batch=2)
    for number in range(4):
        engine.add(request(number, [number + 1], max_new_tokens=2 if number else 5))
    seen = [sorted({event.request for event in engine.step()}) for _ in range(5)]
    assert seen == [[0, 1], [0, 1], [0, 2], [0, 2], [0, 3]]


def test_decoding_sequences_share_a_forward() -> None:
    runtime = TableRuntime(TABLE)
    engine = Engine(runtime)
    for number in range(5):
        engine.add(request(number, [number]))
    drain(engine)
    assert runtime.num_forwards == NUM


def test_one_piece_of_prefill_between_two_decode_steps() -> None:
    runtime = TableRuntime(TABLE)  # pieces of 8
    engine = Engine(runtime)
    engine.add(request(0, [1]))
    engine.step()
    engine.add(request(1, range(27)))
    engine.add(request(2, range(10)))
    runtime.passes.clear()
    sizes = []
    for _ in range(7):
        events = engine.step()
        assert 0 in {event.request for event in events}, "a long prompt holds nobody up"
        sizes.append([len(work.tree) for work in runtime.passes if not work.rows])
        runtime.passes.clear()
    # 26 tokens of the first prompt, then 9 of the second; the last ones are roots.
    assert sizes == [[8], [8], [8], [2], [8], [1], []]
    texts = tokens_of(drain(engine))
    assert texts[1][-1] == right(range(27))[-1]
    assert texts[2][-1] == right(range(10))[-1]


def test_proposers_see_the_prompt_and_every_outcome() -> None:
    prompt = list(range(12))
    text = [*prompt, *right(prompt)]
    method = HalfRight(text, rights=[1, 0, 2], vocab_size=VOCAB, k=2)
    engine = Engine(TableRuntime(TABLE))
    engine.add(request(0, prompt, method))
    drain(engine)
    seen: list[int] = []
    for outcome in method.outcomes:
        seen += [outcome.tree.tokens[node] for node in outcome.path]
        assert len(outcome.tokens) == (len(outcome.path) if outcome.tokens else 0)
    assert seen == text[: len(seen)]
    assert len(seen) > len(prompt) + 4
    assert method.num_closed == 1


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_proposers_are_told_what_fits(limit: int) -> None:
    prompt = [1, 2]
    method = Perfect([*prompt, *right(prompt, 60)], k=9)
    runtime = TableRuntime(TABLE, max_context=20, max_nodes=limit)
    engine = Engine(runtime, max_nodes=4)
    engine.add(request(0, prompt, method, max_new_tokens=None))
    assert tokens_of(drain(engine)) == {0: right(prompt, 18)}
    for depth, nodes in method.steps:
        assert nodes == min(limit, 4)
        assert 0 <= depth < 18
    assert method.steps[0][0] == 17
    assert method.steps[-1][0] < 4, "the room gets smaller"


@pytest.mark.parametrize(
    "tree",
    [
        Tree.chain([9, 1]),
        Tree.chain([2, *range(12)]),
        Tree(tokens=[2, *range(13)], parents=[-1, *range(13)], num_candidates=14),
    ],
    ids=["another root", "deeper than the budget", "deeper still"],
)
def test_a_proposal_that_does_not_fit_is_a_bug_of_the_method(tree: Tree) -> None:
    engine = Engine(TableRuntime(TABLE))
    engine.add(request(0, [1, 2], Script(tree)))
    last = drain(engine)[-1]
    assert last.finish_reason == "error"
    assert "scripted proposed a tree that does not fit" in str(last.error)


# Ends


@pytest.mark.parametrize("index", range(4))
def test_an_end_token_ends_it(index: int) -> None:
    prompt = [1, 2]
    text = right(prompt)
    end = text[index]
    want = text[: text.index(end) + 1]
    for method in (Plain(), Perfect([*prompt, *text], k=6)):
        engine = Engine(TableRuntime(TABLE), end_ids=[end])
        engine.add(request(0, prompt, method))
        events = drain(engine)
        assert tokens_of(events) == {0: want}
        assert events[-1].finish_reason == "stop"
        assert events[-1].stats.completion_tokens == len(want)


def test_no_budget_no_work() -> None:
    runtime = TableRuntime(TABLE)
    method = Scripted(lambda *_: [])
    engine = Engine(runtime)
    engine.add(request(0, [1, 2], method, max_new_tokens=0))
    engine.add(request(1, [3, 4]))
    events = engine.step()
    assert next((e.request, e.tokens, e.finish_reason) for e in events) == (0, [], "length")
    assert events[0].stats.completion_tokens == 0
    assert all(work.tree.tokens[0] in (3, 4) for work in runtime.passes), "it computed something"
    assert (method.num_closed, method.trees) == (0, []), "its proposer was started"
    assert tokens_of(drain(engine))[1][-1] == right([3, 4])[-1]


def test_a_request_without_budget_leaves_the_idle_cache_alone() -> None:
    runtime = TableRuntime(TABLE)
    engine = Engine(runtime)
    engine.add(request(0, [1, 2, 3, 4]))
    drain(engine)
    engine.add(request(1, [9, 8], max_new_tokens=0))
    drain(engine)
    engine.add(request(2, [1, 2, 3, 4]))
    assert drain(engine)[-1].stats.reused_tokens == 3


class Unstartable(Plain):
    """A method whose weights are gone, say."""

    def start(self) -> Proposer:
        raise RuntimeError("cannot start")


def test_a_method_that_cannot_start_ends_its_own_request_only() -> None:
    runtime = TableRuntime(TABLE)
    engine = Engine(runtime)
    engine.add(request(0, [1, 2], Unstartable()))
    engine.add(request(1, [3, 4]))
    events = drain(engine)
    assert [str(e.error) for e in events if e.request == 0] == ["cannot start"]
    assert events[0].finish_reason == "error"
    assert tokens_of(events)[1] == right([3, 4])
    assert runtime.num_open == 1, "the failed request holds a sequence"


@pytest.mark.parametrize("size", [19, 20])
def test_the_contexts_end(size: int) -> None:
    prompt = [(3 * i) % VOCAB for i in range(size)]
    engine = Engine(TableRuntime(TABLE, max_context=20))
    engine.add(request(0, prompt, max_new_tokens=None))
    events = drain(engine)
    assert tokens_of(events) == {0: right(prompt, 20 - size)}
    assert events[-1].finish_reason == "length"


def test_what_can_never_run_is_refused_when_it_is_added() -> None:
    runtime = TableRuntime(TABLE, max_context=20)
    engine = Engine(runtime)
    with pytest.raises(InvalidRequest, match="the prompt is empty"):
        engine.add(request(0, []))
    with pytest.raises(InvalidRequest, match="21 tokens, the model's context is 20"):
        engine.add(request(0, [1] * 21))
    for bad in (-1, VOCAB):
        with pytest.raises(
            InvalidRequest, match=f"prompt id {bad} is outside the vocabulary of 32"
        ):
            engine.add(request(0, [1, bad]))
    with pytest.raises(InvalidRequest, match="logit_bias"):
        engine.add(request(0, [1], logit_bias={VOCAB: 1.0}))
    with pytest.raises(InvalidRequest, match="stop strings need a tokenizer"):
        engine.add(request(0, [1], stop=("x",)))
    assert not engine.busy
    assert runtime.num_forwards == runtime.num_open == 0


# Cancelling


def test_a_cancelled_request_costs_nothing_more() -> None:
    runtime = TableRuntime(TABLE)
    engine = Engine(runtime, max_batch=2)
    methods = [Scripted(lambda *_: []) for _ in range(3)]
    for number in range(3):
        engine.add(request(number, [number + 1, 7], methods[number]))
    engine.step()
    runtime.passes.clear()
    engine.cancel(0)  # runs
    engine.cancel(99)
    assert methods[0].num_closed == 1
    events = engine.step()
    assert {event.request for event in events} <= {1, 2}
    engine.cancel(1)
    engine.cancel(2)
    assert not engine.busy
    assert engine.step() == []
    assert runtime.num_open <= 1
    assert [method.num_closed for method in methods] == [1, 1, 1]


def test_a_cancelled_request_may_still_wait() -> None:
    runtime = TableRuntime(TABLE)
    engine = Engine(runtime, max_batch=1)
    engine.add(request(0, [1]))
    engine.add(request(1, [2]))
    engine.step()
    engine.cancel(1)
    assert tokens_of(drain(engine)).keys() == {0}


def test_close_drops_all() -> None:
    runtime = TableRuntime(TABLE)
    engine = Engine(runtime, max_batch=1)
    method = Scripted(lambda *_: [])
    engine.add(request(0, [1], method))
    engine.add(request(1, [2]))
    engine.step()
    engine.close()
    assert not engine.busy
    assert runtime.num_open == 0
    assert method.num_closed == 1
    engine.add(request(2, [1]))
    assert tokens_of(drain(engine)) == {2: right([1])}, "it may go on"


# Reuse


def test_a_prompt_that_goes_on_reuses_what_is_cached() -> None:
    runtime = TableRuntime(TABLE)
    engine = Engine(runtime)
    prompt = list(range(20))
    engine.add(request(0, prompt))
    first = drain(engine)
    assert first[-1].stats.reused_tokens == 0
    longer = [*prompt, *right(prompt), 5, 6]
    runtime.passes.clear()
    engine.add(request(1, longer))
    second = drain(engine)
    # The last emitted token was never cached.
    assert second[-1].stats.reused_tokens == len(prompt) + NUM - 1
    assert sum(len(work.tree) for work in runtime.passes if not work.rows) == 2
    assert tokens_of(second) == {1: right(longer)}
    assert runtime.num_open == 1


def test_the_same_prompt_again_computes_its_last_token_only() -> None:
    runtime = TableRuntime(TABLE)
    engine = Engine(runtime)
    for number, reused in ((0, 0), (1, 8)):
        engine.add(request(number, range(9)))
        events = drain(engine)
        assert events[-1].stats.reused_tokens == reused
        assert tokens_of(events) == {number: right(range(9))}


def test_the_idle_sequence_that_shares_most_is_taken() -> None:
    runtime = TableRuntime(TABLE)
    engine = Engine(runtime, max_idle=2)
    for number, first in ((0, 1), (1, 2)):
        engine.add(request(number, [first] * 10))
    drain(engine)
    assert runtime.num_open == 2
    engine.add(request(2, [2] * 10))
    engine.add(request(3, [1] * 7))
    stats = {event.request: event.stats for event in drain(engine)}
    assert (stats[2].reused_tokens, stats[3].reused_tokens) == (9, 6)


def test_no_idle_sequences_when_none_are_wanted() -> None:
    runtime = TableRuntime(TABLE)
    engine = Engine(runtime, max_idle=0)
    engine.add(request(0, [1, 2, 3]))
    drain(engine)
    assert runtime.num_open == 0


def test_reuse_on_a_real_model_changes_nothing() -> None:
    model = shared("llama")
    logits = oracle.recompute(model)
    engine = Engine(TransformersRuntime(model, exactness="ordinary"))
    prompt = [(5 + 11 * i) % 64 for i in range(30)]
    for number, text in enumerate((prompt, prompt[:12], [*prompt[:20], 1, 2], [63, *prompt])):
        engine.add(request(number, text))
        events = drain(engine)
        want = oracle.greedy(logits, text, max_new_tokens=NUM)
        oracle.assert_same(tokens_of(events)[number], want)
        assert events[-1].stats.reused_tokens == [0, 11, 12, 0][number]


# One request's failure


class Overflowing(TableRuntime):
    """Gives NaN after token `bad`, and only there."""

    bad = -1

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        row = super().logits(tokens)
        return row * float("nan") if tokens[-1] == self.bad else row


def failing_run() -> tuple[Engine, list[int], list[Event], list[NumericalError]]:
    """Request 1 of 0, 1, 2 meets NaN in its third step; all events and errors."""
    runtime = Overflowing(TABLE)
    prompts = [[4], [2], [6]]
    runtime.bad = right([2])[1]
    assert all(runtime.bad not in right([p]) for p in (4, 6)), "the others never see it"
    engine = Engine(runtime)
    for number, prompt in enumerate(prompts):
        engine.add(request(number, prompt))
    events: list[Event] = []
    errors: list[NumericalError] = []
    for _ in range(100):
        if not engine.busy:
            break
        try:
            events += engine.step()
        except NumericalError as error:
            errors.append(error)
    return engine, prompts[1], events, errors


def test_numbers_that_overflow_end_their_own_request_only() -> None:
    engine, _, events, errors = failing_run()
    assert not engine.busy
    texts = tokens_of(events)
    assert texts[1] == right([2])[:2], "what was delivered before stays delivered"
    told = [*errors, *(e.error for e in events if getattr(e, "error", None) is not None)]
    assert len(told) == 1, "the failure is told once"
    assert "bfloat16 or float32" in str(told[0])
    assert texts[0] == right([4]), "another request lost tokens"
    assert texts[2] == right([6]), "another request lost tokens"


def test_control_without_the_overflow_all_three_finish() -> None:
    engine = Engine(Overflowing(TABLE))
    for number, first in enumerate((4, 2, 6)):
        engine.add(request(number, [first]))
    assert tokens_of(drain(engine)) == {0: right([4]), 1: right([2]), 2: right([6])}
