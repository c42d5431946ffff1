"""Medusa proposes what its heads say, on the tree it was given, from the right hidden state."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import TableRuntime, random_table, serve
from torch import Tensor

from outpace.errors import IncompatibleModels, InvalidRequest
from outpace.heads import MedusaHeads, save
from outpace.proposers.base import Outcome, Proposer, Step, Target
from outpace.proposers.medusa import Medusa, default_choices
from outpace.runtimes.base import Output
from outpace.sampling import Sampler, SamplingParams
from outpace.tree import Tree

VOCAB = 12
CHAIN = [(0,) * n for n in range(1, 6)]
Shape = dict[str, Any]


def counting_table() -> Tensor:
    """x is followed by x + 1, modulo 12."""
    return torch.eye(VOCAB).roll(1, dims=1) * 10.0


def shift(by: int) -> Tensor:
    """`[12, 12]`: maps the one-hot vector of x to that of x + by."""
    return torch.eye(VOCAB).roll(by, dims=0)


def counting_heads(num_heads: int, *, output: str = "own", token_map: Tensor | None = None) -> Any:
    """Heads that know the counting language: hidden states of a table model are one-hot.

    Heads with matrices shift there. The others shift in the block: 20 times the vector of
    x + 1 + i outweighs x itself before the matrix that shifts by one more.
    """
    heads = MedusaHeads(
        hidden_size=VOCAB,
        vocab_size=VOCAB,
        num_heads=num_heads,
        output=output,
        token_map=token_map,
        zero_init=True,
    )
    rows = slice(None) if token_map is None else token_map
    noise = torch.rand(VOCAB, VOCAB, generator=torch.Generator().manual_seed(4)) / 100  # no ties
    with torch.no_grad():
        for i in range(num_heads):
            if output == "own":
                heads.outputs[i].weight.copy_((shift(2 + i) + noise)[rows])
            else:
                heads.blocks[i][0].weight.copy_(20.0 * shift(1 + i))
        if output == "shared":
            heads.outputs[0].weight.copy_((shift(1) + noise)[rows])
    return heads


def random_heads(num_heads: int, **shape: Any) -> MedusaHeads:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return MedusaHeads(hidden_size=VOCAB, vocab_size=VOCAB, num_heads=num_heads, **shape)


def step_of(
    tokens: Sequence[int], *, max_nodes: int = 64, max_depth: int = 9, **params: Any
) -> Step:
    sampler = Sampler(SamplingParams(**params), prompt=tokens, seed=0, vocab_size=VOCAB)
    return Step(tokens=tokens, max_nodes=max_nodes, max_depth=max_depth, sampler=sampler)


def see(proposer: Proposer, hidden: Tensor, path: Sequence[int]) -> None:
    """Tells a proposer that `path` of a tree with these `[nodes, hidden]` states was accepted."""
    parents = [-1] * len(hidden)
    for before, node in itertools.pairwise(path):
        parents[node] = before
    parents[1:] = [max(parent, 0) for parent in parents[1:]]
    tree = Tree(tokens=[0] * len(hidden), parents=parents)
    output = Output(logits=torch.zeros(len(hidden), VOCAB), hidden=hidden)
    proposer.observe(Outcome(tree=tree, path=path, tokens=[0], output=output))


def one_hot(token: int) -> Tensor:
    return torch.eye(VOCAB)[token : token + 1]


def propose(method: Medusa, tokens: Sequence[int], **budget: int) -> Tree:
    """What a proposer with the state after `tokens[:-1]` proposes."""
    proposer = method.start()
    see(proposer, one_hot(tokens[-2]), [0])
    return proposer.propose(step_of(tokens, **budget))


# Acceptance


@pytest.mark.parametrize("output", ["own", "shared", "target"])
@pytest.mark.parametrize("num_heads", [1, 2, 3, 5])
def test_perfect_heads_are_accepted_at_every_depth(num_heads: int, output: str) -> None:
    runtime = TableRuntime(counting_table())
    heads = counting_heads(num_heads, output=output)
    llm = serve(runtime, Medusa(heads=heads, runtime=runtime, choices=CHAIN[:num_heads]))
    result = llm.generate([3, 4], max_new_tokens=36)
    assert result.tokens == [(5 + i) % VOCAB for i in range(36)]
    rounds = 36 // (num_heads + 1)
    assert result.stats.accepted_by_depth[:num_heads] == [rounds] * num_heads
    assert result.stats.steps == rounds


@pytest.mark.parametrize("output", ["own", "shared", "target"])
def test_permuted_heads_are_not(output: str) -> None:
    runtime = TableRuntime(counting_table())
    heads = counting_heads(3, output=output)
    matrices = heads.outputs if output == "own" else [blocks[0] for blocks in heads.blocks]
    with torch.no_grad():
        first = matrices[0].weight.clone()
        for here, there in itertools.pairwise(matrices):
            here.weight.copy_(there.weight)
        matrices[-1].weight.copy_(first)
    llm = serve(runtime, Medusa(heads=heads, runtime=runtime, choices=CHAIN[:3]))
    result = llm.generate([3, 4], max_new_tokens=36)
    assert result.tokens == [(5 + i) % VOCAB for i in range(36)]
    assert result.stats.accepted == 0


def test_heads_of_a_reduced_vocabulary_propose_the_targets_ids() -> None:
    token_map = torch.tensor([9, 2, 5, 7])
    runtime = TableRuntime(counting_table())
    method = Medusa(
        heads=counting_heads(2, token_map=token_map), runtime=runtime, choices=CHAIN[:2]
    )
    assert propose(method, [3, 4]).tokens[:2] == [4, 5]
    assert propose(method, [6, 7]).tokens[2] == 9
    assert {t for i in range(12) for t in propose(method, [i, 0]).tokens[1:]} <= {9, 2, 5, 7}
    assert method.memory() == 2 * (12 * 12 + 12) * 4 + 2 * 4 * 12 * 4 + 4 * 8


@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("num_heads", [1, 2, 3, 5])
def test_default_settings_give_the_plain_text_with_any_heads(
    num_heads: int, dependent: bool
) -> None:
    table = random_table(VOCAB, seed=8)
    plain = serve(TableRuntime(table))
    runtime = TableRuntime(table)
    heads = random_heads(num_heads, dependent=dependent)
    llm = serve(runtime, Medusa(heads=heads, runtime=runtime))
    assert llm.method.num_heads == num_heads
    for params in ({}, {"temperature": 1.0, "seed": 3}, {"repetition_penalty": 1.5}):
        for prompt in ([4], [1, 2, 3]):
            right = plain.generate(prompt, max_new_tokens=40, **params)
            result = llm.generate(prompt, max_new_tokens=40, **params)
            assert result.tokens == right.tokens
            assert result.stats.accepted > 0
            assert len(result.stats.drafted_by_depth) == num_heads


# Dependent heads


def path_heads(num_heads: int, table: Tensor) -> Any:
    """Dependent heads that look at the embedding of the last path token alone.

    The block adds 2000 times that one-hot vector to the hidden state's; the matrix is the target's.
    """
    heads = MedusaHeads(
        hidden_size=VOCAB,
        vocab_size=VOCAB,
        num_heads=num_heads,
        dependent=True,
        zero_init=True,
    )
    with torch.no_grad():
        for i in range(num_heads):
            heads.blocks[i][0].weight[:, -VOCAB:] = 2000.0 * torch.eye(VOCAB)
            heads.outputs[i].weight.copy_(table.T)
    return heads


def test_dependent_heads_see_the_embeddings_of_their_own_path() -> None:
    table = random_table(VOCAB, seed=8)
    runtime = TableRuntime(table)
    method = Medusa(heads=path_heads(3, table), runtime=runtime)
    tree = propose(method, [0, 7])
    assert len({tree.depths[i] for i in range(len(tree))}) == 4
    choices = [()] + [tuple(choice) for choice in method.choices or ()]
    for node in range(1, len(tree)):
        parent, rank = tree.tokens[tree.parents[node]], choices[node][-1]
        best = table[parent].argsort(descending=True).tolist()  # what follows this parent
        assert tree.tokens[node] == best[rank]
    siblings = [tree.tokens[i] for i in range(len(tree)) if choices[i] in ((0, 0), (1, 0))]
    assert len(set(siblings)) == 2, "branches that say the same show nothing"


def test_dependent_heads_with_permuted_embeddings_lose_acceptance() -> None:
    table = random_table(VOCAB, seed=8)

    class Permuted(TableRuntime):
        def embed(self, tokens: Tensor) -> Tensor:
            return super().embed((tokens + 1) % VOCAB)

    accepted = []
    for runtime in (TableRuntime(table), Permuted(table)):
        method = Medusa(heads=path_heads(3, table), runtime=runtime, choices=CHAIN[:3])
        result = serve(runtime, method).generate([1, 2], max_new_tokens=40)
        assert (
            result.tokens == serve(TableRuntime(table)).generate([1, 2], max_new_tokens=40).tokens
        )
        accepted.append(result.stats.acceptance)
    assert accepted[0] == 1.0
    assert accepted[1] < 0.5


@pytest.mark.parametrize("output", ["own", "shared", "target"])
@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_every_path_of_the_tree_is_what_the_heads_say_along_it(
    output: str, dependent: bool, num_layers: int
) -> None:
    runtime = TableRuntime(random_table(VOCAB, seed=8))
    heads = random_heads(4, output=output, dependent=dependent, num_layers=num_layers)
    method = Medusa(heads=heads, runtime=runtime, num_nodes=40)
    hidden = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    proposer = method.start()
    see(proposer, hidden, [0])
    tree = proposer.propose(step_of([3, 5]))
    assert len(tree) == 40 and tree.draft_probs is None
    choices = [()] + [tuple(choice) for choice in method.choices or ()]
    for node in range(1, len(tree)):
        path = tree.path_tokens(node)
        read = torch.tensor([5, *path, 0, 0, 0][:4])
        logits = heads(hidden, runtime.embed(read).unsqueeze(0), project=runtime.project)[0]
        best = logits[len(path) - 1].argsort(descending=True).tolist()
        assert tree.tokens[node] == best[choices[node][-1]]


# The hidden state


def test_the_last_accepted_node_is_read() -> None:
    runtime = TableRuntime(counting_table())
    method = Medusa(heads=counting_heads(1), runtime=runtime, choices=[(0,)])
    hidden = torch.eye(VOCAB)[[2, 4, 6, 8]]
    for path, state in (([0], 2), ([0, 1], 4), ([0, 2], 6), ([0, 1, 3], 8), ([0, 2, 3], 8)):
        proposer = method.start()
        see(proposer, torch.eye(VOCAB)[[0]], [0])  # an older one, which is forgotten
        see(proposer, hidden, path)
        assert proposer.propose(step_of([1, 1])).tokens == [1, state + 2]


def test_prefill_gives_the_first_hidden_state_and_one_token_gives_none() -> None:
    runtime = TableRuntime(counting_table())
    method = Medusa(heads=counting_heads(2), runtime=runtime, choices=CHAIN[:2])
    proposer = method.start()
    assert proposer.propose(step_of([5])) == Tree.chain([5])
    chunk = Tree.chain([1, 2, 3, 4])
    output = Output(logits=torch.zeros(0, VOCAB), hidden=torch.eye(VOCAB)[chunk.tokens])
    proposer.observe(Outcome(tree=chunk, path=range(4), tokens=[], output=output))
    assert proposer.propose(step_of([1, 2, 3, 4, 5])).tokens == [5, 6, 7]
    fresh = method.start()
    assert fresh.propose(step_of([5])) == Tree.chain([5]), "state leaked from another request"


# The tree


def test_the_tree_is_cut_to_the_steps_budget_from_its_end() -> None:
    runtime = TableRuntime(counting_table())
    method = Medusa(heads=counting_heads(3), runtime=runtime)
    whole = propose(method, [3, 4])
    assert len(whole) == 32
    for max_nodes in (1, 2, 7, 31, 32, 100):
        tree = propose(method, [3, 4], max_nodes=max_nodes)
        size = min(max_nodes, 32)
        assert (tree.tokens, tree.parents) == (whole.tokens[:size], whole.parents[:size])
    for max_depth in range(4):
        tree = propose(method, [3, 4], max_depth=max_depth)
        assert max(tree.depths) == max_depth
        assert len(tree) == sum(depth <= max_depth for depth in whole.depths)


def test_choices_make_the_tree_they_say() -> None:
    runtime = TableRuntime(counting_table())
    choices = [[1, 0], [0], [0, 0], [1, 0], [1, 2]]  # (1,) is left out, (1, 0) comes twice
    method = Medusa(heads=counting_heads(2), runtime=runtime, choices=choices)
    assert method.choices == [(1,), (1, 0), (0,), (0, 0), (1, 2)]
    tree = propose(method, [3, 4])
    assert tree.parents == [-1, 0, 1, 0, 3, 1]
    assert tree.tokens[3:5] == [5, 6]
    assert tree.tokens[2] == tree.tokens[4] == 6  # independent heads say the same on each branch


@pytest.mark.parametrize("num_heads", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("width", [1, 2, 12, 50_000])
def test_default_choices(num_heads: int, width: int) -> None:
    largest = default_choices(num_heads, 64, width=width)
    most = sum(width**depth for depth in range(1, num_heads + 1))
    assert len(largest) == min(63, most) == len(set(largest))
    for i, choice in enumerate(largest):
        assert 1 <= len(choice) <= num_heads and max(choice) < width
        assert len(choice) == 1 or choice[:-1] in largest[:i]
        assert choice[-1] == 0 or (*choice[:-1], choice[-1] - 1) in largest[:i]
    for num_nodes in range(1, 64):  # a smaller tree is the best part of a larger one
        assert default_choices(num_heads, num_nodes, width=width) == largest[: num_nodes - 1]
    if num_heads >= 3 and width >= 3:
        assert largest[:3] == [(0,), (0, 0), (1,)]
        assert max(map(len, largest)) >= 3, "no depth"
        assert len({choice[0] for choice in largest}) >= 3, "no breadth"


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_heads": 4}, "this checkpoint has 3 heads; use <= 3"),
        ({"num_heads": 0}, "num_heads"),
        ({"num_nodes": 0}, "num_nodes"),
        ({"choices": [(0, 0, 0, 0)]}, "this checkpoint has 3 heads.*use <= 3"),
        ({"choices": [(0, 0, 0)], "num_heads": 2}, "this checkpoint has 3 heads.*use <= 2"),
        ({"choices": [(0, 12)]}, "less than the heads' vocabulary of 12"),
        ({"choices": [(-1,)]}, "rank"),
        ({"choices": [()]}, "empty"),
        ({"choices": 5}, "choices must be a list of lists"),
        ({"choices": [5]}, "choices must be a list of lists"),
    ],
)
def test_a_tree_that_the_heads_cannot_fill_is_refused(options: Shape, match: str) -> None:
    runtime = TableRuntime(counting_table())
    with pytest.raises(InvalidRequest, match=match):
        Medusa(heads=counting_heads(3), runtime=runtime, **options)
    Medusa(heads=counting_heads(3), runtime=runtime, choices=[(0, 0, 11)])


def test_more_nodes_than_the_runtime_can_run_are_not_made() -> None:
    runtime = TableRuntime(counting_table(), max_nodes=40)
    method = Medusa(heads=counting_heads(3), runtime=runtime, num_nodes=10**9)
    assert method.choices is not None and len(method.choices) == 39
    small = Medusa(heads=counting_heads(3), runtime=runtime, num_nodes=20)
    assert small.choices == method.choices[:19], "control: fewer are fewer"


def test_fewer_heads_than_there_are() -> None:
    runtime = TableRuntime(counting_table())
    heads = counting_heads(5)
    heads.choices = [(0,), (0, 0), (0, 0, 0)]
    assert max(propose(Medusa(heads=heads, runtime=runtime), [3, 4]).depths) == 3
    few = Medusa(heads=heads, runtime=runtime, num_heads=2)
    assert propose(few, [3, 4]).tokens == [4, 5, 6]
    heads.choices = None
    assert max(propose(Medusa(heads=heads, runtime=runtime, num_heads=2), [3, 4]).depths) == 2


# Loading


def test_load_takes_a_folder_or_loaded_heads(tmp_path: Path) -> None:
    runtime = TableRuntime(counting_table())
    target = Target(runtime=runtime, token_texts={}, fingerprint="base")
    heads = counting_heads(3)
    save(heads, tmp_path, base_fingerprint="base", choices=[(0,), (0, 0)])
    for given in (tmp_path, str(tmp_path)):
        method = Medusa.load(target, heads=given)
        assert method.choices == [(0,), (0, 0)]
        assert propose(method, [3, 4]).tokens == [4, 5, 6]
    assert len(propose(Medusa.load(target, heads=heads, num_nodes=5), [3, 4])) == 5
    assert Medusa.load(target, heads=tmp_path, choices=[(1,)]).choices == [(1,)]
    for options in ({}, {"heads": 5}):
        with pytest.raises(InvalidRequest, match="heads must be the folder"):
            Medusa.load(target, **options)
    assert set(Medusa.options()) == {"heads", "num_heads", "choices", "num_nodes"}
    other = Target(runtime=runtime, token_texts={}, fingerprint="other")
    with pytest.raises(IncompatibleModels, match="fingerprint"):
        Medusa.load(other, heads=tmp_path)


def test_heads_of_another_hidden_size_are_refused() -> None:
    runtime = TableRuntime(torch.zeros(13, 13))
    with pytest.raises(IncompatibleModels, match="hidden size 12, the target has 13"):
        Medusa(heads=counting_heads(1), runtime=runtime)


@pytest.mark.parametrize("output", ["own", "target"])
@pytest.mark.parametrize("dependent", [False, True])
def test_heads_and_target_of_different_dtypes_work_together(output: str, dependent: bool) -> None:
    class Half(TableRuntime):
        """Takes and gives bfloat16 only."""

        def project(self, hidden: Tensor) -> Tensor:
            assert hidden.dtype == torch.bfloat16
            return super().project(hidden.float()).bfloat16()

        def embed(self, tokens: Tensor) -> Tensor:
            return super().embed(tokens).bfloat16()

    runtime = Half(counting_table())
    runtime.dtype = torch.bfloat16
    heads = random_heads(3, output=output, dependent=dependent)
    proposer = Medusa(heads=heads, runtime=runtime).start()
    see(proposer, one_hot(3).bfloat16(), [0])
    assert len(proposer.propose(step_of([3, 4]))) == 32
