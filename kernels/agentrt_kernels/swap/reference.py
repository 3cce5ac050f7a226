"""Pages to and from one contiguous stretch, so that many pages cross the bus in one copy: the definition."""

from torch import Tensor

from agentrt_kernels.pages import PageLayout


def gather_pages(pool: Tensor, layout: PageLayout, pages_P: Tensor) -> Tensor:
    """Copies of the pages, one after another: `staged_PE`."""
    return pool.view(-1, layout.page_stride)[pages_P]


def scatter_pages(pool: Tensor, layout: PageLayout, pages_P: Tensor, staged_PE: Tensor) -> None:
    """Put `staged_PE` into the pages; no page may be named twice."""
    pool.view(-1, layout.page_stride)[pages_P] = staged_PE
