"""How a site is written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hookline as hl
from hookline.engine.selection.selectors import normalize_root, parse_site
from hookline.engine.selection.site import PORTS, Site, glob_to_regex, parse_site_text
from hookline.errors import SelectionError

names = st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True)
sites = st.builds(
    Site,
    path=st.lists(names | st.integers(0, 20).map(str), max_size=3).map(".".join),
    port=st.sampled_from(PORTS),
    leaf=st.lists(names | st.integers(0, 9) | st.just("a key"), max_size=3).map(tuple),
    call=st.none() | st.integers(0, 99),
)


@given(sites)
def test_what_is_written_reads_back_as_the_same_site(site):
    assert parse_site(str(site)) == site


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("layer4.1.conv2", Site("layer4.1.conv2")),
        ("h.3:output[0]", Site("h.3", leaf=(0,))),
        ("h.3[0]", Site("h.3", leaf=(0,))),
        ("block:output.last_hidden_state", Site("block", leaf=("last_hidden_state",))),
        ('block:output["a key"][1]', Site("block", leaf=("a key", 1))),
        ("block#2", Site("block", call=2)),
        ("block:input.mask#0", Site("block", "input", ("mask",), 0)),
        ("", Site("")),
        (":output", Site("")),
        ("(root)", Site("")),
        ("(root):input[0]", Site("", "input", (0,))),
        (":input", Site("", "input")),
        ("h:output[-1]", Site("h", leaf=(-1,))),
        ("lstm:grad_output[0]#1", Site("lstm", "grad_output", (0,), 1)),
        ("block:grad_input.mask", Site("block", "grad_input", ("mask",))),
        ("fc.bias:grad", Site("fc.bias", "grad")),
    ],
)
def test_the_grammar_of_the_docs(text, expected):
    assert parse_site(text) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("conv:grad_outptu", "got 'grad_outptu'"),
        ("conv:", "got ''"),
        ("conv#x", "must be a number such as #0, got 'x'"),
        ("conv[a b]", "a leaf must be"),
        ("conv[0", "cannot be read"),
        ("conv#1#2", "cannot be read"),
    ],
)
def test_malformed_sites_say_what_is_wrong_and_show_the_form(text, said):
    with pytest.raises(SelectionError) as caught:
        parse_site_text(text)
    assert said in str(caught.value)
    assert "output" in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3


def test_a_path_alone_is_the_output():
    assert str(Site("a.b")) == "a.b"
    assert str(Site("a.b", "input")) == "a.b:input"


def test_the_root_is_written_so_that_it_can_be_seen():
    assert str(Site("")) == "(root)"
    assert str(Site("", "input")) == "(root):input"
    assert str(Site("", leaf=(0,), call=1)) == "(root):output[0]#1"
    assert str(Site("", "grad_output")) == "(root):grad_output"


@pytest.mark.parametrize(
    ("written", "site"),
    [
        (["", ":output", "(root)", "(root):output"], Site("")),
        ([":input", "(root):input"], Site("", "input")),
        (["[0]", ":output[0]", "(root)[0]", "(root):output[0]"], Site("", leaf=(0,))),
        (["#2", "(root)#2"], Site("", call=2)),
        (["@tanh", "(root)@tanh"], Site("@tanh")),
        (["@tanh:input#2", "(root)@tanh:input#2"], Site("@tanh", "input", call=2)),
    ],
)
def test_the_root_is_read_in_every_way_and_written_in_one(written, site):
    assert {parse_site(text) for text in written} == {site}
    assert {normalize_root(text) for text in written} == {str(site)}


def test_runs_stay_where_a_root_is_rewritten_other_texts_too():
    assert normalize_root(":input#1#pass2") == "(root):input#1#pass2"
    for text in ("fc", "fc:output", ":nothing", "a[12].x", "[(]root)", "(roots)"):
        assert normalize_root(text) == text


def test_a_module_called_root_in_parentheses_has_its_own_text():
    for port in PORTS:
        site = Site("(root)", port)
        assert str(site) != str(Site("", port))
        assert parse_site(str(site)) == site
    assert parse_site("(root):input", {"", "(root)"}) == Site("(root)", "input")
    assert parse_site("(root)@relu[0]", {"(root)@relu"}) == Site("(root)@relu", leaf=(0,))


PATHS = ["", "a", "a.b", "a.b.c", "b", "ab", "a.1", "a.12", "layer4.1.conv2", "block2.fc"]

MATCHES = {
    "*": ["", "a", "b", "ab"],  # a selector leaves the root out
    "**": PATHS,
    "a": ["a"],
    "a.*": ["a.b", "a.1", "a.12"],
    "a.**": ["a.b", "a.b.c", "a.1", "a.12"],  # below a, not a itself
    "a.**.c": ["a.b.c"],
    "a.**.b": ["a.b"],  # at any depth, none included
    "**.b": ["a.b", "b"],
    "**.c": ["a.b.c"],
    "a**": ["a", "a.b", "a.b.c", "ab", "a.1", "a.12"],
    "a.?": ["a.b", "a.1"],
    "a.[0-9]": ["a.1"],
    "a.[!0-9]": ["a.b"],
    "a.[0-9]*": ["a.1", "a.12"],
    "{a,b}": ["a", "b"],
    "{a,layer4}.**": ["a.b", "a.b.c", "a.1", "a.12", "layer4.1.conv2"],
    "layer?.*.conv[12]": ["layer4.1.conv2"],
    "": [""],
}


@pytest.mark.parametrize("pattern", MATCHES)
def test_a_glob_matches_these_paths_and_no_others(pattern):
    regex = glob_to_regex(pattern)
    assert [path for path in PATHS if regex.fullmatch(path)] == MATCHES[pattern]


def test_globs_match_names_of_any_characters():
    for pattern in ("**", "a.**", "**.c", "a.*.c"):
        assert glob_to_regex(pattern).fullmatch("a.\n.c")


@pytest.mark.parametrize("pattern", ["{a", "a}", "{a,{b}}"])
def test_braces_that_are_not_closed_or_nest_are_refused(pattern):
    with pytest.raises(hl.SelectionError, match="malformed glob"):
        glob_to_regex(pattern)


def test_a_range_that_runs_downwards_is_refused():
    with pytest.raises(hl.SelectionError):
        glob_to_regex("a.[9-0]")
