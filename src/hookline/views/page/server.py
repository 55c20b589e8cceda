"""The ASGI app that serves the pages of recordings and runs.

    /           a recording                     /measure   statistics of some values, as JSON
    /findings   what is wrong with it, as JSON  /maps      one value's maps of numbers, as JSON
    /tokens     norms by token and block, as JSON
    /state      the state of the recording      /flow      what flows into what in a pass, as JSON

The page of two recordings is `/`, too. It asks for this:

    /comparison the comparison, as JSON

Of a store, `/items/5,17/` shows other items: all addresses above exist below it, too.
`/items?items=5,17`, which the form asks for, leads there.

The page of a run is `/`, too. It asks for these:

    /new        the steps that it lacks         /ranks     one site's numbers of each rank

No part of an address is used as a file name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, final

from hookline.display.text import plural, type_and_line
from hookline.display.units import size
from hookline.errors import FolderError, HooklineError, InputError
from hookline.util.optional import how_to_install, load
from hookline.verbs.check.finding import CheckFinding
from hookline.views.page.check_page import check_data, title_of
from hookline.views.page.core import core_data, measured_columns, pack, silent_data
from hookline.views.page.curves_view import CurvePages
from hookline.views.page.entries import ValueEntry
from hookline.views.page.keys import leaf_of
from hookline.views.page.links import choice_of, items_of, number, parameters_of, query_of, text_of
from hookline.views.page.page_state import PageState, gaps_of, notices_of, totals_of
from hookline.views.page.render import script_hashes, template_of
from hookline.views.page.request_guard import Guard, Rules
from hookline.views.page.results import comparison_data, comparison_title, last_part, packed
from hookline.views.page.sources import OpenRecordings
from hookline.views.page.store_page import store_data
from hookline.views.page.token_norms import token_rows
from hookline.views.page.value_maps import tokens_of, value_maps
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
        self._messages, self._of_comparisons, self._of_recordings, self._of_findings = (
            template_of(kind) for kind in ("message", "comparison", "recording", "check")
        )
        self._of_runs = CurvePages()

    def index(self, parameters: dict[str, str]) -> tuple[str, str]:
        """Render the page of a recording, a comparison or a run."""
        run = self._shelf.run()
        if run is not None:
            return self._of_runs.index(run, self._shelf.source.name)
        kept = self._shelf.kept()
        if kept is not None:
            return self._kept(kept)
        page, state = self._page(parameters)
        if page.other is not None:
            return self._compared(page, state)
        report = page.recording.report()
        to_measure = page.bytes_to_measure
        core = core_data(page.rows, page.values) | {
            "measure": {"size": size(to_measure), "start": to_measure <= _UNASKED_BYTES},
            "silent": silent_data(page.recording),
            "store": None if page.store is None else store_data(page.store),
        }
        text = self._of_recordings.render(
            is_served=True,
            title=last_part(page.names[0]),
            state=state,
            subtitle=page.about,
            where=page.names[0],
            model_type=report.model_type,
            facts=_facts(page),
            evidence=None,
            notices=notices_of(page.recording),
            gaps=gaps_of(page.recording),
            core=pack(core),
            pictures=(),
            is_store=page.store is not None,
            items=page.items,
            top="../../" if parameters["items"] else "",
        )
        return "text/html", str(text)

    def _kept(self, finding: CheckFinding) -> tuple[str, str]:
        """Render the page of a finding of `hl.check`."""
        text = self._of_findings.render(
            is_served=True,
            title=title_of(finding),
            state=self._shelf.state(),
            where=self._shelf.source.name,
            core=packed(check_data(finding)),
        )
        return "text/html", str(text)

    def findings(self, parameters: dict[str, str]) -> tuple[str, str]:
        """Judge the recording; return its findings as JSON."""
        page = self._page_of(parameters)
        return _json({} if page is None else page.findings())

    def _compared(self, page: PageState, state: str) -> tuple[str, str]:
        """Render the page of two recordings, which asks for their comparison."""
        of = f"{plural(len(page.values), 'value')}, {_bytes_shown(page)}"
        text = self._of_comparisons.render(
            is_served=True,
            title=comparison_title(page.names),
            state=state,
            names=page.names,
            core=pack({"tokens": _passes_with_tokens(page), "of": of}),
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
            return _json({"problem": str(error).splitlines()})
        return _json(comparison_data(made, [_link_of(page, row.site) for row in made]))

    def maps(self, parameters: dict[str, str]) -> tuple[str, str]:
        """Return the maps of a value as JSON, and those that belong beside them."""
        page = self._page_of(parameters)
        if page is None:
            return _json({})
        entry = _named(page, parameters)
        return _json(value_maps(page, entry, choice_of(parameters)))

    def flow(self, parameters: dict[str, str]) -> tuple[str, str]:
        """Return what flows into what in a pass as JSON, as far as values are measured."""
        page = self._page_of(parameters)
        return _json([] if page is None else page.flow(number(parameters, "pass") or 0))

    def tokens(self, parameters: dict[str, str]) -> tuple[str, str]:
        """Return the norms of each token in each block of a pass as JSON."""
        page = self._page_of(parameters)
        if page is None:
            return _json({})
        chosen = (number(parameters, name) or 0 for name in ("pass", "sample"))
        return _json(tokens_of(page, *chosen))

    def measure(self, parameters: dict[str, str]) -> tuple[str, str]:
        """Measure some values, or one that a reader waits for; return their columns as JSON."""
        page = self._page_of(parameters)
        if page is None:
            return _json({})
        only = number(parameters, "only")
        start = number(parameters, "from") or 0 if only is None else only
        measured, after = page.measure_some(start, _SECONDS if only is None else 0)
        answer = {"at": [entry.order for entry in measured], "next": after}
        return _json(answer | {"values": measured_columns(measured)})

    def state(self, _: dict[str, str]) -> tuple[str, str]:
        """Return the state of the recording as JSON, so that a page can notice a new one."""
        try:
            run = self._shelf.run()
        except FolderError as error:
            problem = str(error).splitlines()[0]
            return _json({"state": "", "gone": problem})
        state = self._shelf.state() if run is None else run.version
        missing = [
            source.name
            for source in (self._shelf.source, self._shelf.other)
            if source is not None and not source.state()
        ]
        problem = ""
        if missing and not state:
            problem = f"{', '.join(missing)} holds no recording now: deleted or being replaced."
        return _json({"state": state, "gone": problem})

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
        waits = {"state": state} if status == 503 else {}
        text = self._messages.render(is_served=True, title=title, home="./", lines=lines, **waits)
        return status, str(text)

    def _page(self, parameters: dict[str, str]) -> tuple[PageState, str]:
        """Return what the page shows, of a store the items that the address names."""
        items = parameters["items"]
        return self._shelf.page(items_of(items) if items else None)

    def _page_of(self, parameters: dict[str, str]) -> PageState | None:
        """Return what the page shows; None if the page that asks shows an older recording."""
        page, state = self._page(parameters)
        return page if parameters.get("state", state) == state else None


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
        route("/", pages.index), route("/maps", pages.maps), route("/measure", pages.measure),
        route("/flow", pages.flow), route("/tokens", pages.tokens),
        route("/findings", pages.findings), route("/comparison", pages.comparison),
        route("/state", pages.state), route("/new", pages.new), route("/ranks", pages.ranks),
    ]  # fmt: skip
    routes += [routing.Route("/items", choose), routing.Mount("/items/{items}", routes=[*routes])]
    handlers = {404: missing, Exception: failed}
    return Guard(
        applications.Starlette(routes=routes, exception_handlers=handlers), rules, script_hashes()
    )


def _json(data: Any) -> tuple[str, str]:
    return "application/json", json.dumps(data, allow_nan=False)


def _response(responses: Any, content: str | bytes, media: str, status: int) -> Any:
    # Module names may have lone surrogates, which strict UTF-8 refuses.
    body = content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace")
    return responses.Response(body, status, media_type=media)


def _named(page: PageState, parameters: dict[str, str]) -> ValueEntry:
    """Return the value that an address names, by its site or by its position."""
    position = number(parameters, "value")
    if position is not None:
        if position < len(page.values):
            return page.values[position]
        raise InputError(f"there are {len(page.values)} values.\nGo to the start page.")
    where = (number(parameters, name) for name in ("pass", "call", "backward"))
    return page.find(parameters.get("at", ""), *where)


def _link_of(page: PageState, site: str) -> str:
    """Return the query of the value that a row of a comparison is about; empty if it has none."""
    entry = page.entry_at(site)
    if entry is None:
        return ""
    return query_of(entry.place, "" if entry.site.leaf else leaf_of(site))


def _passes_with_tokens(page: PageState) -> list[int]:
    numbers = sorted({entry.place.pass_number for entry in page.values})
    return [number for number in numbers if token_rows(page.rows, page.values, number)]


def _bytes_shown(page: PageState) -> str:
    return size(sum(entry.n_bytes for entry in page.values))


def _facts(page: PageState) -> list[tuple[str, str]]:
    facts = totals_of(page.recording, len(page.values), page.store)
    return facts if page.store is not None else [*facts, ("Size", _bytes_shown(page))]
