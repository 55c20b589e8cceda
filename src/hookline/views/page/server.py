"""The ASGI app that serves the pages of recordings and runs.

    /           the table of all values         /measure   statistics of some rows, as JSON
    /site       one value                       /numbers   one value's statistics, as HTML
    /strip      a row's feature maps, as PNG    /state     the state of the recording, as JSON

The page of two recordings is `/`, too. It asks for this:

    /comparison the comparison, as JSON

Of a store, `/items/5,17/` shows other items: all addresses above exist below it, too.
`/items?items=5,17`, which the form asks for, leads there.

The page of a run is `/`, too. It asks for these:

    /new        the steps that it lacks         /ranks     one site's numbers of each rank

No part of an address is used as a file name.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any, final

from hookline.display.text import plural, type_and_line
from hookline.display.units import size
from hookline.errors import FolderError, HooklineError, InputError
from hookline.util.optional import how_to_install, load
from hookline.views.page.curves_view import CurvePages
from hookline.views.page.entries import ValueEntry
from hookline.views.page.guard import Guard, Rules
from hookline.views.page.links import choice_of, items_of, number, parameters_of, query_of, text_of
from hookline.views.page.page_state import PageState, notices_of
from hookline.views.page.pictures import feature_strip
from hookline.views.page.render import environment, script_hashes, sort_keys, table
from hookline.views.page.results import comparison_data, comparison_title, last_part
from hookline.views.page.site_view import site_view
from hookline.views.page.sources import OpenRecordings
from hookline.views.pixels import PAGE_NEEDS

_NEEDS = "hookline view needs starlette and uvicorn"
SERVER_NEEDS = _NEEDS, how_to_install("cli", "page"), HooklineError
# Up to this size, values are measured as soon as the page opens; beyond it, on request.
_UNASKED_BYTES = 1024**3
_SECONDS = 0.2  # the time to measure for one answer


@final
class Pages:
    """The server's pages: one method for each address, which takes the address's parameters.

    Args:
        shelf: the recordings to show.
    """

    def __init__(self, shelf: OpenRecordings) -> None:
        load("PIL.Image", *PAGE_NEEDS)
        self._shelf = shelf
        self._templates = environment()
        self._templates.globals["is_served"] = True
        self._of_comparisons = environment("comparison")
        self._of_comparisons.globals["is_served"] = True
        self._of_runs = CurvePages()

    def index(self, parameters: dict[str, str]) -> tuple[str, str]:
        """Render the table of all values, or the page of a run."""
        run = self._shelf.run()
        if run is not None:
            return self._of_runs.index(run, self._shelf.source.name)
        page, state = self._page(parameters)
        if page.other is not None:
            return self._compared(page, state)
        report = page.recording.report()
        to_measure = page.bytes_to_measure
        variables = table(
            page.rows,
            page.columns,
            "site?",
            "strip?",
            size=size(to_measure),
            start=to_measure <= _UNASKED_BYTES,
        )
        for line, row in zip(variables["data"]["lines"], page.rows, strict=True):
            line["waits"] = row.entry is not None and not page.is_measured(row.entry)
        return "text/html", self._render(
            "index.html",
            title=last_part(page.names[0]),
            home="",
            state=state,
            subtitle=page.about,
            where=page.names[0],
            model_type=report.model_type,
            facts=_facts(page),
            images=(),
            classes=(),
            n_images=0,
            n_images_left_out=0,
            notices=notices_of(page),
            embedded=False,
            **variables,
            silent=[(site, report.why.get(site, "")) for site in report.silent],
            items=page.items,
            top="../../" if parameters["items"] else "",
        )

    def _compared(self, page: PageState, state: str) -> tuple[str, str]:
        """Render the page of two recordings, which asks for their comparison."""
        text = self._of_comparisons.get_template("comparison.html").render(
            title=comparison_title(page.names),
            home="",
            state=state,
            names=page.names,
            data={},
            of_what=f"{plural(len(page.values), 'value')}, {_bytes_shown(page)}",
        )
        return "text/html", str(text)

    def comparison(self, parameters: dict[str, str]) -> tuple[str, str]:
        """Compare the two recordings; return the comparison as JSON, or why there is none."""
        try:
            page, _ = self._page(parameters)
            if page.other is None:
                raise InputError("only one folder is shown.\nGive two: hookline view DIR DIR2.")
            made = self._shelf.comparison()
        except HooklineError as error:
            return "application/json", json.dumps({"problem": str(error).splitlines()})
        entries = [page.entry_at(row.site) for row in made]
        links = ["" if entry is None else query_of(entry.place) for entry in entries]
        return "application/json", json.dumps(comparison_data(made, links))

    def site(self, parameters: dict[str, str]) -> tuple[str, str]:
        """Render one value's page."""
        page, state = self._page(parameters)
        entry = _named(page, parameters)
        made = None if page.other is None else self._shelf.finished_comparison
        view = site_view(page, entry, choice_of(parameters), made)
        parts = entry.site.path.split(".") if entry.site.path else []
        trail = []
        for k, part in enumerate(parts):
            href = ""
            if k < len(parts) - 1:
                at = str(type(entry.site)(".".join(parts[: k + 1]), "output"))
                if page.of_site(at):
                    href = f"site?{query_of(page.of_site(at)[0].place)}"
            trail.append((part, href))
        return "text/html", self._render(
            "site.html", title=view["label"], home="./", state=state, view=view, trail=trail,
            here=query_of(entry.place), up="All values" if page.other is None else "The comparison",
        )  # fmt: skip

    def numbers(self, parameters: dict[str, str]) -> tuple[str, str]:
        """Render the statistics of one value, which its page fetches later."""
        page, _ = self._page(parameters)
        entry = _named(page, parameters)
        of_other = parameters.get("of") == "other"
        if of_other and page.twin(entry.place) is None:
            raise InputError("the other recording has no such value.\nGo to the start page.")
        with page.reading():
            entry = page.measure(entry, of_other=of_other)
        template = self._templates.get_template("site_parts.html")
        return "text/html", str(template.module.numbers(entry))

    def strip(self, parameters: dict[str, str]) -> tuple[str, bytes]:
        """Draw the feature maps of a row as PNG."""
        page, _ = self._page(parameters)
        entry = _named(page, parameters)
        with page.reading():
            try:
                strip = feature_strip(page.tensor(entry))
            except (RuntimeError, TypeError):  # torch cannot read the numbers
                strip = None
        if strip is None:
            raise InputError("this value has no feature maps.\nGo to its own page.")
        return "image/png", base64.b64decode(strip.source.partition(",")[2])

    def measure(self, parameters: dict[str, str]) -> tuple[str, str]:
        """Measure some rows and return their cells as JSON."""
        page, state = self._page(parameters)
        if parameters.get("state", state) != state:
            return "application/json", "{}"  # the page shows the rows of an older recording
        measured, after = page.measure_some(number(parameters, "from") or 0, _SECONDS)
        lines = []
        for index in measured:
            row = page.rows[index]
            assert row.entry is not None
            lines.append({
                "line": index,
                "cells": [column.text(row) for column in page.columns],
                "keys": sort_keys(row, page.columns),
                "bad": row.entry.non_finite > 0,
                "problem": row.entry.problem,
            })  # fmt: skip
        answer = {"lines": lines, "next": after, "notices": notices_of(page)}
        return "application/json", json.dumps(answer)

    def state(self, _: dict[str, str]) -> tuple[str, str]:
        """Return the state of the recording as JSON, so that a page can notice a new one."""
        try:
            run = self._shelf.run()
        except FolderError as error:
            problem = str(error).splitlines()[0]
            return "application/json", json.dumps({"state": "", "gone": problem})
        state = self._shelf.state() if run is None else run.version
        missing = [
            source.name
            for source in (self._shelf.source, self._shelf.other)
            if source is not None and not source.state()
        ]
        problem = ""
        if missing and not state:
            problem = f"{', '.join(missing)} holds no recording now: deleted or being replaced."
        return "application/json", json.dumps({"state": state, "gone": problem})

    def new(self, parameters: dict[str, str]) -> tuple[str, str]:
        """Return the steps of a run that a page lacks as JSON; without a run, why."""
        try:
            run = self._shelf.run()
            if run is not None:
                return self._of_runs.new(run, parameters)
        except FolderError:
            pass  # `state` says what is wrong
        return self.state(parameters)

    def ranks(self, parameters: dict[str, str]) -> tuple[str, str]:
        """Return the numbers of each rank at a site of a run as JSON."""
        run = self._shelf.run()
        if run is None:
            raise InputError("this folder holds no run.\nGo to the start page.")
        return self._of_runs.ranks(run, parameters)

    def problem(self, error: Exception) -> tuple[int, str]:
        """Render the page of an error; return the HTTP status and the page."""
        if isinstance(error, FolderError):
            status, title = 503, "This recording cannot be shown"
            lines = str(error).splitlines()
            lines.append("This page shows the recording as soon as it can be read.")
        elif isinstance(error, HooklineError):
            status, title, lines = 404, "There is nothing to show", str(error).splitlines()
        else:
            status, title = 500, "This page could not be made"
            lines = [type_and_line(error), "The terminal that serves it shows more."]
        # A page of a run that cannot be read waits for any that can.
        state = "" if self._shelf.is_run() else self._shelf.state()
        return status, self._render(
            "message.html", title=title, home="./", lines=lines,
            **({"state": state} if status == 503 else {}),
        )  # fmt: skip

    def _page(self, parameters: dict[str, str]) -> tuple[PageState, str]:
        """Return what the page shows, of a store the items that the address names."""
        items = parameters["items"]
        return self._shelf.page(items_of(items) if items else None)

    def _render(self, template: str, **values: Any) -> str:
        return str(self._templates.get_template(template).render(**values))


def make_app(shelf: OpenRecordings, rules: Rules) -> Any:
    """Create the server's ASGI app."""
    parts = "applications", "routing", "responses", "concurrency"
    applications, routing, responses, concurrency = (
        load(f"starlette.{part}", *SERVER_NEEDS) for part in parts
    )
    pages = Pages(shelf)

    def answer(make: Callable[[dict[str, str]], tuple[str, Any]], scope: Any) -> Any:
        try:
            parameters = parameters_of(scope["query_string"])
            parameters["items"] = scope["path_params"].get("items", "")
            media, content = make(parameters)
        except HooklineError as error:
            status, content = pages.problem(error)
            return _response(responses, content, "text/html", status)
        return _response(responses, content, media, 200)

    def route(path: str, make: Callable[[dict[str, str]], tuple[str, Any]]) -> Any:
        async def endpoint(request: Any) -> Any:
            return await concurrency.run_in_threadpool(answer, make, request.scope)

        return routing.Route(path, endpoint)

    def choose(request: Any) -> Any:
        """Lead from what the form asks for to the page of the items."""
        try:
            text = text_of(items_of(request.query_params.get("items", "")))
        except HooklineError as error:
            status, content = pages.problem(error)
            return _response(responses, content, "text/html", status)
        return responses.RedirectResponse(f"items/{text}/", 303)

    def failed(_: Any, error: Exception) -> Any:
        status, content = pages.problem(error)
        return _response(responses, content, "text/html", status)

    def missing(_: Any, __: Exception) -> Any:
        return failed(None, InputError("this address does not exist.\nGo to the start page."))

    routes = [
        route("/", pages.index), route("/site", pages.site), route("/numbers", pages.numbers),
        route("/strip", pages.strip), route("/measure", pages.measure),
        route("/comparison", pages.comparison),
        route("/state", pages.state), route("/new", pages.new), route("/ranks", pages.ranks),
    ]  # fmt: skip
    routes += [routing.Route("/items", choose), routing.Mount("/items/{items}", routes=[*routes])]
    handlers = {404: missing, Exception: failed}
    return Guard(
        applications.Starlette(routes=routes, exception_handlers=handlers), rules, script_hashes()
    )


def _response(responses: Any, content: str | bytes, media: str, status: int) -> Any:
    # Module names may have lone surrogates, which strict UTF-8 refuses.
    body = content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace")
    return responses.Response(body, status, media_type=media)


def _named(page: PageState, parameters: dict[str, str]) -> ValueEntry:
    where = (number(parameters, name) for name in ("pass", "call", "backward"))
    return page.find(parameters.get("at", ""), *where)


def _bytes_shown(page: PageState) -> str:
    return size(sum(entry.n_bytes for entry in page.values))


def _facts(page: PageState) -> list[tuple[str, str]]:
    """List the totals at the top of the page as (label, text)."""
    bytes_shown = _bytes_shown(page)
    n_items = page.items[1]
    sites = "Sites", f"{len(page.recording.sites):,}"
    if n_items:
        return [sites, ("Items", f"{n_items:,}"), ("Size of those shown", bytes_shown)]
    return [
        sites,
        ("Values", f"{len(page.values):,}"),
        ("Passes", f"{len(page.recording.passes):,}"),
        ("Size", bytes_shown),
    ]
