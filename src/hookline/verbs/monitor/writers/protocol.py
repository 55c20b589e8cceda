"""The protocol of a writer of reports: three methods."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from hookline.curves import StepReport


@runtime_checkable
class ReportWriter(Protocol):
    """Writes the reports of a monitor.

    Any object with these three methods may be given as `to=`. If one of them raises, the training
    goes on, and the report is tried again with the next one. After more than three refusals, it is
    left out as soon as the writer takes a later report.
    """

    def start(self, first: StepReport) -> None:
        """Prepare for writing; called with the first report before it is written."""
        ...

    def write(self, report: StepReport) -> None:
        """Write a report: `report.step`, `report.seconds` and `report.numbers()`.

        A step may have two reports: numbers that the user logs after its end come in the second.
        """
        ...

    def close(self) -> None:
        """Finish what is being written. A logger that the user opened stays open."""
        ...


def writer_name(writer: Any) -> str:
    """Return the name of a writer for messages."""
    return str(getattr(writer, "name", type(writer).__name__))
