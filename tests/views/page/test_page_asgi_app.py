"""The server as a browser and as an attacker see it, without a browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from http.client import HTTPConnection
from urllib.parse import urlsplit
from urllib.request import HTTPCookieProcessor, build_opener

import pytest
import torch
from torch import nn

import hookline as hl
from benchmarks.large_recording import write as write_large
from hookline.display.units import measure
from hookline.views.page import FolderSource, LimitedServer, OpenRecordings
from hookline.views.page.request_guard import RequestRules
from hookline.views.page.value_entries import read_tensor
from page_data import core_of


def test_it_answers_on_the_loopback_address_with_the_rows(served, runs):
    server = served(runs / "a")
    answer = server.get()
    assert answer.status == 200
    rows = core_of(answer.text)["rows"]
    calls = list(zip(rows["name"], rows["call"], strict=True))
    assert calls == [("(root)", -1), ("first", -1), ("again", 0), ("again", 1), ("head", -1)]
    assert server.serving.address == server.base


def test_a_page_loads_nothing_from_elsewhere_and_is_not_framed(served, runs):
    headers = served(runs / "a").get().headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert re.search(r"script-src( 'sha256-[A-Za-z0-9+/]+=*'){5}$", policy)
    assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", ""]
)
def test_a_foreign_host_header_is_refused(served, runs, host):
    answer = served(runs / "a").get(Host=host)
    assert answer.status == 421
    assert "first" not in answer.text


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1", "[::1]:8765"])
def test_the_names_of_this_machine_are_answered(served, runs, host):
    assert served(runs / "a").get(Host=host).status == 200


def test_only_reading_is_allowed(served, runs):
    assert served(runs / "a").get(method="POST").status == 405


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    ["../../etc/passwd", "%2e%2e/manifest.json", "manifest.json", "page.js", "static/../a", "//x"],
)
def test_no_address_is_the_name_of_a_file(served, runs, path):
    server = served(runs / "a")
    parts = urlsplit(server.base)
    connection = HTTPConnection(parts.hostname, parts.port, timeout=30)
    connection.request("GET", "/" + path)  # urllib would tidy the path
    answer = connection.getresponse()
    text = answer.read().decode()
    assert answer.status == 404
    assert "hookline-recording" not in text
    connection.close()


def test_an_address_open_to_others_asks_for_the_printed_token(served, runs):
    server = served(runs / "a", host="0.0.0.0")
    token = server.serving.address.partition("token=")[2]
    assert len(token) >= 24
    assert server.get().status == 403
    assert server.get("?token=wrong").status == 403
    cookie = RequestRules("0.0.0.0", token).cookie_name
    assert server.get(Cookie=f"{cookie}=wrong").status == 403
    assert server.get(Cookie=f"{cookie}={token}").status == 200
    parts = urlsplit(server.base)
    connection = HTTPConnection(parts.hostname, parts.port, timeout=30)
    connection.request("GET", f"/maps?at=first&token={token}")
    answer = connection.getresponse()
    assert answer.status == 303
    assert answer.headers["location"] == "/maps?at=first"
    assert "HttpOnly; SameSite=Strict" in answer.headers["set-cookie"]
    connection.close()


def test_two_servers_of_one_machine_do_not_log_each_other_out(served, runs):
    opener = build_opener(HTTPCookieProcessor())
    servers = [served(runs / name, host="0.0.0.0") for name in ("a", "b")]
    for server in servers:
        token = server.serving.address.partition("?")[2]
        assert opener.open(f"{server.base}?{token}", timeout=30).status == 200
    for server in servers:
        assert opener.open(server.base, timeout=30).status == 200


def test_the_rules_know_the_address_that_was_given():
    assert RequestRules("192.168.0.7", "t").allows_host("192.168.0.7:8765")
    assert not RequestRules("192.168.0.7", "t").allows_host("evil.example")
    assert RequestRules("::1").allows_host("[::1]:8765")


@pytest.mark.parametrize(
    ("asked", "led"),
    [
        ("//evil.example/", "/evil.example/"),
        ("/\\evil.example/", "/%5Cevil.example/"),  # browsers read it as a slash
        ("/%5Cevil.example/", "/%5Cevil.example/"),
        ("/%0D%0Aset-cookie:%20a=b", "/%0D%0Aset-cookie%3A%20a%3Db"),
    ],
)
def test_a_redirect_never_leads_to_another_server(served, runs, asked, led):
    server = served(runs / "a", host="0.0.0.0")
    token = server.serving.address.partition("token=")[2]
    parts = urlsplit(server.base)
    connection = HTTPConnection(parts.hostname, parts.port, timeout=30)
    connection.request("GET", f"{asked}?token={token}")
    assert connection.getresponse().headers["location"] == led
    connection.close()


def test_a_port_that_is_taken_gives_the_next(runs):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        serving = LimitedServer(OpenRecordings(FolderSource(runs / "a")), port=port)
    assert serving.is_on_other_port
    assert port < serving.port < port + 20
    serving.close()


@pytest.mark.parametrize(
    ("host", "port", "said"),
    [
        ("203.0.113.1", 8765, "cannot listen on.*\nGive"),
        ("127.0.0.1", 99999, "port must be from 0 to 65535, got 99999.\nGive"),
    ],
)
def test_an_address_that_cannot_be_bound_says_what_to_give(runs, host, port, said):
    with pytest.raises(hl.InputError, match=said):
        LimitedServer(OpenRecordings(FolderSource(runs / "a")), host, port)


# -- what there is to see --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("at=nothing", "no value at nothing"),
        ("at=first&pass=9", "no such pass or call of first"),
        ("at=first&pass=-1", "must be a whole number"),
        ("at=first&order=size", "order must be one of"),
        ("at=first&call=0x1", "must be a whole number"),
        ("&".join("a=1" for _ in range(50)), "cannot be read"),
    ],
)
def test_an_address_that_names_nothing_says_so(served, runs, query, said):
    answer = served(runs / "a").get(f"maps?{query}")
    assert answer.status == 404
    assert said in answer.text
    assert "All values" in answer.text


def test_a_value_that_a_reader_waits_for_is_measured_alone(served, runs):
    answer = json.loads(served(runs / "a").get("measure?only=3").text)
    assert answer["at"] == [3]
    assert answer["next"] == 4


def test_numbers_are_measured_a_few_at_a_time_and_remembered(served, runs):
    server = served(runs / "a")
    core = core_of(server.get().text)
    assert core["values"]["waits"] == [0, 1, 2, 3, 4]
    assert core["measure"]["start"]
    means, at = {}, 0
    while at < len(core["values"]["row"]):
        answer = json.loads(server.get(f"measure?from={at}").text)
        means |= dict(zip(answer["at"], answer["values"]["mean"], strict=True))
        at = answer["next"]
    mean = hl.open(runs / "a")["first"].double().mean().item()
    assert means[0] == float(f"{mean:.4g}")
    values = core_of(server.get().text)["values"]
    assert values["mean"] == [means[order] for order in range(5)]
    assert values["waits"] == []


def test_a_second_page_gets_what_was_measured_before(served, runs):
    server = served(runs / "a")
    first, second = (json.loads(server.get("measure?only=3").text) for _ in range(2))
    assert first["at"] == [3]
    assert second == first
    while len(first["at"]) < 5:  # it stops after a while
        first = json.loads(server.get("measure?from=0").text)
    assert first["at"] == [0, 1, 2, 3, 4]
    assert None not in first["values"]["mean"]


def test_the_files_are_opened_once_for_each_answer(served, runs, monkeypatch):
    server, closed = served(runs / "a"), []
    server.get()
    monkeypatch.setattr(hl.Recording, "release", lambda _: closed.append(1))
    at, answers = 0, 0
    while at < 5:
        at, answers = json.loads(server.get(f"measure?from={at}").text)["next"], answers + 1
    assert len(closed) == answers


@pytest.mark.parametrize("path", ["measure", "findings", "maps?at=first", "flow", "tokens"])
def test_a_page_of_an_older_recording_gets_no_numbers(served, runs, path):
    answer = served(runs / "a").get(f"{path}{'&' if '?' in path else '?'}state=older")
    assert answer.status == 200
    assert not json.loads(answer.text)


def test_findings_are_those_of_the_recording(served, tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    nn.init.constant_(model[0].bias, -1e3)
    with hl.record(model) as run:
        model(torch.rand(4, 8))
    server = served(run.save(tmp_path / "run"))
    answer = json.loads(server.get("findings").text)
    core = core_of(server.get().text)
    (finding,) = run.findings()
    assert answer["findings"][0]["text"] == finding.text
    assert core["rows"]["name"][answer["findings"][0]["row"]] == finding.site == "1"


def test_maps_of_a_value_come_with_those_of_its_gradient(served, runs):
    server = served(runs / "passes")
    at = core_of(server.get().text)["values"]["order"][-1]
    answer = json.loads(server.get("maps?at=first&pass=1&sample=1").text)
    own, gradient = answer["own"]["maps"], answer["gradient"]["maps"]
    assert [tile["c"] for tile in answer["over"]["sets"][0]["tiles"]] == [
        "raises the scalar", "lowers the scalar",
    ]  # fmt: skip
    later = json.loads(server.get("maps?at=first&pass=1&order=index&first=32").text)
    for part in ("own", "gradient"):
        assert [t["c"] for t in later[part]["maps"]["tiles"]] == list(range(32, 40))
    assert (own["kind"], own["of"], own["sample"], len(own["tiles"])) == ("channels", 40, 1, 16)
    assert [t["c"] for t in own["tiles"]] == [t["c"] for t in gradient["tiles"]]
    assert json.loads(server.get(f"maps?value={at}").text)["gradient"] is None
    assert (
        "sample must be" in json.loads(server.get("maps?at=first&sample=7").text)["own"]["problem"]
    )
    assert server.get("maps?value=999").status == 404


class Two(nn.Module):
    """Two convolutions of one input; a model may use the second alone."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Conv2d(3, 4, 3, padding=1) for _ in range(2))

    def forward(self, x):
        return self.a(x), self.b(x)


@pytest.fixture(scope="module")
def second_alone(tmp_path_factory):
    model = nn.Sequential(Two())
    ports = ("input", "output", "grad_output")
    with hl.record(model, ["0", "(root):input"], ports=ports, copy=True) as run:
        model(torch.rand(1, 3, 8, 8))[1].sum().backward()
    return run.save(tmp_path_factory.mktemp("second_alone") / "run")


def test_a_gradient_is_drawn_beside_its_own_tensor(served, second_alone):
    server = served(second_alone)
    first, second = (json.loads(server.get(f"maps?at=0&part={k}").text) for k in range(2))
    assert first["own"]["maps"]["kind"] == "channels"
    assert first["gradient"] == {"problem": "no gradient flowed to this tensor."}
    assert [maps["kind"] for maps in first["over"]["sets"]] == ["norm"]  # and no Grad-CAM
    assert second["gradient"]["maps"]["kind"] == "channels"


def test_the_norm_of_a_gradient_is_that_of_its_own_tensor(served, second_alone):
    server = served(second_alone)
    values = core_of(server.get().text)["values"]
    order = len(values["port"]) - 1
    assert (values["numel"][order], order in values["waits"]) == (None, True)
    measured = json.loads(server.get(f"measure?only={order}").text)["values"]
    assert (measured["std"], measured["waits"]) == ([None], [])
    (part,) = measured["parts"][str(order)]
    assert (part["leaf"], part["numel"]) == ("[1]", 256)


def test_two_recordings_are_compared_when_the_page_asks(served, runs):
    server = served(runs / "a", runs / "b")
    text = server.get().text
    assert "a against b" in text
    assert str(runs / "b") in text
    data = json.loads(server.get("comparison").text)
    comparison = hl.compare(runs / "a", runs / "b")
    assert {name: data[name] for name in comparison.to_dict()} == comparison.to_dict()
    answer = json.loads(server.get(f"maps?{data['links'][-1]}").text)
    a, b = (hl.open(runs / name)["(root)"] for name in "ab")
    assert answer["difference"]["maps"]["tiles"][0]["hi"] == pytest.approx(float((a - b).max()))
    assert answer["numbers"][1]["Mean"] == measure(float(b.double().mean()))


def test_each_row_of_a_comparison_leads_to_the_page_of_its_value(served, tmp_path):
    class Pair(nn.Module):
        def forward(self, x):
            return x, [x + 1]

    model = nn.Sequential(nn.Linear(2, 2), Pair())
    with hl.record(model, ports=("output", "grad_output")) as run:
        for _ in range(2):
            out, _ = model(torch.ones(1, 2))
            out.sum().backward()
    server = served(*(run.save(tmp_path / name) for name in "ab"))
    data = json.loads(server.get("comparison").text)
    links = {row["site"]: link for row, link in zip(data["rows"], data["links"], strict=True)}
    assert links["0#pass1"] == "at=0&pass=1&call=0"
    assert links["1:output[1][0]#pass0"] == "at=1&pass=0&call=0&leaf=%5B1%5D%5B0%5D"
    assert links["0:grad_output#pass1"] == "at=0%3Agrad_output&pass=1&call=0"
    assert all(links.values())


def test_each_tensor_of_a_tuple_is_compared_by_its_own_numbers(served, tmp_path):
    parts = {"[0]": torch.zeros(2, 2), "[1].ids": torch.arange(6.0).view(2, 3).long()}
    for name, step in (("a", 0), ("b", 1)):
        model = nn.Identity()
        with hl.record(model, copy=True) as run:
            model((parts["[0]"], {"ids": parts["[1].ids"] + step}))
        run.save(tmp_path / name)
    server = served(tmp_path / "a", tmp_path / "b")
    data = json.loads(server.get("comparison").text)
    for row, link in zip(data["rows"], data["links"], strict=True):
        tensor = parts[row["site"].removeprefix("(root):output")]
        answer = json.loads(server.get(f"maps?{link}").text)
        assert answer["numbers"][0]["Shape"] == str(list(tensor.shape))
        assert answer["numbers"][0]["Mean"] == measure(float(tensor.double().mean()))
        (tile,) = answer["difference"]["maps"]["tiles"]
        assert tile["lo"] == tile["hi"] == -float("ids" in row["site"])
    missing = json.loads(server.get("maps?at=(root)&leaf=[7]").text)["numbers"][0]
    assert missing == {"Problem": "the value holds no such tensor"}


def test_values_of_other_shapes_and_those_only_in_one_are_named(served, tmp_path):
    for name, width in (("a", 3), ("b", 4)):
        model = nn.Sequential(nn.Linear(2, width), nn.ReLU())
        with hl.record(model, ["0", "1"] if name == "a" else ["0", ""]) as run:
            model(torch.ones(1, 2))
        run.save(tmp_path / name)
    server = served(tmp_path / "a", tmp_path / "b")
    assert "other" not in json.loads(server.get("maps?at=1").text)
    text = server.get("comparison").text
    assert "1 value only in a: 1" in text
    assert "1 value only in b: (root)" in text
    answer = json.loads(server.get("maps?at=0").text)
    assert answer["difference"]["problem"] == "The shapes differ."


def test_complex_values_are_subtracted_before_their_magnitude(served, tmp_path):
    for name, turn in (("a", 1), ("b", 1j)):
        with hl.record(model := nn.Identity(), copy=True) as run:
            model(torch.tensor([[3 + 4j, 1j]]) * turn)
        run.save(tmp_path / name)
    answer = json.loads(served(tmp_path / "a", tmp_path / "b").get("maps?value=0").text)
    (tile,) = answer["difference"]["maps"]["tiles"]
    assert (tile["lo"], tile["hi"]) == pytest.approx((2**0.5, 5 * 2**0.5), rel=1e-5)


def test_two_recordings_without_a_common_value_say_so(served, tmp_path):
    for name in "ab":
        model = nn.Sequential()
        model.add_module(name, nn.ReLU())
        with hl.record(model, name) as run:
            model(torch.ones(1, 2))
        run.save(tmp_path / name)
    answer = json.loads(served(tmp_path / "a", tmp_path / "b").get("comparison").text)
    assert "a and b must have names in common" in answer["problem"][0]
    alone = json.loads(served(tmp_path / "a").get("comparison").text)
    assert alone["problem"][0].startswith("only one folder is shown")


# -- what changes while it is looked at ------------------------------------------------------


def test_a_replaced_recording_is_followed(served, runs, tmp_path):
    folder = shutil.copytree(runs / "a", tmp_path / "run")
    server = served(folder)
    before = json.loads(server.get("state").text)["state"]
    assert f'data-state="{before}"' in server.get().text
    hl.open(runs / "passes").save(folder)
    after = json.loads(server.get("state").text)["state"]
    assert after != before
    assert json.loads(server.get(f"measure?from=0&state={before}").text) == {}
    text = server.get().text
    assert f'data-state="{after}"' in text
    assert "<dt>Passes</dt><dd>3</dd>" in text


def test_a_folder_that_is_not_there_yet_is_waited_for(served, runs, tmp_path):
    server = served(tmp_path / "later")
    answer = server.get()
    assert answer.status == 503
    assert "it does not exist" in answer.text
    assert 'data-state=""' in answer.text
    shutil.copytree(runs / "a", tmp_path / "later")
    assert server.get().status == 200


def test_a_folder_that_is_deleted_while_it_is_viewed_says_so(served, runs, tmp_path):
    folder = shutil.copytree(runs / "a", tmp_path / "run")
    server = served(folder)
    assert server.get().status == 200
    shutil.rmtree(folder)
    answer = json.loads(server.get("state").text)
    assert answer["state"] == ""
    assert "holds no recording now" in answer["gone"]
    assert server.get().status == 200  # what was read before
    text = server.get("maps?at=first").text
    assert "damaged, gone, or replaced since it was opened" in text


# -- large recordings ------------------------------------------------------------------------


@pytest.mark.slow
def test_a_table_of_2000_sites_and_50_gb_reads_no_tensor(served, tmp_path, monkeypatch):
    folder = write_large(tmp_path / "large", 2000, 25 * 1024**2)
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert size > 50e9
    read = []
    monkeypatch.setattr(
        "hookline.recordings.stored_values.TensorFiles.tensor",
        lambda self, name: read.append(name) or torch.zeros(1, 4, 8, 8),
    )
    server = served(folder)
    text = server.get().text
    core = core_of(text)
    assert len(core["rows"]["name"]) == 2000 + 200 + 20
    assert "<dt>Size</dt><dd>48.7 GiB</dd>" in text
    assert core["measure"] == {"size": "48.7 GiB", "start": False}
    assert read == []
    server.get("maps?at=layer0.block0.conv1")
    assert set(read) == {"values-0-00000.safetensors/1"}


@pytest.mark.slow
def test_memory_does_not_grow_with_what_was_looked_at(tmp_path):
    folder = write_large(tmp_path / "large", 200, 25 * 1024**2, per_file=50)
    shelf = OpenRecordings(FolderSource(folder))
    shown, _ = shelf.current_page_and_version()

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    with shown.read_lock():
        shown.measure(shown.values[0])
    before = resident()
    for seen in shown.values[1:13]:  # 300 MiB
        with shown.read_lock():
            shown.measure(seen)
    assert resident() - before < 60 * 1024**2
    tensors = [read_tensor(seen).sum() for seen in shown.values[1:13]]  # and it can be seen to
    assert resident() - before > 250 * 1024**2
    assert sum(tensors) == 0


@pytest.mark.slow
@pytest.mark.parametrize("at", ["", ":output", "(root)", "%28root%29:output"])
def test_the_root_is_found_in_an_address_however_it_is_written(served, runs, at):
    answer = served(runs / "passes").get(f"maps?at={at}&pass=1&call=0")
    assert answer.status == 200
    assert "maps" in json.loads(answer.text)["own"]


@pytest.mark.slow
def test_the_difference_in_any_leaf_is_shown(served, tmp_path):
    for name, second in (("a", 1.0), ("b", 3.0)):
        with hl.record(model := nn.Identity()) as run:
            model((torch.ones(3), torch.full((2,), second)))
        run.save(tmp_path / name)
    server = served(tmp_path / "a", tmp_path / "b")
    rows = json.loads(server.get("comparison").text)["rows"]
    assert [row["relative"] for row in rows] == [0.0, pytest.approx(2 / 3)]
    parts = [json.loads(server.get(f"maps?at=(root)&part={k}").text) for k in (0, 1)]
    assert [part["difference"]["maps"]["tiles"][0]["lo"] for part in parts] == [0, -2]
