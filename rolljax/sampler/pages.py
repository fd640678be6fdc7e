"""KV pages of one shard, on the host: which are free, which are in use, and the tokens that the others hold.

Pages that hold a prefix of a token stream form a tree: a node is a page, and its path from the root spells the tokens.
A request that reads a page locks its node and all nodes above it. Unlocked pages stay for later requests with the same
prefix until their memory is needed; then the least recently used leaf is evicted first. A page is written only by the
one request that owns it, before it enters the tree: to continue from a partly filled page, copy it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal

Match = Literal["turns", "any", "off"]
TOKEN_BYTES = 4


class Node:
    """One page in the tree. `data`: its tokens, as int32 bytes; a page that is not full has no children."""

    __slots__ = ("children", "data", "ends", "in_tree", "page", "parent", "refs")

    def __init__(self, page: int, data: bytes, parent: Node | None) -> None:
        self.page, self.data, self.parent = page, data, parent
        self.children: dict[bytes, Node] = {}
        self.ends: dict[bytes, Node] = {}
        """Beginnings of children at which a complete prompt or answer ended."""
        self.refs = 0
        self.in_tree = True


@dataclasses.dataclass(frozen=True)
class CachedPrefix:
    """A cached beginning: `length` tokens, in the full pages `nodes` and the first tokens of `tail`'s page."""

    nodes: list[Node]
    tail: Node | None
    length: int


class PageCache:
    """All pages of one shard.

    Args:
      chunk: tokens; at its multiples every beginning may be shared under the rule 'turns'.
    """

    def __init__(self, num_pages: int, page_size: int, rule: Match, chunk: int) -> None:
        self.num_pages, self.page_size, self.rule, self.chunk = num_pages, page_size, rule, chunk
        self._free = list(range(num_pages - 1, -1, -1))
        self._root = Node(-1, b"", None)
        self._leaves: collections.OrderedDict[Node, None] = collections.OrderedDict()
        """Unlocked leaves, least recently used first."""
        self.num_cached = 0
        """Unlocked pages in the tree."""
        self.num_shared = 0
        """Pages that two or more have locked."""
        self.epoch = 0
        """How often the tree was emptied."""

    @property
    def num_available(self) -> int:
        """Pages that `take` could give."""
        return len(self._free) + self.num_cached

    @property
    def num_used(self) -> int:
        """Pages that requests own or have locked."""
        return self.num_pages - self.num_available

    def take(self, n: int) -> list[int] | None:
        """Return `n` pages that the caller owns, or None if fewer are available."""
        if n > self.num_available:
            return None
        while len(self._free) < n:
            self._evict()
        return [self._free.pop() for _ in range(n)]

    def release(self, pages: Iterable[int]) -> None:
        """Give back pages that the caller owns."""
        self._free.extend(pages)

    def find(self, data: bytes, limit: int) -> CachedPrefix:
        """Return the longest cached prefix of `data` that the rule allows, at most `limit` tokens of it."""
        if self.rule == "off":
            return CachedPrefix([], None, 0)
        size = self.page_size * TOKEN_BYTES
        data = data[: limit * TOKEN_BYTES]
        path = [self._root]
        while len(path) * size <= len(data):
            child = path[-1].children.get(data[(len(path) - 1) * size : len(path) * size])
            if child is None:
                break
            path.append(child)
        for depth in range(len(path) - 1, -1, -1):  # the deepest node where the rule allows to start
            node, start = path[depth], depth * size
            part = self._longest(node, data[start : start + size])
            if part:
                beginning = data[start : start + part]
                holder = node.ends.get(beginning) or self._holder(node, beginning)
                is_full = part == size
                nodes = [*path[1 : depth + 1], holder] if is_full else path[1 : depth + 1]
                return CachedPrefix(nodes, None if is_full else holder, (start + part) // TOKEN_BYTES)
            if start and (self.rule == "any" or start // TOKEN_BYTES % self.chunk == 0):
                return CachedPrefix(path[1 : depth + 1], None, start // TOKEN_BYTES)
        return CachedPrefix([], None, 0)

    def _longest(self, node: Node, here: bytes) -> int:
        """Return the length in bytes of the longest prefix of `here` that a child starts with and the rule allows."""
        if self.rule == "turns":
            lengths = range(len(here), 0, -TOKEN_BYTES)
            return next((n for n in lengths if here[:n] in node.ends), 0) if node.ends else 0
        best = 0
        for child in node.children.values():
            n = min(len(here), len(child.data))
            if n > best and child.data[:best] == here[:best]:
                while best < n and child.data[best : best + TOKEN_BYTES] == here[best : best + TOKEN_BYTES]:
                    best += TOKEN_BYTES
        return best

    def _holder(self, node: Node, part: bytes) -> Node:
        return next(child for child in node.children.values() if child.data.startswith(part))

    def lock(self, nodes: Iterable[Node]) -> None:
        """Hold nodes for one more user, so that their pages stay."""
        for node in nodes:
            if node.refs == 0 and node.in_tree:
                self.num_cached -= 1
                self._leaves.pop(node, None)
            node.refs += 1
            self.num_shared += node.refs == 2

    def unlock(self, nodes: Sequence[Node]) -> None:
        """Unlock nodes, the ones nearest to the root last."""
        for node in reversed(nodes):
            self.num_shared -= node.refs == 2
            node.refs -= 1
            if node.refs:
                continue
            if node.in_tree:
                self.num_cached += 1
                if not node.children:
                    self._leaves[node] = None
            else:
                self._free.append(node.page)

    def keep(self, above: Sequence[Node], data: bytes, pages: Sequence[int]) -> list[Node]:
        """Put owned `pages`, which hold `data`, into the tree below the locked nodes `above`; return them locked.

        If the tree already has a page with the same tokens, that page is returned and the caller's is released.
        """
        size = self.page_size * TOKEN_BYTES
        node, nodes = (above[-1] if above else self._root), []
        if not pages and node.parent is not None:
            node.parent.ends[node.data] = node
        for i, page in enumerate(pages):
            here = data[i * size : (i + 1) * size]
            child = node.children.get(here)
            if child is None:
                child = node.children[here] = Node(page, here, node)
                self.num_cached += 1
            else:
                self._free.append(page)
            self.lock([child])
            nodes.append(child)
            if (i + 1) * size >= len(data):
                node.ends[here] = child
            node = child
        return nodes

    def clear(self) -> None:
        """Forget the contents of all pages. Pages in use stay with their holders."""
        self.epoch += 1
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            node.in_tree = False
            if node.refs == 0:
                self._free.append(node.page)
                self.num_cached -= 1
        self._leaves.clear()
        self._root = Node(-1, b"", None)

    def _evict(self) -> None:
        node, _ = self._leaves.popitem(last=False)
        self.num_cached -= 1
        self._free.append(node.page)
        node.in_tree = False
        parent = node.parent
        assert parent is not None
        del parent.children[node.data]
        for n in range(TOKEN_BYTES, len(node.data) + 1, TOKEN_BYTES) if parent.ends else ():
            if parent.ends.get(node.data[:n]) is node:
                del parent.ends[node.data[:n]]
        if parent is not self._root and not parent.children and parent.refs == 0:
            self._leaves[parent] = None
            self._leaves.move_to_end(parent, last=False)
