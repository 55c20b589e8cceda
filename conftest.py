"""What is collected, how many examples are tried, and what no process loads that runs no test.

And what a run of tests says last when it breaks off.
"""

from collections.abc import Iterator

import pytest
from hypothesis import settings

# Examples of these inner functions are for reading: they want files, a network, another library
# or a minute.
collect_ignore_glob = [
    "src/hookline/data/images.py",
    "src/hookline/data/array_files.py",
    "src/hookline/models/checkpoints.py",
    "src/hookline/models/from_*.py",
    "src/hookline/models/packages.py",
    "src/hookline/models/preprocessing.py",
    "src/hookline/models/torch*.py",
    "src/hookline/models/demo/train.py",
    "src/hookline/cli/*.py",
    "src/hookline/integrations/*.py",
    # Scripts: they measure the tests, and are run by hand.
    "tests/mutants.py",
    "tests/reached_lines.py",
]

# `make test` tries 15 examples, `make full` more. Neither sets a deadline: a busy machine is not a
# fault of the code.
_USUAL = settings.get_profile(settings.get_current_profile_name())
settings.register_profile("gate", _USUAL, max_examples=15, deadline=None)
settings.register_profile("full", _USUAL, max_examples=200, deadline=None)
settings.load_profile("gate")  # `--hypothesis-profile` loads another one later


def pytest_configure(config: pytest.Config) -> None:
    """Load the fixtures where tests run: who hands files to workers need not wait for torch."""
    if config.getoption("dist", "no") == "no":
        config.pluginmanager.import_plugin("schedule")
        config.pluginmanager.import_plugin("shared_fixtures")


_internal_errors: list[str] = []


def pytest_internalerror(excrepr: object) -> None:
    """Keep what broke the run off, of pytest itself or of a worker."""
    _internal_errors.append(str(excrepr))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> Iterator[None]:
    """Say which tests failed before the run broke off: pytest keeps that to itself.

    At the end, where someone looks first who has only the last lines of a log.
    """
    yield
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if exitstatus != pytest.ExitCode.INTERNAL_ERROR or reporter is None:
        return
    reporter.summary_failures()
    reporter.summary_errors()
    reporter.section("what broke the run off first")
    reporter.write_line("\n".join(_internal_errors[0].splitlines()[-10:]))
    reporter.short_test_summary()
