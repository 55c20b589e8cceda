"""Functions that display the result of a verb: plots, statistics, the page.

The packages of extras (jinja2, pillow) are imported only when a page is written.
"""

from hookline.views.page import write_page as write_page
from hookline.views.statistics import Statistics as Statistics
from hookline.views.statistics import site_statistics as site_statistics
from hookline.views.terminal_plots import terminal_plots as terminal_plots

__all__ = ["Statistics", "site_statistics", "terminal_plots", "write_page"]
