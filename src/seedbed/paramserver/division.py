"""How a learner state is divided among the parameter shards, and joined again.

A shard holds a learner state, too, whose leaves have only the rows that are the shard's; of some it has none.
`Agent.apply` works leaf by leaf, so it applies a part of a gradient to a part of a state.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from seedbed.types import Array, LearnerState, Tree

_LARGE = 0.5
"""A leaf that is larger than this part of a shard's share is cut."""


class Rows(NamedTuple):
    """Rows of a leaf's first axis, from `start` to before `stop`."""

    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class _Whole:
    """A leaf that is not cut."""

    owner: int  # the shard that has it; -1: each has a copy, and that of shard 0 counts


@dataclasses.dataclass(frozen=True)
class _Cut:
    """A leaf that is cut."""

    rows: tuple[Rows, ...]  # by shard


class Division:
    """Which rows of which weights belong to which shard."""

    def __init__(self, gradient: Tree, state: LearnerState, shards: int) -> None:
        """Divides what a gradient changes by bytes among `shards`.

        Both are trees of arrays or of their shapes. Weights are the subtrees of the gradient that the
        optimizer keeps moments of, or if it keeps none, those that are parameters. All else is shard 0's and
        never cut: sums for statistics, and the statistics.
        """
        self.shards = shards
        places = (state.optimizer_state, state.params)
        signatures = [
            {_signature(node) for _, node in _subtrees(tree, "") if _children(node)}
            for tree in places
        ]
        found = [list(_weights(gradient, "", held)) for held in signatures]
        self._known: list[tuple[Any, str, list[_Cut | _Whole]]] = []
        self._loads = [0.0] * shards
        self._cuts: dict[Any, list[_Cut | _Whole]] = {}  # by the signature of a tree
        weights = found[0] or found[1]
        self._share = (
            sum(_bytes(leaf) for _, node in weights for leaf in jax.tree.leaves(node)) / shards
        )
        for name, node in weights:
            cuts = iter(self._divide(jax.tree.leaves(node)))
            numbered = jax.tree.map(lambda leaf: next(cuts), node)  # noqa: B023
            for (part_name, part), (_, part_cuts) in zip(
                _subtrees(node, name), _subtrees(numbered, name), strict=False
            ):
                leaves = jax.tree.leaves(part_cuts, is_leaf=lambda x: isinstance(x, (_Whole, _Cut)))
                self._known.append((_signature(part), part_name, leaves))

    def _divide(self, leaves: Sequence[Array]) -> list[_Cut | _Whole]:
        """Returns how each leaf is cut: the largest first, each for the shard that has least."""
        cuts: list[_Cut | _Whole] = [_Whole(-1)] * len(leaves)
        for index in sorted(range(len(leaves)), key=lambda i: -_bytes(leaves[i])):
            leaf = leaves[index]
            if not leaf.shape:
                continue
            if _bytes(leaf) > _LARGE * self._share and leaf.shape[0] >= self.shards:
                cuts[index] = _cut(leaf.shape[0], self.shards)
                self._loads = [load + _bytes(leaf) / self.shards for load in self._loads]
                continue
            owner = self._loads.index(min(self._loads))
            cuts[index] = _Whole(owner)
            self._loads[owner] += _bytes(leaf)
        return cuts

    def part(self, tree: Tree, shard: int) -> Tree:
        """Returns a shard's part of a learner state, or of a gradient: leaves have the shard's rows."""
        leaves, structure = jax.tree.flatten(tree)
        cuts = self._cuts_of(tree)
        return jax.tree.unflatten(
            structure, [_part(leaf, cut, shard) for leaf, cut in zip(leaves, cuts, strict=True)]
        )

    def join(self, parts: Sequence[Tree], like: Tree) -> Tree:
        """Joins the parts of all shards, as `part` returns them, into new arrays; `like` has their shapes."""
        structure = jax.tree.structure(like)
        leaves = [np.empty(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(like)]
        self.join_into(parts, like, leaves)
        return jax.tree.unflatten(structure, leaves)

    def join_into(self, parts: Sequence[Tree], like: Tree, to: Sequence[np.ndarray]) -> None:
        """Copies the parts of all shards into the leaves of a tree like `like`."""
        columns = zip(*(jax.tree.leaves(part) for part in parts), strict=True)
        for column, cut, leaf in zip(columns, self._cuts_of(like), to, strict=True):
            if isinstance(cut, _Whole):
                np.copyto(leaf, column[max(0, cut.owner)])
                continue
            for rows, part in zip(cut.rows, column, strict=True):
                np.copyto(leaf[rows.start : rows.stop], part)

    def _cuts_of(self, tree: Tree) -> list[_Cut | _Whole]:
        """Returns how each leaf of a tree is cut: a subtree like one of the weights, as that one."""
        signature = _signature(tree)
        if signature not in self._cuts:
            self._cuts[signature] = self._find_cuts(tree)
        return self._cuts[signature]

    def _find_cuts(self, tree: Tree) -> list[_Cut | _Whole]:
        def match(node: Tree, name: str) -> Iterator[_Cut | _Whole]:
            signature, children = _signature(node), _children(node)
            # A single leaf has many of the same shape, so it must have the same name, too.
            found = [
                each
                for each in self._known
                if each[0] == signature and (children or each[1] == name)
            ]
            # Of several alike, the one of the same name.
            found.sort(key=lambda each: each[1] != name)
            if found and signature[1]:
                yield from found[0][2]
            elif children:
                for child_name, child in children:
                    yield from match(child, child_name)
            else:
                yield from (_Whole(0 if leaf.shape else -1) for leaf in jax.tree.leaves(node))

        return list(match(tree, ""))


def _weights(node: Tree, name: str, held: set[Any]) -> Iterator[tuple[str, Tree]]:
    """Yields the largest subtrees of a gradient that are held, too."""
    if _signature(node) in held:
        yield name, node
        return
    for child_name, child in _children(node):
        yield from _weights(child, child_name, held)


def _bytes(leaf: Any) -> int:
    return int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize


def _cut(rows: int, shards: int) -> _Cut:
    edges = [rows * shard // shards for shard in range(shards + 1)]
    return _Cut(tuple(Rows(*edge) for edge in itertools.pairwise(edges)))


def _part(leaf: Array, cut: _Cut | _Whole, shard: int) -> Array:
    if isinstance(cut, _Whole):
        return leaf if cut.owner in (-1, shard) else leaf[:0]
    return leaf[cut.rows[shard].start : cut.rows[shard].stop]


def _children(node: Tree) -> list[tuple[str, Tree]]:
    """Returns the children of a node of a tree, by name; none of a leaf."""
    found, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    return [(jax.tree_util.keystr(path[-1:]), child) for path, child in found if path]


def _subtrees(node: Tree, name: str) -> Iterator[tuple[str, Tree]]:
    """Yields a tree and all trees in it, the largest first."""
    yield name, node
    for child_name, child in _children(node):
        yield from _subtrees(child, child_name)


def _signature(node: Tree) -> tuple[Any, tuple[Any, ...]]:
    """Returns what two trees have in common that can be cut in the same way."""
    leaves = jax.tree.leaves(node)
    return jax.tree.structure(node), tuple(tuple(leaf.shape) for leaf in leaves)
