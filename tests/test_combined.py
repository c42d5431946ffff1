"""Combined shares the budget fairly, and each member learns what it would have learned alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scripted import Empty, Script
from tiny import TableRuntime, serve

from outpace.errors import InvalidRequest
from outpace.heads import MedusaHeads
from outpace.proposers.base import Method, Outcome, Step
from outpace.proposers.combined import Combined, CombinedProposer
from outpace.proposers.lookahead import Lookahead
from outpace.proposers.lookup import Lookup
from outpace.runtimes.base import Output
from outpace.sampling import Sampler, SamplingParams
from outpace.tree import Tree

SAMPLER = Sampler(SamplingParams(), prompt=[0], seed=0, vocab_size=10)
ROOT = 0


def step_of(*, max_nodes: int = 64) -> Step:
    return Step(tokens=[ROOT], max_nodes=max_nodes, max_depth=64, sampler=SAMPLER)


def union(*trees: Tree, max_nodes: int = 64) -> Tree:
    """What the combination of methods that propose these trees proposes."""
    method = Combined(methods=tuple(Script(tree) for tree in trees))
    return method.start().propose(step_of(max_nodes=max_nodes))


def spelled(tree: Tree) -> list[tuple[int, ...]]:
    """Each candidate by the tokens on the way to it."""
    return [tuple(tree.path_tokens(node)) for node in range(1, tree.num_candidates)]


def outcome_of(tree: Tree, path: Sequence[int]) -> Outcome:
    """Row i of the logits is i, and so is the hidden state of node i."""
    logits = torch.arange(len(tree.rows)).unsqueeze(1).expand(-1, 10)
    hidden = torch.arange(len(tree)).unsqueeze(1)
    return Outcome(tree=tree, path=path, tokens=[1], output=Output(logits=logits, hidden=hidden))


# The union

CHAIN = Tree.chain([ROOT, 1, 2, 3, 4])
#      root - 1 - 5
#           - 6 - 7
BUSHY = Tree(tokens=[ROOT, 1, 6, 5, 7], parents=[-1, 0, 0, 1, 2])


def test_members_take_turns_and_shared_prefixes_are_free() -> None:
    tree = union(CHAIN, BUSHY)
    assert spelled(tree) == [(1,), (1, 5), (1, 2), (6,), (1, 2, 3), (6, 7), (1, 2, 3, 4)]
    assert spelled(union(CHAIN, BUSHY, max_nodes=5)) == spelled(tree)[:4]
    assert len(union(CHAIN, BUSHY, max_nodes=1)) == 1


def test_the_best_path_goes_before_earlier_siblings() -> None:
    levels = Tree(tokens=[ROOT, 1, 2, 3, 4], parents=[-1, 0, 0, 0, 1])
    assert spelled(union(levels)) == [(1,), (1, 4), (2,), (3,)]


def test_what_one_member_leaves_the_others_take() -> None:
    assert union(Tree.chain([ROOT]), CHAIN) == CHAIN
    assert union(Tree.chain([ROOT, 9]), CHAIN, max_nodes=5) == Tree(
        tokens=[ROOT, 9, 1, 2, 3], parents=[-1, 0, 0, 2, 3]
    )


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    paths = draw(st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=4))
    return Tree.from_paths(ROOT, paths, max_nodes=64)


def check_union(union_of: Callable[..., Tree], members: Sequence[Tree], max_nodes: int) -> None:
    tree = union_of(*members, max_nodes=max_nodes)
    wanted = [path for member in members for path in spelled(member)]
    got = spelled(tree)
    assert len(set(got)) == len(got) == min(len(set(wanted)), max_nodes - 1)
    assert set(got) <= set(wanted)
    # Who has nodes left over got as many in as anybody else has for himself, give or take a turn.
    for member in members:
        num_in = sum(path in spelled(member) for path in got)
        for other in members:
            others_own = [p for p in got if all(p not in spelled(m) or m is other for m in members)]
            assert num_in == len(member) - 1 or num_in + 1 >= len(others_own)


@given(st.lists(trees(), min_size=1, max_size=3), st.integers(1, 30))
def test_the_union_is_complete_and_fair(members: list[Tree], max_nodes: int) -> None:
    check_union(union, members, max_nodes)


def test_control_a_first_member_that_takes_all_is_caught() -> None:
    def greedy(*members: Tree, max_nodes: int) -> Tree:
        paths = [list(path) for member in members for path in spelled(member)]
        return Tree.from_paths(ROOT, paths, max_nodes=max_nodes)

    with pytest.raises(AssertionError):
        check_union(greedy, [CHAIN, Tree.chain([ROOT, 7, 8, 9])], 5)


def test_drawn_children_count_as_picked() -> None:
    drawn = Tree.chain([ROOT, 1], draft_probs=torch.full((2, 10), 0.1))
    assert union(drawn, BUSHY).draft_probs is None


# Scratch

#      root - 8, and below the root a window: 20 - 21
#                                              |    |
#                                             30   31
WINDOW = Tree(
    tokens=[ROOT, 8, 20, 21, 30, 31],
    parents=[-1, 0, 0, 2, 2, 3],
    num_candidates=2,
    num_scratch_rows=2,
)


def test_candidates_leave_room_for_the_window() -> None:
    tree = union(CHAIN, WINDOW, max_nodes=8)
    assert tree == Tree(
        tokens=[ROOT, 1, 8, 2, 20, 21, 30, 31],
        parents=[-1, 0, 0, 1, 0, 4, 4, 5],
        num_candidates=4,
        num_scratch_rows=2,
    )
    assert tree.rows == [0, 1, 2, 3, 6, 7]


def test_the_first_window_is_the_only_one() -> None:
    other = Tree(tokens=[ROOT, 50], parents=[-1, 0], num_candidates=1, num_scratch_rows=1)
    assert union(CHAIN, WINDOW, other) == union(CHAIN, WINDOW)


def test_scratch_whose_candidate_was_cut_goes_too() -> None:
    hanging = Tree(
        tokens=[ROOT, 8, 9, 50], parents=[-1, 0, 1, 2], num_candidates=3, num_scratch_rows=1
    )
    assert union(CHAIN, hanging) == Tree(
        tokens=[ROOT, 1, 8, 2, 9, 3, 4, 50],
        parents=[-1, 0, 0, 1, 2, 3, 5, 4],
        num_candidates=7,
        num_scratch_rows=1,
    )
    assert union(CHAIN, hanging, max_nodes=4) == Tree.from_paths(ROOT, [[1], [8]], max_nodes=9)


# What members learn


def test_the_owner_of_the_window_sees_it_and_the_others_do_not() -> None:
    chain, window = Script(CHAIN), Script(WINDOW)
    proposer = Combined(methods=(chain, window)).start()
    tree = proposer.propose(step_of())
    outcome = outcome_of(tree, path=[0, 1])
    proposer.observe(outcome)
    assert window.outcomes == [outcome]
    seen = chain.outcomes[0]
    assert (seen.path, seen.tokens) == (outcome.path, outcome.tokens)
    assert seen.tree == union(CHAIN, Tree.chain([ROOT, 8]))
    assert seen.output.logits[:, 0].tolist() == list(range(tree.num_candidates))
    assert seen.output.hidden[:, 0].tolist() == list(range(tree.num_candidates))


def test_the_last_accepted_node_has_its_hidden_state_for_every_member() -> None:
    ours, theirs = Script(Tree.chain([ROOT, 1])), Script(Tree.chain([ROOT, 6, 7]))
    proposer = Combined(methods=(ours, theirs)).start()
    tree = proposer.propose(step_of())
    path = tree.path(spelled(tree).index((6, 7)) + 1)
    proposer.observe(outcome_of(tree, path))
    for member in (ours, theirs):
        seen = member.outcomes[0]
        assert seen.output.hidden[seen.path[-1]].tolist() == [path[-1]]
        assert seen.tree.path_tokens(seen.path[-1]) == [6, 7]


def test_without_branches_the_first_that_proposes_has_the_step() -> None:
    window = Tree(tokens=[ROOT, 8, 9], parents=[-1, 0, 1], num_candidates=1, num_scratch_rows=1)
    nothing, chain = Tree.chain([ROOT]), Tree.chain([ROOT, 5, 6])
    step = replace(step_of(), branches=False)
    for trees, want in [
        ([chain, Tree.chain([ROOT, 7])], chain),
        ([nothing, chain], chain),
        ([window, chain], chain),
        ([nothing, window], window),
        ([window, nothing], window),
        ([nothing, nothing], nothing),
    ]:
        assert Combined(methods=tuple(map(Script, trees))).start().propose(step) == want
    merged = union(chain, Tree.chain([ROOT, 7]))
    assert len(merged) == 4, "control: with branches they share the step"


def test_prefill_is_passed_on() -> None:
    member = Script(CHAIN)
    outcome = outcome_of(Tree.chain([1, 2, 3]), path=[0, 1, 2])
    Combined(methods=(member, Lookahead())).start().observe(outcome)
    assert member.outcomes == [outcome]


def tokens_per_step(*methods: Method) -> float:
    """Of a text without repeated tokens, of which lookup can say nothing."""
    runtime = TableRuntime(torch.eye(40).roll(7, dims=1) * 9.0)
    result = serve(runtime, Combined(methods=methods)).generate([0, 1], max_new_tokens=39)
    assert result.tokens == [(8 + 7 * i) % 40 for i in range(39)]
    assert result.stats.tokens_per_step is not None
    return result.stats.tokens_per_step


def test_lookahead_learns_as_if_it_were_alone() -> None:
    alone = tokens_per_step(Lookahead())
    assert alone > 1.3
    assert tokens_per_step(Lookup(), Lookahead()) == alone
    assert tokens_per_step(Lookahead(), Lookahead(window_size=3)) >= alone
    assert tokens_per_step(Lookup(), Empty()) == 1.0


def test_control_members_that_are_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CombinedProposer, "observe", lambda *_: None)
    assert tokens_per_step(Lookup(), Lookahead()) == 1.0


# The method


def test_members_are_closed_and_counted() -> None:
    class Heavy(Script):
        def memory(self) -> int:
            return 7

    heavy, light = Heavy(), Empty()
    method = Combined(methods=(heavy, light))
    method.start().close()
    assert (heavy.num_closed, light.num_closed) == (1, 1)
    assert method.memory() == 7


def test_members_are_checked() -> None:
    for methods in ((), ("lookup",), Lookup()):
        with pytest.raises(InvalidRequest, match="methods must be"):
            Combined(methods=methods)  # type: ignore[arg-type]


def own_heads(runtime: TableRuntime) -> MedusaHeads:
    return MedusaHeads(hidden_size=runtime.hidden_size, vocab_size=runtime.vocab_size, num_heads=2)


def test_what_is_trained_joins_lookup_by_its_name() -> None:
    runtime, small = TableRuntime(torch.eye(40).roll(7, dims=1) * 9.0), TableRuntime(torch.eye(40))
    heads = own_heads(runtime)
    for options, members in [
        ({}, ["lookup", "lookahead"]),
        ({"heads": None, "draft": None}, ["lookup", "lookahead"]),
        ({"heads": heads}, ["lookup", "medusa"]),
        ({"draft": small}, ["lookup", "draft"]),
        ({"draft": small, "heads": heads}, ["lookup", "medusa", "draft"]),
        ({"methods": (Lookahead(),)}, ["lookahead"]),
    ]:
        method = serve(runtime, "combined", **options).method
        assert isinstance(method, Combined)
        assert [member.name for member in method.methods] == members, options
    with pytest.raises(InvalidRequest, match="methods are the whole union"):
        serve(runtime, "combined", heads=heads, methods=(Lookup(),))
    with pytest.raises(InvalidRequest, match="has no option 'num_heads'"):
        serve(runtime, "combined", heads=heads, num_heads=1)
    with pytest.raises(InvalidRequest, match="heads"):
        serve(runtime, "combined", heads=7)


def test_a_named_draft_is_accepted_within_the_union() -> None:
    runtime = TableRuntime(torch.eye(40).roll(7, dims=1) * 9.0)
    for draft, accepted in [
        (TableRuntime(runtime.table), True),
        (TableRuntime(torch.eye(40)), False),
    ]:
        result = serve(runtime, "combined", draft=draft).generate([0, 1], max_new_tokens=20)
        assert result.tokens == [(8 + 7 * i) % 40 for i in range(20)]
        assert (result.stats.accepted > 10) == accepted
        assert draft.num_open == 0, "the draft's sequence was not closed"
