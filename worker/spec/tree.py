"""DraftTree: guesses behind a committed prefix, and their invariants. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Draft tokens in an order where a parent stands before its children.

    Node 0 is the root, the token that the target has emitted and not yet computed
    (`verified_id`), and is not listed: `token_ids[i]` is node `i + 1`, `parents[i]` is the node
    number of its parent (0 for a child of the root). Children of one parent are distinct tokens
    and stand in descending order of score.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.parents):
            raise ValueError(f"{len(self.token_ids)} tokens but {len(self.parents)} parents")
        seen: set[tuple[int, int]] = set()
        for i, (token, parent) in enumerate(zip(self.token_ids, self.parents, strict=True)):
            if not 0 <= parent <= i:
                raise ValueError(f"node {i + 1} has parent {parent}, must be in 0..{i}")
            if (parent, token) in seen:
                raise ValueError(f"token {token} is twice a child of node {parent}")
            seen.add((parent, token))

    @classmethod
    def chain(cls, token_ids: Sequence[int]) -> "DraftTree":
        return cls(tuple(token_ids), tuple(range(len(token_ids))))

    @property
    def num_nodes(self) -> int:
        """With the root."""
        return len(self.token_ids) + 1

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(len(self.parents)))

    def depths(self) -> tuple[int, ...]:
        """Depth of each listed node; children of the root have 1."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return tuple(depths[1:])

    def truncate(self, max_nodes: int) -> "DraftTree":
        """The first `max_nodes` nodes, root included: parents come first, so it is a tree."""
        keep = max(max_nodes - 1, 0)
        return DraftTree(self.token_ids[:keep], self.parents[:keep])
