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
from hookline.util.optional_imports import how_to_install, require
from hookline.views.page.finding_page_data import finding_page_data, title_of
from hookline.views.page.page_state import PageState, page_data, template_variables
from hookline.views.page.page_templates import load_template, script_hashes
from hookline.views.page.recording_data import pack_json, statistics_columns
from hookline.views.page.request_guard import RequestGuard, RequestRules
from hookline.views.page.result_pages import (
    comparison_data,
    comparison_title,
    last_path_part,
    pack_result,
)
from hookline.views.page.served_folders import OpenRecordings
from hookline.views.page.token_norms import token_blocks
from hookline.views.page.training_page import (
    data_of_new_steps,
    render_served_page,
    requested_numbers_by_rank,
)
from hookline.views.page.url_parameters import (
    format_items,
    format_query,
    parse_choice,
    parse_int,
    parse_items,
    parse_query,
)
from hookline.views.page.value_entries import ValueEntry
from hookline.views.page.value_maps import token_norms, value_maps
from hookline.views.page.values_by_site import leaf_of
from hookline.views.pixels import PAGE_NEEDS

_NEEDS = "hookline view needs starlette and uvicorn"
SERVER_NEEDS = _NEEDS, how_to_install("cli", "page"), HooklineError
# Up to this size, values are measured as soon as the page opens; beyond it, on request.
_UNASKED_BYTES = 1024**3
_SECONDS = 0.2  # the time to measure for one answer

_Make = Callable[[dict[str, str]], Any]  # makes an answer from the parameters of an address


@final
class PageHandlers:
    """The server's pages: one method for each address, which takes the address's parameters.

    Args:
        recordings: the recordings to show.
    """

    def __init__(self, recordings: OpenRecordings) -> None:
        require("PIL.Image", *PAGE_NEEDS)
        self._recordings = recordings
        self._templates = {
            kind: load_template(kind)
            for kind in ("message", "comparison", "recording", "check", "training")
        }

    def index(self, parameters: dict[str, str]) -> str:
        """Render the page of a recording, a comparison, a run or a finding of `hl.check`."""
        name = self._recordings.source.name
        run = self._recordings.read_run()
        if run is not None:
            title = self._recordings.source.folder.resolve().name
            return render_served_page(self._templates["training"], run, title, name)
        kept = self._recordings.read_finding()
        if kept is not None:
            data, state = pack_result(finding_page_data(kept)), self._recordings.version()
            return self._render("check", title=title_of(kept), state=state, where=name, core=data)
        page, state = self._requested_page(parameters)
        if page.other is not None:
            return self._render_comparison(page, state)
        to_measure = page.bytes_to_measure
        core = page_data(page.contents, page.rows, page.values)
        core["measure"] = {"size": size(to_measure), "start": to_measure <= _UNASKED_BYTES}
        variables = template_variables(page.contents, len(page.values))
        if page.contents.store is None:
            variables["facts"].append(("Size", _total_size_text(page)))
        return self._render(
            "recording",
            **variables,
            title=last_path_part(page.names[0]),
            state=state,
            where=page.names[0],
            evidence=None,
            core=pack_json(core),
            pictures=(),
            items=page.contents.shown_items_and_total,
            top="../../" if parameters["items"] else "",
        )

    def _render_comparison(self, page: PageState, state: str) -> str:
        """Render the page of two recordings, which asks for their comparison."""
        of = f"{plural(len(page.values), 'value')}, {_total_size_text(page)}"
        core = pack_json({"tokens": _passes_with_tokens(page), "of": of})
        title = comparison_title(page.names)
        return self._render("comparison", title=title, state=state, names=page.names, core=core)

    def _render(self, kind: str, **variables: Any) -> str:
        return str(self._templates[kind].render(is_served=True, **variables))

    def comparison(self, parameters: dict[str, str]) -> dict[str, Any]:
        """Compare the two recordings; return the comparison, or why there is none."""
        try:
            page, _ = self._requested_page(parameters)
            if page.other is None:
                raise InputError("only one folder is shown.\nGive two: hookline view DIR DIR2.")
            made = self._recordings.comparison()
        except HooklineError as error:
            return {"problem": str(error).splitlines()}
        return comparison_data(made, [_url_query_of_value(page, row.site) for row in made])

    def recording_state(self, _: dict[str, str]) -> dict[str, str]:
        """Return the state of the recording, so that a page can notice a new one."""
        try:
            run = self._recordings.read_run()
        except FolderError as error:
            return {"state": "", "gone": str(error).splitlines()[0]}
        state = self._recordings.version() if run is None else run.reader.version
        missing = [
            source.name
            for source in (self._recordings.source, self._recordings.other)
            if source is not None and not source.version()
        ]
        problem = ""
        if missing and not state:
            problem = f"{', '.join(missing)} holds no recording now: deleted or being replaced."
        return {"state": state, "gone": problem}

    def new_steps(self, parameters: dict[str, str]) -> dict[str, Any]:
        """Return the steps of a run that a page lacks; without a run, why."""
        try:
            run = self._recordings.read_run()
            if run is not None:
                return data_of_new_steps(run, parameters)
        except FolderError:
            pass  # `state` says what is wrong
        return self.recording_state(parameters)

    def numbers_by_rank(self, parameters: dict[str, str]) -> list[list[float | None]]:
        """Return the numbers of each rank at a site of a run."""
        run = self._recordings.read_run()
        if run is None:
            raise InputError("this folder holds no run.\nGo to the start page.")
        return requested_numbers_by_rank(run, parameters)

    def render_error(self, error: Exception) -> tuple[int, str]:
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
        state = "" if self._recordings.holds_run() else self._recordings.version()
        waits = {"state": state} if status == 503 else {}
        return status, self._render("message", title=title, home="./", lines=lines, **waits)

    def empty_if_outdated(self, make: Callable[[PageState, dict[str, str]], Any]) -> _Make:
        """Return an answer about the page that asks: none if it shows an older recording."""

        def answer(parameters: dict[str, str]) -> Any:
            page, state = self._requested_page(parameters)
            return make(page, parameters) if parameters.get("state", state) == state else {}

        return answer

    def _requested_page(self, parameters: dict[str, str]) -> tuple[PageState, str]:
        """Return what the page shows, of a store the items that the address names."""
        items = parameters["items"]
        return self._recordings.current_page_and_version(parse_items(items) if items else None)


def make_app(recordings: OpenRecordings, rules: RequestRules) -> Any:
    """Create the server's ASGI app."""
    parts = "applications", "routing", "responses", "concurrency"
    applications, routing, responses, concurrency = (
        require(f"starlette.{part}", *SERVER_NEEDS) for part in parts
    )
    pages = PageHandlers(recordings)

    def response(content: str, media: str = "text/html", status: int = 200) -> Any:
        # Module names may have lone surrogates, which strict UTF-8 refuses.
        body = content.encode("utf-8", "backslashreplace")
        return responses.Response(body, status, media_type=media)

    def failed(_: Any, error: Exception) -> Any:
        status, content = pages.render_error(error)
        return response(content, status=status)

    def answer(make: _Make, scope: Any) -> Any:
        try:
            parameters = parse_query(scope["query_string"])
            parameters["items"] = scope["path_params"].get("items", "")
            content = make(parameters)
        except HooklineError as error:
            return failed(None, error)
        if isinstance(content, str):
            return response(content)
        return response(json.dumps(content, allow_nan=False), "application/json")

    def route(path: str, make: _Make) -> Any:
        async def endpoint(request: Any) -> Any:
            return await concurrency.run_in_threadpool(answer, make, request.scope)

        return routing.Route(path, endpoint)

    def redirect_to_items(request: Any) -> Any:
        """Lead from what the form asks for to the page of the items."""
        try:
            text = format_items(parse_items(request.query_params.get("items", "")))
        except HooklineError as error:
            return failed(None, error)
        return responses.RedirectResponse(f"items/{text}/", 303)

    def missing(_: Any, __: Exception) -> Any:
        return failed(None, InputError("this address does not exist.\nGo to the start page."))

    routes = [
        route("/", pages.index), route("/comparison", pages.comparison),
        route("/state", pages.recording_state), route("/new", pages.new_steps),
        route("/ranks", pages.numbers_by_rank),
    ]  # fmt: skip
    routes += [route(path, pages.empty_if_outdated(make)) for path, make in _OF_PAGES.items()]
    routes += [
        routing.Route("/items", redirect_to_items),
        routing.Mount("/items/{items}", routes=[*routes]),
    ]
    handlers = {404: missing, Exception: failed}
    return RequestGuard(
        applications.Starlette(routes=routes, exception_handlers=handlers),
        rules,
        script_hashes(),
    )


def _requested_value(page: PageState, parameters: dict[str, str]) -> ValueEntry:
    """Return the value that an address names, by its site or by its position."""
    position = parse_int(parameters, "value")
    if position is not None:
        if position < len(page.values):
            return page.values[position]
        raise InputError(f"there are {len(page.values)} values.\nGo to the start page.")
    where = (parse_int(parameters, name) for name in ("pass", "call", "backward"))
    return page.find(parameters.get("at", ""), *where)


def _requested_statistics(page: PageState, parameters: dict[str, str]) -> dict[str, Any]:
    """Measure some values, or one that a reader waits for; return their columns."""
    only = parse_int(parameters, "only")
    start = parse_int(parameters, "from") or 0 if only is None else only
    measured, after = page.measure_within_time(start, _SECONDS if only is None else 0)
    at = [entry.order for entry in measured]
    return {"at": at, "next": after, "values": statistics_columns(measured)}


def _requested_token_norms(page: PageState, parameters: dict[str, str]) -> dict[str, Any]:
    return token_norms(page, *(parse_int(parameters, name) or 0 for name in ("pass", "sample")))


# What is told of the recording that a page shows, by address.
_OF_PAGES: dict[str, Callable[[PageState, dict[str, str]], Any]] = {
    "/findings": lambda page, _: page.findings(),
    "/measure": _requested_statistics,
    "/maps": lambda page, asked: value_maps(
        page, _requested_value(page, asked), parse_choice(asked)
    ),
    "/flow": lambda page, asked: {"edges": page.dataflow_edges(parse_int(asked, "pass") or 0)},
    "/tokens": _requested_token_norms,
}


def _url_query_of_value(page: PageState, site: str) -> str:
    """Return the query of the value that a row of a comparison is about; empty if it has none."""
    entry = page.by_key.find(site)
    if entry is None:
        return ""
    return format_query(entry.key, "" if entry.site.leaf else leaf_of(site))


def _passes_with_tokens(page: PageState) -> list[int]:
    numbers = sorted({entry.key.pass_number for entry in page.values})
    return [number for number in numbers if token_blocks(page.rows, page.values, number)]


def _total_size_text(page: PageState) -> str:
    return size(sum(entry.n_bytes for entry in page.values))
