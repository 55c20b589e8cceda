"""What people look at: tables, statistics, the page. Functions that take a recording; no verb.

Nothing of the extras (jinja2, pillow) is imported before a page is written.
"""

from hookline.views.diagnosis import diagnosis_data as diagnosis_data
from hookline.views.diagnosis import diagnosis_table as diagnosis_table
from hookline.views.diagnosis import diagnosis_text as diagnosis_text
from hookline.views.html import recording_html as recording_html
from hookline.views.html import report_html as report_html
from hookline.views.html import selection_html as selection_html
from hookline.views.html import summary_html as summary_html
from hookline.views.page import write_page as write_page
from hookline.views.statistics import Statistics as Statistics
from hookline.views.statistics import site_statistics as site_statistics
from hookline.views.tables import inventory_table as inventory_table
from hookline.views.tables import report_table as report_table
from hookline.views.tables import summary_table as summary_table
from hookline.views.tables import summary_text as summary_text
from hookline.views.terminal_plots import terminal_plots as terminal_plots

__all__ = [
    "Statistics", "diagnosis_data", "diagnosis_table", "diagnosis_text", "inventory_table",
    "recording_html", "report_html", "report_table", "selection_html", "site_statistics",
    "summary_html", "summary_table", "summary_text", "terminal_plots", "write_page",
]  # fmt: skip
