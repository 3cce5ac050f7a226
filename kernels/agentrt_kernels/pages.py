"""Where a token's keys and values lie in the page pool.

The pool is one flat tensor. Page p begins at element p * page_stride; in it the layers follow one another, each first
K and then V, each `[kv_heads, page_size, head_dim]`. So one page is one contiguous copy, whatever the number of layers.

A pool in 8 bits has a float32 scale for each head's key and value of a token: they follow the K (or V) they
belong to, `[kv_heads, page_size]`, so a page is still one copy.
"""

from typing import NamedTuple


class PageLayout(NamedTuple):
    """The sizes that fix the place of every element."""

    page_size: int
    """Tokens in a page."""
    num_layers: int
    kv_heads: int
    head_dim: int
    scale_size: int = 0
    """Elements that one scale takes; 0 if there are none."""
    parts: int = 2
    """K and V; 1 where the values are the keys."""

    @property
    def page_stride(self) -> int:
        """Elements of one page."""
        return self.num_layers * self.layer_stride

    @property
    def layer_stride(self) -> int:
        """Elements of one layer within a page, K and V."""
        return self.parts * self._part_stride

    @property
    def kv_stride(self) -> int:
        """Elements from a layer's K to its V within a page; 0 where these are the same."""
        return self._part_stride if self.parts == 2 else 0

    @property
    def _part_stride(self) -> int:
        return self.kv_heads * self.page_size * (self.head_dim + self.scale_size)
