"""The page: a recording as one HTML file that needs nothing else."""

from hookline.views.page.write import write_page as write_page

__all__ = ["write_page"]
