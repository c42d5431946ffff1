from __future__ import annotations

from tiny import TableRuntime, random_table, serve

from outpace.proposers.base import Step
from outpace.proposers.plain import Plain
from outpace.sampling import Sampler, SamplingParams
from outpace.tree import Tree


def test_the_root_alone_whatever_the_budget() -> None:
    sampler = Sampler(SamplingParams(), prompt=[3, 1, 3, 1], seed=0, vocab_size=5)
    step = Step(tokens=sampler.tokens, max_nodes=64, max_depth=9, sampler=sampler)
    assert Plain().start().propose(step) == Tree.chain([1])


def test_every_token_costs_a_forward_of_one_node() -> None:
    runtime = TableRuntime(random_table(5, seed=0))
    result = serve(runtime).generate([3, 1], max_new_tokens=6)
    decoding = [work for work in runtime.passes if work.rows]
    assert [len(work.tree) for work in decoding] == [1] * 6
    assert result.stats.tokens_per_step == 1.0 and result.stats.acceptance is None
