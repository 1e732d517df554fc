"""Pages: which pages of the cache are free, which requests share one, and which hold tokens that a later prompt may begin with.

A page that no request uses keeps its content until it is needed for another: a prompt that begins with the same tokens then finds
it (Kwon et al. 2023, arXiv:2309.06180, section 4.4). Contents are found by the tokens themselves, so two never get mixed up, and
by the adapter with which they were computed.
"""

from collections import OrderedDict
from collections.abc import Sequence

__all__ = ["SPARE_PAGE", "PagePool"]

SPARE_PAGE = 0
"""The page that no request owns: what is computed for padding is written there."""


class PagePool:
    """The pages 1 to `num_pages - 1`, of `page_size` tokens each; page 0 is the spare one."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_pages))  # the one to be used next is first
        self._users = [0] * num_pages
        self._found: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}  # (page, number) of a content
        self._content: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._num_contents = 0

    @property
    def num_free(self) -> int:
        """The number of pages that no request uses."""
        return len(self._free)

    def take(self) -> int:
        """A page for a request; what it held is forgotten."""
        page, _ = self._free.popitem(last=False)
        if page in self._content:
            del self._found[self._content.pop(page)]
        self._users[page] = 1
        return page

    def release(self, pages: Sequence[int]) -> None:
        """A request does not use these pages any more. The last of them will be taken first, as nothing is found behind it."""
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page] == 0:
                self._free[page] = None
                self._free.move_to_end(page, last=page in self._content)

    def share(self, tokens: Sequence[int], max_tokens: int, root: int = 0) -> list[tuple[int, int]]:
        """The `(page, number of its content)` of the pages that hold the beginning of `tokens`, at most `max_tokens` of them,
        behind `root`. They are in use from now on."""
        found: list[tuple[int, int]] = []
        while (len(found) + 1) * self.page_size <= max_tokens:
            key = self._key(found[-1][1] if found else root, tokens, len(found))
            if key not in self._found:
                break
            found.append(self._found[key])
            page = found[-1][0]
            self._users[page] += 1
            self._free.pop(page, None)
        return found

    def remember(self, page: int, parent: int, tokens: Sequence[int], index: int) -> int:
        """Page number `index` of `tokens`, behind the content `parent`, is complete; returns its number, at least 1.

        The first page is behind a root, whose number is not positive: pages of different roots are never shared.

        If another page has the same content already, that one stays the page that is found.
        """
        key = self._key(parent, tokens, index)
        if key not in self._found:
            self._num_contents += 1
            self._found[key] = page, self._num_contents
            self._content[page] = key
        return self._found[key][1]

    def forget(self) -> None:
        """Find no content any more, because the parameters have changed."""
        self._found.clear()
        self._content.clear()

    def _key(self, parent: int, tokens: Sequence[int], index: int) -> tuple[int, tuple[int, ...]]:
        """What a content is found by: the content before it, and its tokens."""
        return parent, tuple(tokens[index * self.page_size : (index + 1) * self.page_size])
