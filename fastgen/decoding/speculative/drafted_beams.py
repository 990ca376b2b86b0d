"""Beam search whose steps a small model drafts: the large one reads all beams and what may become of them in one pass.

The search itself is untouched: it asks for the logits of its newest texts, step by step. Where a pass has read all of
them already, as continuations that the small model thought likely, they are there. Else the next pass reads the newest
tokens and new drafts: the small model makes a beam search of its own from the present beams, some steps deep, and each
step's `width` best continuations are drafts. So the result is that of the search alone, whatever is drafted.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from fastgen.models.runtime.tree_step import ROOT


class Branching(Protocol):
    """A model of B sentences whose texts branch (`models.runtime.tree_step.Tree`)."""

    @property
    def nodes(self) -> int: ...
    def grow(self, parents: list[list[int]], tokens: list[list[int]]) -> Tensor: ...


@dataclass
class Passes:
    """What was done: steps of the search, passes of the large and the small model, and nodes that each has run."""

    steps: int = 0
    large_calls: int = 0
    small_calls: int = 0
    large_nodes: int = 0
    small_nodes: int = 0


class _Known:
    """What a model has said of the nodes of a tree that may still be asked for.

    first: logits (B, V) of what follows the prompts.
    """

    def __init__(self, tree: Branching, first: Tensor) -> None:
        self.tree = tree
        self._children: list[dict[tuple[int, int], int]] = [
            {} for _ in range(len(first))
        ]  # by node and token
        self._new: list[list[tuple[int, int]]] = [[] for _ in range(len(first))]
        self._logits: dict[int, Tensor] = {ROOT: first}  # (B, V) by node

    def has(self, sentence: int, parent: int, token: int) -> bool:
        """Whether the logits behind a node and a token are there."""
        return (parent, token) in self._children[sentence]

    def node(self, sentence: int, parent: int, token: int) -> int:
        """The node of a token behind a node, which the next `run` runs if it has not been."""
        known, new = self._children[sentence], self._new[sentence]
        if (parent, token) not in known:
            known[parent, token] = self.tree.nodes + len(new)
            new.append((parent, token))
        return known[parent, token]

    def run(self) -> int:
        """Run the new nodes; return how many of each sentence there were."""
        count = max(map(len, self._new))
        if count:
            start = self.tree.nodes
            padded = [
                new + [new[0] if new else (ROOT, 0)] * (count - len(new)) for new in self._new
            ]
            parents, tokens = (
                [[child[part] for child in new] for new in padded] for part in (0, 1)
            )
            logits = self.tree.grow(parents, tokens)
            self._logits |= {start + place: logits[:, place] for place in range(count)}
            self._new = [[] for _ in self._new]
        return count

    def forget(self, nodes: Sequence[Collection[int]]) -> None:
        """Forget all but these nodes of each sentence and their children."""
        for known, kept in zip(self._children, nodes, strict=True):
            for child in [child for child in known if child[0] not in kept]:
                del known[child]
        used = {node for kept in nodes for node in kept} | {
            n for known in self._children for n in known.values()
        }
        self._logits = {node: logits for node, logits in self._logits.items() if node in used}

    @property
    def vocabulary(self) -> int:
        return next(iter(self._logits.values())).shape[1]

    def logits(self, sentence: int, nodes: Sequence[int]) -> Tensor:
        """(N, V), a copy."""
        return torch.stack([self._logits[node][sentence] for node in nodes])


class _Front(NamedTuple):
    """Texts of a sentence from which is drafted: their nodes in the large model's tree, and scores (N,)."""

    nodes: list[int]
    scores: Tensor


class DraftedBeams:
    """The steps of a beam search over B sentences with M beams.

    Args:
        large, small: the models, with the logits (B, V) of what follows the prompts.
        width: drafts of a step. depth: steps that are drafted.
        ends: tokens behind which no beam goes on. longest: tokens of a text at most.
    """

    def __init__(
        self, large: Branching, small: Branching, first: tuple[Tensor, Tensor], beams: int, width: int, depth: int,
        ends: Sequence[int] = (), longest: float = math.inf,
    ) -> None:  # fmt: skip
        sentences = len(first[0])
        self.large, self.small = _Known(large, first[0]), _Known(small, first[1])
        self.width, self.depth, self.ends = width, depth, list(ends)
        self.longest = longest
        self.passes = Passes()
        self._at = [
            [ROOT] * beams for _ in range(sentences)
        ]  # of each beam, without its newest token
        self._scores = [{ROOT: 0.0} for _ in range(sentences)]  # by node of the large tree
        self._origins: list[dict[int, tuple[int, int]]] = [
            {} for _ in range(sentences)
        ]  # of those: parent and token
        self._same = [
            {ROOT: ROOT} for _ in range(sentences)
        ]  # nodes of the small tree by those of the large one

    def step(self, ids: Tensor) -> Tensor:
        """Return the logits (B * M, V) fp32 of what follows ids (B * M, L); the caller's to change."""
        newest: list[list[int]] = cast(Any, ids[:, -1].view(len(self._at), -1)).tolist()
        self.passes.steps += 1
        each = [
            list(zip(at, tokens, strict=True)) for at, tokens in zip(self._at, newest, strict=True)
        ]
        scores = [self._scores_of(b, children) for b, children in enumerate(each)]
        if not all(
            self.large.has(b, *child) for b, children in enumerate(each) for child in children
        ):
            self._pass(each, scores, int(min(self.depth, self.longest - ids.shape[1])))
        self._at = [
            [self.large.node(b, *child) for child in children] for b, children in enumerate(each)
        ]
        for known, nodes, found in zip(self._scores, self._at, scores, strict=True):
            known.update(zip(nodes, found, strict=True))
        return torch.cat([self.large.logits(b, nodes) for b, nodes in enumerate(self._at)])

    def reorder(self, parents: Tensor) -> None:
        """Let beam m of sentence b continue beam parents[b, m]; parents: (B, M) int64."""
        chosen: list[list[int]] = cast(Any, parents).tolist()
        self._at = [
            [at[parent] for parent in row] for at, row in zip(self._at, chosen, strict=True)
        ]

    def _pass(
        self,
        newest: Sequence[Sequence[tuple[int, int]]],
        scores: Sequence[Sequence[float]],
        depth: int,
    ) -> None:
        """Let the large model read the newest tokens, each behind its node, and drafts of some steps behind them."""
        self.large.forget([set(at) for at in self._at])
        self.small.forget(
            [
                {same[node] for node in at if node in same}
                for same, at in zip(self._same, self._at, strict=True)
            ]
        )
        fronts = [self._begin(b, *each) for b, each in enumerate(zip(newest, scores, strict=True))]
        for _ in range(depth):
            for b, front in enumerate(fronts):
                self._small_nodes(b, front.nodes)
            nodes = self.small.run()
            self.passes.small_nodes += nodes
            self.passes.small_calls += nodes > 0
            fronts = [self._drafted(b, front) for b, front in enumerate(fronts)]
        self.passes.large_nodes += self.large.run()
        self.passes.large_calls += 1

    def _begin(
        self, b: int, children: Sequence[tuple[int, int]], scores: Sequence[float]
    ) -> _Front:
        nodes = [self._large_node(b, *child) for child in children]
        once = dict(
            zip(nodes, scores, strict=True)
        )  # before their first choice all beams are the same
        return _Front(
            list(once), torch.tensor(list(once.values()), dtype=torch.float32, device="cpu")
        )

    def _drafted(self, b: int, front: _Front) -> _Front:
        """The `width` best continuations by the small model."""
        vocabulary = self.large.vocabulary
        log_probs = torch.log_softmax(
            self.small.logits(b, self._small_nodes(b, front.nodes))[:, :vocabulary], 1
        )
        log_probs[:, self.ends] = -torch.inf
        totals = (log_probs + front.scores.to(log_probs)[:, None]).flatten()
        best = totals.topk(min(self.width, len(totals)))
        chosen: list[int] = cast(Any, best.indices).tolist()
        width = log_probs.shape[1]
        nodes = [
            self._large_node(b, front.nodes[index // width], index % width) for index in chosen
        ]
        return _Front(nodes, best.values)

    def _large_node(self, b: int, parent: int, token: int) -> int:
        node = self.large.node(b, parent, token)
        self._origins[b][node] = parent, token
        return node

    def _small_nodes(self, b: int, nodes: Sequence[int]) -> list[int]:
        return [self._small_node(b, node) for node in nodes]

    def _small_node(self, b: int, node: int) -> int:
        """The node of the small model's tree that is the same text as one of the large model's."""
        if node not in self._same[b]:
            parent, token = self._origins[b][node]
            self._same[b][node] = self.small.node(b, self._small_node(b, parent), token)
        return self._same[b][node]

    def _scores_of(self, b: int, children: Sequence[tuple[int, int]]) -> list[float]:
        """The log-probabilities of texts that the search goes on with, by the large model and without edits."""
        parents, tokens = [parent for parent, _ in children], [token for _, token in children]
        log_probs = torch.log_softmax(self.large.logits(b, parents), 1)
        found: list[float] = cast(
            Any,
            log_probs[
                torch.arange(len(tokens), dtype=torch.int64, device=log_probs.device), tokens
            ],
        ).tolist()
        return [
            self._scores[b][parent] + log_prob
            for parent, log_prob in zip(parents, found, strict=True)
        ]
