"""Lookahead's window is a tree, finds n-grams by iteration, and fits into any budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import TableRuntime, serve

from outpace.errors import InvalidRequest
from outpace.proposers.base import Outcome, Proposer, Step
from outpace.proposers.lookahead import Lookahead, LookaheadProposer
from outpace.runtimes.base import Output
from outpace.sampling import Sampler, SamplingParams
from outpace.tree import Tree

SAMPLER = Sampler(SamplingParams(), prompt=[0], seed=0, vocab_size=40)


def propose(
    proposer: Proposer, tokens: Sequence[int], *, max_nodes: int = 64, max_depth: int = 64
) -> Tree:
    step = Step(tokens=tokens, max_nodes=max_nodes, max_depth=max_depth, sampler=SAMPLER)
    return proposer.propose(step)


def tell(
    proposer: Proposer, tree: Tree, said: Sequence[int], *, path: Sequence[int] = (0,)
) -> None:
    """Tells what the target said at each of `tree.rows`."""
    logits = torch.eye(40)[list(said)]
    tokens = [*(tree.tokens[i] for i in path[1:]), said[path[-1]]]
    output = Output(logits=logits, hidden=torch.zeros(len(tree), 1))
    proposer.observe(Outcome(tree=tree, path=path, tokens=tokens, output=output))


# The window's mask


def window_mask(num_columns: int, ngram_size: int) -> np.ndarray:
    """`[nodes, nodes]` drawn by hand: the root, then row by row of the window.

    Cell (row, column) sees the root, the cells of row 0 up to its own column, and the cells of its
    own column from row 1 down to itself. For 3 columns, n-grams of 4, cell (1, 1) sees s:

        root s
        row 0   s s .
        row 1   . s .
        row 2   . . .
    """
    cells = [(r, c) for r in range(ngram_size - 1) for c in range(num_columns)]
    mask = np.zeros((1 + len(cells), 1 + len(cells)), dtype=bool)
    mask[:, 0] = True
    for i, (row, column) in enumerate(cells):
        for j, (other_row, other_column) in enumerate(cells):
            if other_row == 0:
                mask[1 + i, 1 + j] = other_column <= column
            else:
                mask[1 + i, 1 + j] = other_column == column and other_row <= row
    return mask


def check_window(tree: Tree, num_columns: int, ngram_size: int) -> None:
    """The scratch has the hand-drawn mask, stands right behind the root, shows its last row."""
    scratch = [0, *range(tree.num_candidates, len(tree))]
    seen = tree.mask()
    assert np.array_equal(seen[np.ix_(scratch, scratch)], window_mask(num_columns, ngram_size))
    assert not seen[tree.num_candidates :, 1 : tree.num_candidates].any()
    depths = [1 + r + c for r in range(ngram_size - 1) for c in range(num_columns)]
    assert tree.depths[tree.num_candidates :] == depths
    last_row = list(range(len(tree) - num_columns, len(tree)))
    assert tree.rows == [*range(tree.num_candidates), *last_row]


@given(st.integers(1, 8), st.integers(2, 6), st.integers(1, 8), st.data())
def test_the_scratch_is_the_papers_window(
    window_size: int, ngram_size: int, num_guesses: int, data: st.DataObject
) -> None:
    method = Lookahead(window_size=window_size, ngram_size=ngram_size, num_guesses=num_guesses)
    tokens = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=30))
    tree = propose(method.start(), tokens, max_nodes=256)
    check_window(tree, window_size, ngram_size)
    assert len(tree) - tree.num_candidates == window_size * (ngram_size - 1)


def test_the_mask_of_the_docstring() -> None:
    method = Lookahead(window_size=3, ngram_size=3)
    tree = propose(method.start(), [1, 2, 3, 1])
    assert tree.num_candidates == 3
    drawn = [
        line.split()[1:] for line in (Lookahead.__doc__ or "").split("10 11 12\n")[1].split("\n")
    ]
    for seen, line in zip(tree.mask(), drawn, strict=False):
        assert ["x" if x else "." for x in seen] == line + ["."] * (9 - len(line))


def test_control_a_window_whose_rows_are_chains_is_caught() -> None:
    tree = Tree(tokens=[1] * 5, parents=[-1, 0, 1, 0, 3], num_candidates=1, num_scratch_rows=2)
    with pytest.raises(AssertionError):
        check_window(tree, 2, 3)


# What the window finds


def test_columns_grow_downwards_and_complete_ngrams() -> None:
    proposer = Lookahead(window_size=2, ngram_size=3, num_tokens=2).start()
    tree = propose(proposer, [7])
    assert tree.tokens == [7, 7, 7, 7, 7]  # the prompt has nothing else to begin with
    tell(proposer, tree, [9, 20, 30])
    tree = propose(proposer, [7, 9])
    assert tree.tokens == [9, 7, 7, 20, 30]
    tell(proposer, tree, [7, 21, 31])
    tree = propose(proposer, [7, 9, 7])
    assert [tree.path_tokens(i) for i in range(tree.num_candidates) if not tree.children(i)] == [
        [9, 7],  # the text's own
        [30, 31],
        [20, 21],
        [7, 30],
        [7, 20],
    ]
    assert tree.tokens[tree.num_candidates :] == [20, 30, 21, 31]


def test_the_pool_keeps_the_latest_ngrams_of_prompt_and_output() -> None:
    proposer = Lookahead(ngram_size=2, num_guesses=2, num_tokens=1).start()
    tokens = [5, 1, 5, 2, 5, 3, 5]
    assert propose(proposer, tokens, max_depth=2).tokens == [5, 3, 2]
    tokens += [1, 5]
    assert propose(proposer, tokens, max_depth=2).tokens == [5, 1, 3]


def test_guesses_go_on_with_the_pools_latest() -> None:
    proposer = Lookahead(ngram_size=3, num_tokens=5).start()
    tokens = [1, 2, 3, 4, 5, 6, 0, 1]
    assert propose(proposer, tokens, max_depth=5) == Tree.chain([1, 2, 3, 4, 5, 6])


def test_what_the_target_said_behind_a_rejected_guess_is_kept() -> None:
    proposer = Lookahead(ngram_size=2, num_tokens=1).start()
    tree = propose(proposer, [1, 2, 1], max_depth=2)
    assert tree == Tree.chain([1, 2])
    tell(proposer, tree, [3, 30])  # 3 instead of 2, behind which 30 would have come
    assert propose(proposer, [1, 2, 1, 3, 2], max_depth=2).tokens == [2, 30, 1]


def counting() -> TableRuntime:
    """x is followed by x + 7 modulo 40: all 40 tokens come by before one comes again."""
    return TableRuntime(torch.eye(40).roll(7, dims=1) * 9.0)


def tokens_per_step(method: Lookahead, runtime: TableRuntime) -> float:
    result = serve(runtime, method).generate([0, 1], max_new_tokens=39)
    assert result.tokens == [(8 + 7 * i) % 40 for i in range(39)]
    assert result.stats.tokens_per_step is not None
    return result.stats.tokens_per_step


class Idle(LookaheadProposer):
    """Learns nothing from the forward."""

    def observe(self, outcome: Outcome) -> None:
        pass


@pytest.mark.parametrize("ngram_size", [2, 3, 5])
@pytest.mark.parametrize("window_size", [3, 5])
def test_iteration_finds_ngrams_of_a_text_that_never_repeats(
    window_size: int, ngram_size: int
) -> None:
    runtime = counting()
    method = Lookahead(window_size=window_size, ngram_size=ngram_size)
    assert tokens_per_step(method, runtime) > 1.3
    windows = [work for work in runtime.passes if len(work.tree) > work.tree.num_candidates]
    assert len(windows) > 3
    for work in windows:  # the engine asks for the last row alone
        check_window(work.tree, window_size, ngram_size)
        assert len(work.rows) == work.tree.num_candidates + window_size


def test_control_without_feedback_the_same_text_takes_a_forward_a_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Lookahead, "start", lambda method: Idle(method))
    assert tokens_per_step(Lookahead(), counting()) == 1.0


def test_a_forward_without_scratch_or_of_prefill_teaches_nothing_wrong() -> None:
    proposer = Lookahead(window_size=2, ngram_size=3).start()
    prompt = Tree.chain([7, 8])
    nothing = Output(logits=torch.empty(0, 40), hidden=torch.zeros(2, 1))
    proposer.observe(Outcome(tree=prompt, path=[0, 1], tokens=[], output=nothing))
    before = propose(proposer, [7, 8, 7])
    bare = Tree(tokens=before.tokens[:1], parents=[-1])
    tell(proposer, bare, [9])
    assert propose(proposer, [7, 8, 7, 9]).tokens[1:] == before.tokens[before.num_candidates :]


# Budgets


@given(
    st.integers(1, 6),
    st.integers(2, 5),
    st.integers(1, 40),
    st.integers(0, 12),
    st.lists(st.integers(0, 2), min_size=1, max_size=20),
)
def test_budgets_are_kept(
    window_size: int, ngram_size: int, max_nodes: int, max_depth: int, tokens: list[int]
) -> None:
    method = Lookahead(window_size=window_size, ngram_size=ngram_size)
    tree = propose(method.start(), tokens, max_nodes=max_nodes, max_depth=max_depth)
    assert len(tree) <= max_nodes and max(tree.depths) <= max_depth
    assert tree.tokens[0] == tokens[-1] and tree.draft_probs is None
    assert len(tree) - tree.num_candidates == tree.num_scratch_rows * (ngram_size - 1)


def test_the_window_shrinks_before_it_goes() -> None:
    def width(max_nodes: int, max_depth: int = 64, tokens: Sequence[int] = (1,)) -> int:
        proposer = Lookahead(window_size=4, ngram_size=3).start()
        return propose(proposer, tokens, max_nodes=max_nodes, max_depth=max_depth).num_scratch_rows

    assert [width(n) for n in (4, 5, 7, 9, 30)] == [0, 2, 3, 4, 4]
    assert width(30, max_depth=5) == 4  # the deepest cell is at 4 + 3 - 2
    assert width(30, max_depth=4) == 0
    assert width(9, tokens=[1, 2, 3, 1, 4, 5, 1]) == 2  # four candidates


def test_a_shrunken_window_keeps_its_columns() -> None:
    proposer = Lookahead(window_size=3, ngram_size=2, num_tokens=1).start()
    tokens = [7]
    tree = propose(proposer, tokens)
    tell(proposer, tree, [8, 20, 21, 22])
    tree = propose(proposer, [7, 8], max_nodes=3)
    assert tree.tokens == [8, 20, 21]
    tell(proposer, tree, [9, 30, 31])
    tree = propose(proposer, [7, 8, 9])
    assert tree.tokens == [9, 30, 31, 22]


def test_the_same_text_gives_the_same_window() -> None:
    trees = [propose(Lookahead().start(), [3, 1, 4, 1, 5, 9]) for _ in range(2)]
    assert trees[0] == trees[1]


BAD = [
    dict(window_size=0),
    dict(ngram_size=1),
    dict(num_guesses=0),
    dict(num_tokens=0),
    dict(num_guesses=True),
]


@pytest.mark.parametrize("options", BAD, ids=str)
def test_options_out_of_range_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=f"{next(iter(options))} must be .* at least [12]"):
        Lookahead(**options)


@pytest.mark.parametrize("options", [{"window_size": 10**9}, {"ngram_size": 10**9}])
def test_a_window_of_any_size_costs_no_more_than_the_budget(options: dict[str, int]) -> None:
    proposer = LookaheadProposer(Lookahead(**options))
    assert len(propose(proposer, [1, 2, 3])) <= 64
    assert len(proposer._columns) <= 64
    assert all(len(column) <= 64 for column in proposer._columns)
    most = propose(LookaheadProposer(Lookahead(window_size=25)), [1, 2, 3])
    assert len(most) > 50, "control: a wide window still runs"
