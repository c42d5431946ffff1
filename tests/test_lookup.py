"""Lookup finds what a search over the whole text finds, without searching the whole text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import TableRuntime, serve

from outpace.errors import InvalidRequest
from outpace.proposers.base import Proposer, Step
from outpace.proposers.lookup import Lookup, LookupProposer
from outpace.sampling import Sampler, SamplingParams
from outpace.tree import Tree

SAMPLER = Sampler(SamplingParams(), prompt=[0], seed=0, vocab_size=10)


def propose(
    proposer: Proposer, tokens: Sequence[int], *, max_nodes: int = 64, max_depth: int = 64
) -> Tree:
    step = Step(tokens=tokens, max_nodes=max_nodes, max_depth=max_depth, sampler=SAMPLER)
    return proposer.propose(step)


def paths_by_search(tokens: Sequence[int], method: Lookup) -> list[list[int]]:
    """The continuations by definition: every earlier place is compared with the text's end."""
    matches = []
    for start in range(1, len(tokens)):
        n = 0
        while n < min(method.max_ngram, start) and tokens[start - 1 - n] == tokens[-1 - n]:
            n += 1
        if n >= method.min_ngram:
            matches.append((n, start))
    found = sorted(matches, reverse=True)[: method.num_branches]
    paths = []
    for n, start in found:
        text = list(tokens)
        for i in range(method.num_tokens):  # the text may grow by its own continuation
            text.append(text[start + i])
        paths.append((n, text[len(tokens) :]))
    lengths = [min(method.num_tokens, 4 * n - 1) for n, _ in paths]
    first = voted(paths)[: lengths[0]] if paths else []
    return [first, *(path[:length] for (_, path), length in zip(paths, lengths, strict=True))]


def voted(paths: list[tuple[int, list[int]]]) -> list[int]:
    """Token by token the one with most votes among the paths that begin with the tokens so far."""
    path: list[int] = []
    for i in range(len(paths[0][1])):
        agreeing = [(n, p[i]) for n, p in paths if p[:i] == path]
        votes = [sum(5**n for n, token in agreeing if token == t) for _, t in agreeing]
        path.append(agreeing[votes.index(max(votes))][1])
    return path


def check_against_search(
    method: Lookup, chunks: Sequence[Sequence[int]], start: Callable[[], Proposer]
) -> None:
    proposer, tokens = start(), []
    for chunk in chunks:
        tokens += chunk
        right = Tree.from_paths(tokens[-1], paths_by_search(tokens, method), max_nodes=64)
        assert propose(proposer, tokens) == right


texts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=5)


@given(texts, st.integers(1, 4), st.integers(0, 3), st.integers(1, 6), st.integers(1, 4))
def test_every_match_is_found_longest_then_latest_first(
    chunks: list[list[int]], min_ngram: int, more: int, num_tokens: int, num_branches: int
) -> None:
    method = Lookup(
        min_ngram=min_ngram,
        max_ngram=min_ngram + more,
        num_tokens=num_tokens,
        num_branches=num_branches,
    )
    check_against_search(method, chunks, method.start)


def test_control_an_index_that_forgets_chunk_borders_is_caught() -> None:
    class Forgetful(LookupProposer):
        def propose(self, step: Step) -> Tree:
            tree = super().propose(step)
            self._num_indexed += 1
            return tree

    method = Lookup()
    with pytest.raises(AssertionError):
        check_against_search(method, [[1], [2, 1]], lambda: Forgetful(method))


def test_the_longest_match_leads_and_the_others_branch_off() -> None:
    #      1 2 3 -> 4 5     0 3 -> 6     1 2 3
    tokens = [1, 2, 3, 4, 5, 0, 3, 6, 7, 1, 2, 3]
    tree = propose(Lookup(num_tokens=2).start(), tokens)
    assert tree.tokens == [3, 4, 5, 6, 7]
    assert tree.parents == [-1, 0, 1, 0, 3]


def test_a_better_match_is_continued_further() -> None:
    tokens = [1, 2, 3, 9, 8, 7, 6, 5, 4, 0]
    for n, depth in [(1, 3), (2, 7), (3, 9)]:
        tree = propose(Lookup(max_ngram=3, num_tokens=9).start(), [*tokens, *tokens[3 - n : 3]])
        assert max(tree.depths) == depth


def test_many_short_matches_outvote_one_but_not_a_longer_one() -> None:
    few = [1, 2, 3, 6, 0, 3, 7, 0, 3, 7, 0, 3]
    tree = propose(Lookup(num_branches=4, min_ngram=1, max_ngram=1).start(), few)
    assert tree.tokens[1] == 7, "two of three go on with 7"
    longer = [1, 2, 3, 6, 0, 3, 7, 0, 3, 7, 9, 2, 3]
    assert propose(Lookup().start(), longer).tokens[1] == 6, "2 3 matches two tokens"


def test_a_loop_is_unrolled() -> None:
    tree = propose(Lookup(num_tokens=5, num_branches=1).start(), [9, 1, 2, 3, 1, 2, 3])
    assert tree == Tree.chain([3, 1, 2, 3, 1, 2])


def test_nothing_before_means_nothing_proposed() -> None:
    proposer = Lookup().start()
    assert propose(proposer, [5]) == Tree.chain([5])
    assert propose(proposer, [5, 6]) == Tree.chain([6])
    assert propose(Lookup(min_ngram=3).start(), [1, 2, 9, 1, 2]) == Tree.chain([2])


@given(texts, st.integers(1, 12), st.integers(0, 5))
def test_budgets_are_kept(chunks: list[list[int]], max_nodes: int, max_depth: int) -> None:
    proposer, tokens = Lookup().start(), []
    for chunk in chunks:
        tokens += chunk
        tree = propose(proposer, tokens, max_nodes=max_nodes, max_depth=max_depth)
        assert len(tree) <= max_nodes and max(tree.depths) <= max_depth
        assert tree.num_candidates == len(tree) and tree.draft_probs is None


class Counted(list[int]):
    """Counts the tokens that are read."""

    num_read = 0

    def __getitem__(self, key: Any) -> Any:
        got = super().__getitem__(key)
        self.num_read += len(got) if isinstance(got, list) else 1
        return got


def num_read(propose_once: Callable[[Counted], object], length: int) -> int:
    """The most tokens read by one of eight proposals behind a text of `length` tokens."""
    tokens = Counted(i * i % 7 for i in range(length))
    most = 0
    for i in range(9):
        tokens.num_read = 0
        propose_once(tokens)
        most = max(most, tokens.num_read) if i else 0  # the first one reads the prompt
        tokens.append(i)
    return most


def test_the_work_of_a_token_does_not_grow_with_the_text() -> None:
    def once() -> Callable[[Counted], object]:
        proposer = Lookup().start()
        return lambda tokens: propose(proposer, tokens)

    assert num_read(once(), 20_000) <= 1.2 * num_read(once(), 200)
    assert num_read(once(), 20_000) < 400


def test_control_a_search_reads_the_whole_text() -> None:
    assert num_read(lambda tokens: paths_by_search(tokens, Lookup()), 2_000) > 2_000


def test_a_repeating_text_takes_few_forwards() -> None:
    runtime = TableRuntime(torch.eye(10).roll(1, dims=1))  # x is followed by x + 1 modulo 10
    result = serve(runtime, "lookup").generate([0], max_new_tokens=60)
    assert result.tokens == [(1 + i) % 10 for i in range(60)]
    assert result.stats.steps <= 10 + 50 // 8
    assert result.stats.accepted == 60 - result.stats.steps


BAD = [
    dict(max_ngram=0),
    dict(min_ngram=0),
    dict(max_ngram=2, min_ngram=3),
    dict(num_tokens=0),
    dict(num_branches=0),
    dict(num_tokens=2.5),
]


@pytest.mark.parametrize("options", BAD, ids=str)
def test_options_out_of_range_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=f"{list(options)[-1]} must be .* at least 1"):
        Lookup(**options)
