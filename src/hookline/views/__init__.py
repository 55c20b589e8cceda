"""What people look at: plots, statistics, the page. Functions that take a result of a verb.

Nothing of the extras (jinja2, pillow) is imported before a page is written.
"""

from hookline.views.page import write_page as write_page
from hookline.views.statistics import Statistics as Statistics
from hookline.views.statistics import site_statistics as site_statistics
from hookline.views.terminal_plots import terminal_plots as terminal_plots

__all__ = ["Statistics", "site_statistics", "terminal_plots", "write_page"]
