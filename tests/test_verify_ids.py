"""The verdict on two runs: identical, a tie within the tolerance, or wrong."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scripted import Bushy, HalfRight, Perfect, Scripted
from tiny import VOCAB, TableRuntime, build, probs_table, random_table, serve, shared
from torch import Tensor

from outpace.accept import TargetRows
from outpace.llm import LLM
from outpace.runtimes.transformers import TransformersRuntime
from outpace.sampling import SamplingParams
from outpace.tree import Tree
from outpace.verify import ids
from outpace.verify.ids import IDENTICAL, TIE, WRONG, Comparison, compare
from outpace.verify.run import compare_methods
from outpace.verify.teacher import forced_logits, logits_after

PROMPTS = [[5, 6, 7] * 4, [11, 3], [1, 2, 3, 4]]
GREEDY = SamplingParams()


def judge(
    table: Tensor,
    plain: Sequence[int],
    tokens: Sequence[int],
    params: SamplingParams = GREEDY,
    tolerance: float = 1e-4,
) -> Comparison:
    runtime = TableRuntime(table)
    done = compare(runtime, [0], plain, tokens, params=params, tolerance=tolerance)
    assert runtime.num_open == 0
    return done


def close_pair(margin: float) -> Tensor:
    """Token 1 leads token 2 by `margin` everywhere, token 3 is far below."""
    return torch.tensor([-9.0, 0.0, -margin, -5.0]).expand(4, -1).clone()


def test_equal_texts_are_identical_and_cost_nothing() -> None:
    runtime = TableRuntime(close_pair(1.0))
    done = compare(runtime, [0], [1, 1], [1, 1], params=GREEDY, tolerance=1e-4)
    assert done == Comparison(verdict=IDENTICAL, tokens=2)
    assert runtime.num_forwards == 0


@pytest.mark.parametrize(("margin", "verdict"), [(5e-5, TIE), (2e-4, WRONG), (1.0, WRONG)])
def test_a_first_difference_is_a_tie_only_within_the_tolerance(margin: float, verdict: str) -> None:
    done = judge(close_pair(margin), [1, 1, 1], [1, 2, 1])
    assert (done.verdict, done.at, done.expected, done.found) == (verdict, 1, 1, 2)
    assert done.margin == pytest.approx(margin, rel=1e-3)
    assert done.gap == pytest.approx(margin, rel=1e-3)


@pytest.mark.parametrize("swap", [False, True])
def test_a_token_that_is_no_part_of_the_tie_is_wrong(swap: bool) -> None:
    pair = ([1, 3], [1, 1]) if swap else ([1, 1], [1, 3])
    done = judge(close_pair(5e-5), *pair)
    assert done.verdict == WRONG
    assert done.margin == pytest.approx(5e-5, rel=1e-3) and done.gap == pytest.approx(5.0)


@pytest.mark.parametrize(("plain", "tokens"), [([1, 1], [1]), ([1], [1, 1])])
def test_a_text_that_ends_elsewhere_is_wrong(plain: list[int], tokens: list[int]) -> None:
    done = judge(close_pair(5e-5), plain, tokens)
    assert (done.verdict, done.at, done.gap) == (WRONG, 1, 0.0)


def test_seeded_margins_are_those_of_the_perturbed_scores_in_logits() -> None:
    table = random_table(16, seed=3)
    params = SamplingParams(temperature=0.5, seed=9, max_new_tokens=4)
    llm = serve(TableRuntime(table))
    plain = llm.generate([0], temperature=0.5, seed=9, max_new_tokens=4).tokens
    scores = ids.deciding_scores(table[plain[1]], [0, *plain[:2]], 1, params)
    best, second = scores.topk(2).indices.tolist()
    assert best == plain[2]  # the noise of the same seed and position
    done = judge(table, plain, [*plain[:2], second], params)
    want = float(scores[best] - scores[second])
    assert done.margin == done.gap == pytest.approx(want) and done.verdict == WRONG
    doubled = SamplingParams(temperature=1.0, seed=9)  # the same logits, half as hard divided
    again = ids.deciding_scores(2 * table[plain[1]], [0, *plain[:2]], 1, doubled)
    assert torch.allclose(again - again.max(), 2 * (scores - scores.max()), atol=1e-4)


def test_teacher_forcing_gives_the_logits_of_plain_decoding() -> None:
    llm = serve(shared("llama"))
    runtime = llm.model.runtime
    tokens = llm.generate(PROMPTS[0], max_new_tokens=12).tokens
    for width in (1, 5):
        rows = list(forced_logits(runtime, PROMPTS[0], tokens, width=width))
        assert len(rows) == 13
        assert [int(row.argmax()) for row in rows[:-1]] == tokens
    assert torch.equal(
        logits_after(runtime, PROMPTS[0], tokens),
        list(forced_logits(runtime, PROMPTS[0], tokens))[-1],
    )


def verdicts(llm: LLM, method: Scripted | None, **sampling: float) -> list[Comparison]:
    other = llm if method is None else llm.with_method(method)
    settings = {"max_new_tokens": 24, **sampling}
    found = compare_methods(llm, {"it": other}, PROMPTS, sampling=settings)
    return [comparison for _, _, comparison in found]


def texts_of(llm: LLM, **sampling: float) -> list[list[int]]:
    results = llm.generate_batch(PROMPTS, max_new_tokens=24, **sampling)
    return [p + r.tokens for p, r in zip(PROMPTS, results, strict=True)]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 4}])
def test_right_methods_are_identical(sampling: dict[str, float]) -> None:
    llm = serve(shared("llama"))
    texts = texts_of(llm, **sampling)
    for method in (
        Perfect(*texts),
        HalfRight(*texts, rights=[2, 0, 5], vocab_size=VOCAB),
        Bushy(*texts, rights=[3, 1], vocab_size=VOCAB),
    ):
        found = verdicts(llm, method, **sampling)
        assert [c.verdict for c in found] == [IDENTICAL] * 3
        assert [c.tokens for c in found] == [24] * 3


def test_what_is_done_is_not_decoded_again() -> None:
    runtime = TableRuntime(random_table(16, seed=1))
    llm = serve(runtime)
    sampling, prompts = {"max_new_tokens": 4}, PROMPTS * 4
    done = {("it", number) for number in range(12)} - {("it", 1), ("it", 11)}
    found = list(compare_methods(llm, {"it": llm}, prompts, sampling=sampling, done=done))
    assert [(name, number) for name, number, _ in found] == [("it", 1), ("it", 11)]
    forwards = runtime.num_forwards
    done |= {("it", 1), ("it", 11)}
    assert list(compare_methods(llm, {"it": llm}, prompts, sampling=sampling, done=done)) == []
    assert runtime.num_forwards == forwards


def test_noise_keyed_by_step_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = serve(shared("llama"))
    sampling = {"temperature": 0.8, "seed": 4}
    texts = texts_of(llm, **sampling)
    monkeypatch.setattr(TargetRows, "position", lambda self, node: len(self.sampler.tokens))
    found = verdicts(llm, Perfect(*texts), **sampling)
    assert [c.verdict for c in found] == [WRONG] * 3
    assert all(c.gap is not None and c.gap > 1e-3 for c in found)
    assert [c.verdict for c in verdicts(llm, Perfect(*texts_of(llm)))] == [IDENTICAL] * 3


def test_a_shifted_mask_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = serve(shared("llama"))
    texts = texts_of(llm)
    mask = Tree.mask

    def shifted(tree: Tree) -> npt.NDArray[np.bool_]:
        """Nodes see the one behind an ancestor; chains are right by luck."""
        seen = mask(tree)
        return seen if len(tree) == max(tree.depths) + 1 else np.roll(seen, 1, axis=1)

    bushy = Bushy(*texts, rights=[3, 1], vocab_size=VOCAB)
    assert [c.verdict for c in verdicts(llm, bushy)] == [IDENTICAL] * 3
    monkeypatch.setattr(Tree, "mask", shifted)
    found = verdicts(llm, bushy)
    assert WRONG in [c.verdict for c in found] and TIE not in [c.verdict for c in found]
    wrong = next(c for c in found if c.verdict == WRONG)
    assert wrong.gap is not None and wrong.gap > 1e-3


def test_a_same_shape_runtime_is_excused_nothing() -> None:
    ordinary = TransformersRuntime(build("llama", dtype=torch.bfloat16), exactness="ordinary")
    assert ids.tolerance_of(ordinary) == 0.5
    same_shape = TableRuntime(close_pair(0.0))
    assert ids.tolerance_of(same_shape) == 1e-4
    same_shape.same_shape = True
    assert ids.tolerance_of(same_shape) == 0.0
    assert ids.rounding_of(same_shape) == 1e-4  # other engines have other shapes
    same_shape.dtype = torch.float64
    assert ids.rounding_of(same_shape) == 1e-4
    assert judge(close_pair(1e-6), [1], [2], tolerance=0.0).verdict == WRONG
    assert judge(probs_table([[0.25, 0.25, 0.25, 0.25]]), [1], [2], tolerance=0.0).verdict == TIE
