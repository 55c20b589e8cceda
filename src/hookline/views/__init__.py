"""Functions that display the result of a verb: plots, statistics, the page.

The packages of extras (jinja2, pillow) are imported only when a page is written.
"""

from hookline.statistics.value_statistics import Statistics as Statistics
from hookline.statistics.value_statistics import main_tensor_statistics as main_tensor_statistics
from hookline.views.page import write_page as write_page
from hookline.views.terminal_plots import terminal_plots as terminal_plots
