"""Speculative beam search: one pass of the large model runs all beams and drafted continuations.

The search itself is unchanged and requests the logits of its newest texts step by step. If an
earlier pass has run all of them as drafts, their logits are already there. Otherwise the next pass
runs the newest tokens and new drafts. To draft, the small model runs a beam search of its own from
the current beams, `depth` steps deep, and the `width` best continuations of each step are drafts.
The result is that of the search alone, whatever is drafted.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from fastgen.models.runtime.tree_step import ROOT


class Branching(Protocol):
    """Model that runs trees of tokens for B sentences, as `models.runtime.tree_step.Tree` does."""

    @property
    def nodes(self) -> int: ...
    def grow(self, parents: list[list[int]], tokens: list[list[int]]) -> Tensor: ...


@dataclass
class Passes:
    """Statistics of a search.

    Attributes:
        steps: decode steps of the search.
        large_calls: passes of the large model.
        small_calls: passes of the small model.
        large_nodes: nodes per sentence that the large model has run.
        small_nodes: nodes per sentence that the small model has run.
    """

    steps: int = 0
    large_calls: int = 0
    small_calls: int = 0
    large_nodes: int = 0
    small_nodes: int = 0


class _Known:
    """Logits of the nodes of a tree that may still be needed.

    Args:
        tree: runs new nodes.
        first: (B, V), logits of the first new token.
    """

    def __init__(self, tree: Branching, first: Tensor) -> None:
        self.tree = tree
        # Node by parent node and token, for each sentence.
        self._children: list[dict[tuple[int, int], int]] = [{} for _ in range(len(first))]
        self._new: list[list[tuple[int, int]]] = [[] for _ in range(len(first))]
        self._logits: dict[int, Tensor] = {ROOT: first}  # (B, V) by node

    def has(self, sentence: int, parent: int, token: int) -> bool:
        """Return whether the child of a node by a token is known."""
        return (parent, token) in self._children[sentence]

    def node(self, sentence: int, parent: int, token: int) -> int:
        """Return the child of a node by a token; the next `run` runs it if it is new."""
        known, new = self._children[sentence], self._new[sentence]
        if (parent, token) not in known:
            known[parent, token] = self.tree.nodes + len(new)
            new.append((parent, token))
        return known[parent, token]

    def run(self) -> int:
        """Run the new nodes; return their number per sentence, padding included."""
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
        """Drop the logits of all but these nodes of each sentence and their children."""
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
        """Return a copy of the logits of N nodes, (N, V)."""
        return torch.stack([self._logits[node][sentence] for node in nodes])


class _Front(NamedTuple):
    """Texts of a sentence that the next draft step extends.

    Attributes:
        nodes: their N nodes in the large model's tree.
        scores: (N,), running scores.
    """

    nodes: list[int]
    scores: Tensor


class DraftedBeams:
    """Decode steps of a beam search over B sentences with M beams.

    Args:
        large: the large model.
        small: the small model.
        first: (B, V) each, logits of the first new token by the large and the small model.
        beams: M.
        width: number of drafts per draft step and sentence.
        depth: number of draft steps.
        ends: tokens after which no beam continues.
        longest: maximum number of tokens of a text.

    Attributes:
        passes: statistics of the search.
    """

    def __init__(
        self, large: Branching, small: Branching, first: tuple[Tensor, Tensor], beams: int,
        width: int, depth: int, ends: Sequence[int] = (), longest: float = math.inf,
    ) -> None:  # fmt: skip
        sentences = len(first[0])
        self.large, self.small = _Known(large, first[0]), _Known(small, first[1])
        self.width, self.depth, self.ends = width, depth, list(ends)
        self.longest = longest
        self.passes = Passes()
        # Node of each beam, without its newest token.
        self._at = [[ROOT] * beams for _ in range(sentences)]
        # By node of the large tree: score, parent and token, node of the small tree.
        self._scores = [{ROOT: 0.0} for _ in range(sentences)]
        self._origins: list[dict[int, tuple[int, int]]] = [{} for _ in range(sentences)]
        self._same = [{ROOT: ROOT} for _ in range(sentences)]

    def step(self, ids: Tensor) -> Tensor:
        """Run the newest token of ids (B * M, L).

        Returns:
            Logits (B * M, V) fp32, which the caller may modify.
        """
        newest: list[list[int]] = cast(Any, ids[:, -1].view(len(self._at), -1)).tolist()
        self.passes.steps += 1
        # Parent node and newest token of each beam.
        beams = [
            list(zip(at, tokens, strict=True)) for at, tokens in zip(self._at, newest, strict=True)
        ]
        scores = [self._scores_of(b, children) for b, children in enumerate(beams)]
        if not all(
            self.large.has(b, *child) for b, children in enumerate(beams) for child in children
        ):
            self._pass(beams, scores, int(min(self.depth, self.longest - ids.shape[1])))
        self._at = [
            [self.large.node(b, *child) for child in children] for b, children in enumerate(beams)
        ]
        for known, nodes, node_scores in zip(self._scores, self._at, scores, strict=True):
            known.update(zip(nodes, node_scores, strict=True))
        return torch.cat([self.large.logits(b, nodes) for b, nodes in enumerate(self._at)])

    def reorder(self, parents: Tensor) -> None:
        """Make beam m of sentence b continue beam parents[b, m]; parents is (B, M) int64."""
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
        """Run the newest tokens and new drafts through the large model in one pass.

        Args:
            newest: parent node and token of each beam, for each sentence.
            scores: running scores of the beams.
            depth: number of draft steps.
        """
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
        # Before the first selection all beams are the same node.
        unique = dict(zip(nodes, scores, strict=True))
        return _Front(
            list(unique), torch.tensor(list(unique.values()), dtype=torch.float32, device="cpu")
        )

    def _drafted(self, b: int, front: _Front) -> _Front:
        """Return the `width` best continuations under the small model."""
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
        """Return the small model's node for the text of a large model's node."""
        if node not in self._same[b]:
            parent, token = self._origins[b][node]
            self._same[b][node] = self.small.node(b, self._small_node(b, parent), token)
        return self._same[b][node]

    def _scores_of(self, b: int, children: Sequence[tuple[int, int]]) -> list[float]:
        """Return log-probabilities of texts under the large model, before transforms.

        Args:
            b: the sentence.
            children: parent node and newest token of each text.
        """
        parents, tokens = [parent for parent, _ in children], [token for _, token in children]
        log_probs = torch.log_softmax(self.large.logits(b, parents), 1)
        token_scores: list[float] = cast(
            Any,
            log_probs[
                torch.arange(len(tokens), dtype=torch.int64, device=log_probs.device), tokens
            ],
        ).tolist()
        return [
            self._scores[b][parent] + log_prob
            for parent, log_prob in zip(parents, token_scores, strict=True)
        ]
