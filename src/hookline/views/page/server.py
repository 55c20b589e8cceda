"""The ASGI app that serves the pages of recordings and runs.

    /           the table of all values         /measure   statistics of some rows, as JSON
    /site       one value                       /numbers   one value's statistics, as HTML
    /strip      a row's feature maps, as PNG    /state     the state of the recording, as JSON

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

from hookline.display.text import type_and_line
from hookline.display.units import size
from hookline.errors import FolderError, HooklineError, InputError
from hookline.views.page.curves_view import CurvePages
from hookline.views.page.guard import Guard, Rules
from hookline.views.page.items import items_of, text_of
from hookline.views.page.links import choice_of, number, parameters_of, query_of
from hookline.views.page.optional_imports import load
from hookline.views.page.shown_recordings import PageState, notices_of
from hookline.views.page.site_view import site_view
from hookline.views.page.sources import OpenRecordings
from hookline.views.page.templates import environment, script_hashes, sort_keys, table
from hookline.views.page.thumbnails import feature_strip
from hookline.views.page.values import ValueEntry

# Up to this size, values are measured as soon as the page opens; beyond it, on request.
_UNASKED_BYTES = 1024**3
_SECONDS = 0.2  # the time to measure for one answer


@final
class Pages:
    """The server's pages: one method for each address, which takes the address's parameters.

    Args:
        shelf: the recordings to show.

    Raises:
        HooklineError: jinja2 or pillow is not installed.
    """

    def __init__(self, shelf: OpenRecordings) -> None:
        load("PIL.Image")
        self._shelf = shelf
        self._templates = environment()
        self._templates.globals["is_served"] = True
        self._of_runs = CurvePages()

    def index(self, parameters: dict[str, str]) -> tuple[str, str]:
        """Render the table of all values, or the page of a run."""
        run = self._shelf.run()
        if run is not None:
            return self._of_runs.index(run, self._shelf.source.name)
        shown, state = self._shown(parameters)
        report = shown.recording.report()
        to_measure = shown.bytes_to_measure
        names = [name for name in shown.names if name]
        found = table(
            shown.rows,
            shown.columns,
            "site?",
            "strip?",
            sort="gap" if shown.other is not None else None,
            size=size(to_measure),
            start=to_measure <= _UNASKED_BYTES,
        )
        for line, row in zip(found["data"]["lines"], shown.rows, strict=True):
            line["waits"] = row.seen is not None and not shown.is_measured(row.seen)
        return "text/html", self._render(
            "index.html",
            title=" and ".join(_last(name) for name in names),
            home="",
            state=state,
            subtitle="two recordings compared; numbers are those of the first"
            if len(names) > 1
            else shown.about,
            where=", ".join(names),
            compared=names if shown.other is not None else (),
            model_type=report.model_type,
            facts=_facts(shown),
            images=(),
            classes=(),
            n_images=0,
            n_images_left_out=0,
            notices=notices_of(shown),
            embedded=False,
            **found,
            silent=[(site, report.why.get(site, "")) for site in report.silent],
            items=shown.items,
            top="../../" if parameters["items"] else "",
        )

    def site(self, parameters: dict[str, str]) -> tuple[str, str]:
        """Render one value's page."""
        shown, state = self._shown(parameters)
        seen = _named(shown, parameters)
        view = site_view(shown, seen, choice_of(parameters))
        parts = seen.site.path.split(".") if seen.site.path else []
        trail = []
        for k, part in enumerate(parts):
            href = ""
            if k < len(parts) - 1:
                at = str(type(seen.site)(".".join(parts[: k + 1]), "output"))
                if shown.of_site(at):
                    href = f"site?{query_of(shown.of_site(at)[0].place)}"
            trail.append((part, href))
        return "text/html", self._render(
            "site.html", title=view.label, home="./", state=state, view=view, trail=trail,
            here=query_of(seen.place),
        )  # fmt: skip

    def numbers(self, parameters: dict[str, str]) -> tuple[str, str]:
        """Render the statistics of one value, which its page fetches later."""
        shown, _ = self._shown(parameters)
        seen = _named(shown, parameters)
        of_other = parameters.get("of") == "other"
        there = shown.there(seen.place)
        if of_other and there is None:
            raise InputError("the other recording has no such value.\nGo to the start page.")
        with shown.reading():
            found = shown.measure(there if of_other and there else seen, of_other=of_other)
        template = self._templates.get_template("site_parts.html")
        return "text/html", str(template.module.numbers(found))

    def strip(self, parameters: dict[str, str]) -> tuple[str, bytes]:
        """Draw the feature maps of a row as PNG."""
        shown, _ = self._shown(parameters)
        seen = _named(shown, parameters)
        with shown.reading():
            try:
                strip = feature_strip(shown.tensor(seen))
            except (RuntimeError, TypeError):  # torch cannot read the numbers
                strip = None
        if strip is None:
            raise InputError("this value has no feature maps.\nGo to its own page.")
        return "image/png", base64.b64decode(strip.source.partition(",")[2])

    def measure(self, parameters: dict[str, str]) -> tuple[str, str]:
        """Measure some rows and return their cells as JSON."""
        shown, state = self._shown(parameters)
        if parameters.get("state", state) != state:
            return "application/json", "{}"  # the page shows the rows of an older recording
        done, after = shown.measure_some(number(parameters, "from") or 0, _SECONDS)
        lines = []
        for at in done:
            row = shown.rows[at]
            assert row.seen is not None
            lines.append({
                "line": at,
                "cells": [column.text(row) for column in shown.columns],
                "keys": sort_keys(row, shown.columns),
                "bad": row.seen.non_finite > 0,
                "problem": row.seen.problem,
            })  # fmt: skip
        answer = {"lines": lines, "next": after, "notices": notices_of(shown)}
        return "application/json", json.dumps(answer)

    def state(self, _: dict[str, str]) -> tuple[str, str]:
        """Return the state of the recording as JSON, so that a page can notice a new one."""
        try:
            run = self._shelf.run()
        except FolderError as error:
            gone = str(error).splitlines()[0]
            return "application/json", json.dumps({"state": "", "gone": gone})
        state = self._shelf.state() if run is None else run.version
        missing = [
            source.name
            for source in (self._shelf.source, self._shelf.other)
            if source is not None and not source.state()
        ]
        gone = f"{', '.join(missing)} holds no recording now: deleted or being replaced."
        is_gone = bool(missing) and not state
        return "application/json", json.dumps({"state": state, "gone": gone if is_gone else ""})

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

    def _shown(self, parameters: dict[str, str]) -> tuple[PageState, str]:
        """Return what the page shows, of a store the items that the address names."""
        items = parameters["items"]
        return self._shelf.shown(items_of(items) if items else None)

    def _render(self, template: str, **values: Any) -> str:
        return str(self._templates.get_template(template).render(**values))


def make_app(shelf: OpenRecordings, rules: Rules) -> Any:
    """Create the server's ASGI app.

    Args:
        shelf: the recordings to show.
        rules: the rules for requests.

    Raises:
        HooklineError: starlette, jinja2 or pillow is not installed.
    """
    applications, routing = load("starlette.applications"), load("starlette.routing")
    responses, concurrency = load("starlette.responses"), load("starlette.concurrency")
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


def _named(shown: PageState, parameters: dict[str, str]) -> ValueEntry:
    where = (number(parameters, name) for name in ("pass", "call", "backward"))
    return shown.find(parameters.get("at", ""), *where)


def _facts(shown: PageState) -> list[tuple[str, str]]:
    """List the totals at the top of the page as (label, text)."""
    bytes_shown = size(sum(seen.n_bytes for seen in shown.values))
    n_items = shown.items[1]
    sites = "Sites", f"{len(shown.recording.sites):,}"
    if n_items:
        return [sites, ("Items", f"{n_items:,}"), ("Size of those shown", bytes_shown)]
    return [
        sites,
        ("Values", f"{len(shown.values):,}"),
        ("Passes", f"{len(shown.recording.passes):,}"),
        ("Size", bytes_shown),
    ]


def _last(name: str) -> str:
    return name.rstrip("/\\").replace("\\", "/").rpartition("/")[2] or name
