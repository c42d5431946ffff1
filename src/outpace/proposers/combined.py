"""Combined: the union of several methods' trees within one node budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from outpace.errors import InvalidRequest
from outpace.proposers.base import Method, Outcome, Proposer
from outpace.proposers.draft import Draft
from outpace.proposers.lookahead import Lookahead
from outpace.proposers.lookup import Lookup
from outpace.proposers.medusa import Medusa
from outpace.runtimes.base import Output
from outpace.tree import Tree

if TYPE_CHECKING:
    from outpace.proposers.base import Step, Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Combined(Method):
    """Merges trees by shared prefix; the methods take turns at adding a node, best path first.

    Of the methods that want scratch nodes, the first one gets them. Children count as picked, not
    drawn: `draft_probs` are dropped, which keeps every rule exact. Where the runtime verifies one
    branch only, the first method that proposes anything has the step to itself.

    Args:
        methods: in order of trust.

    Raises:
        InvalidRequest: when `methods` is empty or holds something else.
    """

    name: ClassVar[str] = "combined"

    methods: tuple[Method, ...] = (Lookup(), Lookahead())

    def __post_init__(self) -> None:
        ok = isinstance(self.methods, (tuple, list)) and len(self.methods) > 0
        if not ok or not all(isinstance(method, Method) for method in self.methods):
            raise InvalidRequest(f"methods must be one or more methods, not {self.methods!r}")

    @classmethod
    def options(cls) -> tuple[str, ...]:
        return ("methods", "heads", "draft")

    @classmethod
    def load(cls, target: Target, **options: Any) -> Combined:
        """The union of `methods`, or of lookup and what is trained: `heads`, `draft` or both.

        Trained members propose in every step, so lookahead is left out beside them: its window
        would cost rows for guesses that come too late.

        Args:
            target: the model that is served.
            options: `methods`, or `heads` as for Medusa and `draft` as for Draft.

        Raises:
            InvalidRequest: when `methods` comes with one of the others.
            IncompatibleModels: when the heads or the draft belong to another target.
        """
        trained: list[Method] = []
        if options.get("heads") is not None:
            trained.append(Medusa.load(target, heads=options["heads"]))
        if options.get("draft") is not None:
            trained.append(Draft.load(target, draft=options["draft"]))
        if trained and "methods" in options:
            raise InvalidRequest("methods are the whole union; heads and draft do not go with them")
        if trained:
            return cls(methods=(Lookup(), *trained))
        return cls(**{name: value for name, value in options.items() if name == "methods"})

    def start(self) -> Proposer:
        return CombinedProposer([method.start() for method in self.methods])

    def memory(self) -> int:
        return sum(method.memory() for method in self.methods)


class CombinedProposer(Proposer):
    """Members that each see what became of the merged tree."""

    def __init__(self, members: Sequence[Proposer]) -> None:
        self._members = members
        self._owner: int | None = None  # whose scratch the last tree has

    def propose(self, step: Step) -> Tree:
        if not step.branches:
            return self._propose_alone(step)
        trees = [member.propose(step) for member in self._members]
        scratch = [len(tree) - tree.num_candidates for tree in trees]
        self._owner = next((i for i, num in enumerate(scratch) if num), None)
        if self._owner is None:
            return _merge(trees, max_nodes=step.max_nodes)[0]
        merged, places = _merge(trees, max_nodes=step.max_nodes - scratch[self._owner])
        return _with_scratch(merged, trees[self._owner], places[self._owner])

    def _propose_alone(self, step: Step) -> Tree:
        trees = []
        for member in self._members:
            trees.append(member.propose(step))
            if trees[-1].num_candidates > 1:
                self._owner = len(trees) - 1
                return trees[-1]
        sizes = [len(tree) for tree in trees]  # no candidates: whoever wants scratch may have it
        self._owner = sizes.index(max(sizes))
        return trees[self._owner]

    def observe(self, outcome: Outcome) -> None:
        bare = _without_scratch(outcome)
        for i, member in enumerate(self._members):
            member.observe(outcome if i == self._owner else bare)

    def close(self) -> None:
        for member in self._members:
            member.close()


def _merge(trees: Sequence[Tree], *, max_nodes: int) -> tuple[Tree, list[dict[int, int]]]:
    """The union of the candidates, and for each tree where its nodes stand in it.

    In every round each tree adds one node; nodes that are there already cost nothing.
    """
    tokens, parents = [trees[0].tokens[0]], [-1]
    index: dict[tuple[int, int], int] = {}
    places: list[dict[int, int]] = [{0: 0} for _ in trees]
    turns = [_best_path_first(tree) for tree in trees]
    waiting = list(range(len(trees)))
    while waiting:
        for i in list(waiting):
            for node in turns[i]:
                key = (places[i][trees[i].parents[node]], trees[i].tokens[node])
                is_new = key not in index
                if is_new:
                    if len(tokens) == max_nodes:
                        return Tree(tokens=tokens, parents=parents), places
                    index[key] = len(tokens)
                    tokens.append(key[1])
                    parents.append(key[0])
                places[i][node] = index[key]
                if is_new:
                    break
            else:
                waiting.remove(i)
    return Tree(tokens=tokens, parents=parents), places


def _best_path_first(tree: Tree) -> Iterator[int]:
    """The candidates below the root: along the first children, then the others as they stand."""
    first = {tree.parents[node]: node for node in range(tree.num_candidates - 1, 0, -1)}
    path, node = set(), 0
    while node in first:
        node = first[node]
        path.add(node)
        yield node
    yield from (node for node in range(1, tree.num_candidates) if node not in path)


def _with_scratch(merged: Tree, tree: Tree, places: dict[int, int]) -> Tree:
    """The merged tree with the scratch of `tree`, whose candidates stand at `places`."""
    tokens, parents, places = list(merged.tokens), list(merged.parents), dict(places)
    for node in range(tree.num_candidates, len(tree)):
        if tree.parents[node] not in places:
            return merged  # it hangs from a candidate that was cut
        places[node] = len(tokens)
        tokens.append(tree.tokens[node])
        parents.append(places[tree.parents[node]])
    return Tree(
        tokens=tokens,
        parents=parents,
        num_candidates=len(merged),
        num_scratch_rows=tree.num_scratch_rows,
    )


def _without_scratch(outcome: Outcome) -> Outcome:
    """What a member sees that has no part in the scratch."""
    tree, output = outcome.tree, outcome.output
    num = tree.num_candidates
    if num == len(tree):
        return outcome
    return Outcome(
        tree=Tree(tokens=tree.tokens[:num], parents=tree.parents[:num]),
        path=outcome.path,
        tokens=outcome.tokens,
        output=Output(logits=output.logits[:num], hidden=output.hidden[:num]),
    )
