"""Numbers by site and step: what a monitor has seen, in memory and in the folder of a run."""

from hookline.curves.curves import Curve as Curve
from hookline.curves.curves import Curves as Curves
from hookline.curves.logged_numbers import Logged as Logged
from hookline.curves.logged_numbers import is_single_number as is_single_number
from hookline.curves.logged_numbers import logged_curves as logged_curves
from hookline.curves.numbers_of_statistic import numbers_of as numbers_of
from hookline.curves.numbers_of_statistic import numbers_of_site as numbers_of_site
from hookline.curves.run_folder import RunFolder as RunFolder
from hookline.curves.run_folder import RunReader as RunReader
from hookline.curves.run_folder import is_run as is_run
from hookline.curves.run_folder import open_run as open_run
from hookline.curves.run_folder import run_version as run_version
from hookline.curves.slot_layout import ABSENT as ABSENT
from hookline.curves.slot_layout import NO_TURN as NO_TURN
from hookline.curves.slot_layout import Entry as Entry
from hookline.curves.slot_layout import Layout as Layout
from hookline.curves.step_reports import LOGGED as LOGGED
from hookline.curves.step_reports import Reports as Reports
from hookline.curves.step_reports import StepReport as StepReport
