"""The examples, each run by itself as a person would, with warnings as errors; what they print."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from warm import DYNAMO, TORCH, run_python

pytestmark = pytest.mark.processes

EXAMPLES = Path(__file__).parent.parent / "examples"
NUMBER = r"([-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|nan|inf))"
# scikit-learn takes two seconds, too.
SKLEARN = (f"{DYNAMO[0]} sklearn.linear_model", 0)


def run(name: str, *, of: tuple[str, int] = TORCH, quiet: bool = True) -> str:
    """What the script prints; to stderr nothing, unless a library that it uses does."""
    done = run_python("-W", "error", EXAMPLES / f"{name}.py", of=of)
    assert done.returncode == 0, done.stderr
    assert not quiet or done.stderr == ""
    return done.stdout


def numbers(pattern: str, text: str) -> list[float]:
    """The numbers that stand where the pattern has N."""
    found = re.findall(pattern.replace("N", NUMBER), text)
    return [float(n) for match in found for n in ([match] if isinstance(match, str) else match)]


def test_gradients_of_intermediate_tensors():
    out = run("gradients_of_intermediate_tensors")
    lines = out.splitlines()
    assert lines[0] == "dc/db = tensor([0.2000, 0.2000, 0.2000, 0.2000, 0.2000])"
    assert lines[1] == "dc/da = tensor([0.4000, 0.4000, 0.4000, 0.4000, 0.4000])"
    assert lines[2] == "kept on b itself: False"
    assert lines[3].endswith("at a: tensor([4., 4., 4., 4., 4.])")


def test_overview():
    out = run("overview")
    (before,), (after,) = numbers("score of the 7: N", out), numbers("silent: N,", out)
    assert before > 0.9
    assert after < 0.5


def test_change_gradients():
    out = run("change_gradients")
    assert re.findall(r"^\w.*:$", out, re.M) == [
        "as it is:", "changed:", "after the block, as before:",
    ]  # fmt: skip
    before, changed, after = numbers("conv:grad_output +N", out)
    assert before < 0
    assert changed == 0
    assert after == before
    ones, zeros = str([1.0] * 5), str([0.0] * 5)
    assert re.findall(r"gradient of fc.bias +(\[.*\])", out) == [ones, zeros, ones]
    norm_before, norm_changed, norm_after = numbers("conv.weight.grad +N", out)
    assert norm_before == norm_after != norm_changed > 0
    assert re.search(r"fc\.bias:grad +Linear\.bias +1$", out, re.M)


def test_what_flows_back():
    out = run("what_flows_back")
    found = re.findall(r"^(\S+) +(\[.*\]) +norm " + NUMBER, out, re.M)
    assert [(site, shape) for site, shape, _ in found] == [
        ("conv:grad_input", "[1, 3, 8, 8]"),
        ("conv:grad_output", "[1, 10, 4, 4]"),
        ("conv.weight:grad", "[10, 3, 2, 2]"),
        ("conv.bias:grad", "[10]"),
        ("fc:grad_input", "[1, 160]"),
        ("fc:grad_output", "[1, 5]"),
        ("fc.weight:grad", "[5, 160]"),
        ("fc.bias:grad", "[5]"),
    ]
    norms = {site: float(norm) for site, _, norm in found}
    assert norms["fc:grad_output"] == norms["fc.bias:grad"] == pytest.approx(math.sqrt(5), abs=1e-3)
    assert all(norm > 0 for norm in norms.values())


def test_every_leaf_activation():
    out = run("every_leaf_activation")
    found = re.findall(rf"^(\S+) +(\w+) +(\[.*\]) +from {NUMBER} to {NUMBER}$", out, re.M)
    assert [match[:3] for match in found] == [
        ("0.0", "Conv2d", "[1, 10, 4, 4]"),
        ("0.1", "ReLU", "[1, 10, 4, 4]"),
        ("1", "Flatten", "[1, 160]"),
        ("2.0", "Linear", "[1, 5]"),
        ("2.1", "Softmax", "[1, 5]"),
    ]
    lows, highs = ([float(match[k]) for match in found] for k in (3, 4))
    assert lows[0] < 0  # the in-place ReLU has not overwritten it
    assert lows[1] == lows[2] == 0
    assert highs[0] == highs[1] == highs[2] > 0
    assert 0 < lows[4] < 0.2 < highs[4] < 1


def test_shapes_of_resnet50():
    lines = run("shapes_of_resnet50", of=DYNAMO).splitlines()
    shape = re.compile(r"^ *(\S+) +(\w+) +\[(.*)\] -> \[(.*)\] float32  mean .* std .* ms$")
    rows = [shape.match(line).groups() for line in lines]
    paths = [row[0] for row in rows]
    assert len(paths) == 183
    assert len(paths) - len(set(paths)) == 32  # as the script's first lines say
    assert rows[0] == ("conv1", "Conv2d", "1, 3, 224, 224", "1, 64, 112, 112")
    assert rows[-1] == ("(root)", "ResNet", "1, 3, 224, 224", "1, 1000")
    outputs = {path: output for path, _, _, output in rows}
    assert [outputs[f"layer{k}"] for k in (1, 2, 3, 4)] == [
        "1, 256, 56, 56", "1, 512, 28, 28", "1, 1024, 14, 14", "1, 2048, 7, 7",
    ]  # fmt: skip
    assert outputs["avgpool"] == "1, 2048, 1, 1"
    assert paths.count("layer3.5.relu") == 3
    assert paths.index("layer4.2.conv3") < paths.index("layer4.2") < paths.index("layer4")


def test_features_for_search():
    out = run("features_for_search", of=SKLEARN)
    assert out.startswith("ResNet-50, RANDOM weights")
    assert "240 known images, 120 held out" in out
    rows = re.findall(r"^  (\w+) +(\d+) numbers +nearest (\S+)% +probe (\S+)%$", out, re.M)
    assert [row[:2] for row in rows] == [("pixels", "192"), ("layer4", "8192"), ("avgpool", "2048")]
    for _, _, nearest, probe in rows:  # chance is 10
        assert 85 < float(nearest) <= 100
        assert 90 < float(probe) <= 100
    searches = re.findall(r"^  (\d{3})-(\d)\.png  ->  (.*)$", out, re.M)
    assert len(searches) == 4
    found = [re.findall(r"\d{3}-(\d)\.png", names) for _, _, names in searches]
    assert all(len(labels) == 5 for labels in found)
    right = sum(labels.count(label) for (_, label, _), labels in zip(searches, found, strict=True))
    assert right >= 14  # of 20; by chance 2


def test_clip_an_exploding_network():
    out = run("clip_an_exploding_network", of=DYNAMO)
    without, clipped, report = re.split(r"no gradient's norm.*\n|(?=hl\.clip)", out)
    losses = numbers("loss N", without)
    assert losses[1] > 1e6 * losses[0]
    assert math.isnan(losses[-1])
    losses_clipped = numbers("loss N", clipped)
    assert losses_clipped[0] == losses[0]
    assert max(losses_clipped) < 10
    assert losses_clipped[-1] < 0.2  # always to answer 0 has a loss of 1
    rows = re.findall(r"^  (\S+):grad +(\d+) +300 +(\S+) +\S+$", report, re.M)
    assert len(rows) == 6
    n_clipped = {name: int(n) for name, n, _ in rows}
    (total,) = numbers(r"clipped N of 1800 gradients; ended", report)
    assert total == sum(n_clipped.values()) < 1800
    assert n_clipped["rnn.weight_hh_l0"] > n_clipped["head.bias"] > 0
    largest = {name: float(n) for name, _, n in rows}
    assert max(largest, key=largest.get) == "rnn.weight_hh_l0"


def test_debug_everything():
    out = run("debug_everything", of=DYNAMO)
    calls = re.findall(r"^  (\w+) +(\w+) +\[(.*)\]$", out, re.M)
    forward = [("Sequential", "2, 4"), ("Linear", "2, 4"), ("ReLU", "2, 8"), ("Linear", "2, 8")]
    assert [call[1:] for call in calls if call[0] == "forward_pre"] == forward
    assert [call[1:] for call in calls if call[0] == "forward"] == [
        ("Linear", "2, 8"), ("ReLU", "2, 8"), ("Linear", "2, 1"), ("Sequential", "2, 1"),
    ]  # fmt: skip
    assert [call[1:] for call in calls if call[0] == "backward_pre"] == [
        ("Sequential", "2, 1"), ("Linear", "2, 1"), ("ReLU", "2, 8"), ("Linear", "2, 8"),
    ]  # fmt: skip
    # The gradient of an input has the input's shape.
    assert [call[1:] for call in calls if call[0] == "backward"] == [
        *reversed(forward[1:]),
        forward[0],
    ]
    assert len(calls) == 16
    first, last = numbers("loss N -> N", out)
    assert last < first / 5
    assert "of its model that were seen here: 0\n" in out
    assert "calls seen after the block: 0\n" in out
    assert out.endswith("left behind: no hooks on 4 modules\n")


def test_watch_a_model_being_built():
    out = run("watch_a_model_being_built", of=DYNAMO)
    events = out.split("while it is built:\n")[1].split("hl.attach")[0].splitlines()
    block = ["  Block.conv: Conv2d initialised", "  Block.norm: BatchNorm2d -> GroupNorm"]
    assert events == [
        "  Net.mean: buffer float64 -> float32",
        "  Net.gain: parameter float64 -> float32",
        *block,
        *block,
        "  Net.head: Linear initialised",
    ]
    assert numbers(r"registered \w+ +everywhere +N", out) == [8, 15, 7]
    assert len(re.findall(r"^ +norm +GroupNorm", out, re.M)) == 2
    assert "BatchNorm2d  " not in out
    assert "rows of head.weight orthonormal: True" in out
    assert "dtypes: {torch.float32}" in out
    assert out.endswith("a model built after the block keeps its BatchNorm2d\n")


def test_frozen_layers():
    out = run("frozen_layers", of=SKLEARN)
    before, after = numbers("accuracy N%", out)
    assert 30 < before < 75
    assert 85 < after <= 100
    none = ["stem.weight", "stem.bias", "stem_reduce.weight", "stem_reduce.bias"]
    dead = ["old_head.weight", "old_head.bias"]
    assert f"\nnone: {', '.join(f'{name}:grad' for name in none)}\n" in out
    assert f"\ndead: {', '.join(f'{name}:grad' for name in dead)}\n" in out
    assert re.findall(r"^(\S+):grad .*none: it is frozen", out, re.M) == none
    assert re.findall(r"^(\S+):grad .*dead: no gradient", out, re.M) == dead
    flowing = re.findall(r"^(\S+):grad +1 ", out, re.M)
    assert flowing == ["body.weight", "body.bias", "head.weight", "head.bias"]


def test_class_map():
    out = run("class_map")
    assert out.startswith("ClassMaps of 8 images 8 x 8, by layercam at block2: classes 0, 1, 2, 3,")
    pictures = re.findall(r"^  (.{16})    (.{16})$", out, re.M)
    assert len(pictures) == 16
    assert "@@" in "".join(map_ for _, map_ in pictures[:8])  # the highest place of each map is 1
    (whole,) = numbers("mean score N", out)
    (pointed,) = numbers("points at N", out)
    (at_random,) = numbers("20 times N", out)
    assert whole - pointed > 1.2 * (whole - at_random) > 0


def test_the_table_names_every_script_once():
    listed = re.findall(
        r"^\| \[(\w+)\.py\]\((\w+)\.py\)", (EXAMPLES / "README.md").read_text(), re.M
    )
    assert all(shown == linked for shown, linked in listed)
    assert sorted(shown for shown, _ in listed) == sorted(p.stem for p in EXAMPLES.glob("*.py"))
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert {shown for shown, _ in listed} <= tested


def test_probe_from_a_store():
    out = run("probe_from_a_store", of=SKLEARN)
    assert "Store of 4 sites, 1,797 items" in out
    assert "finds all of its 1797 rows on disk" in out
    accuracies = numbers("  (?:stem|block[123]) +N%", out)
    assert len(accuracies) == 4
    assert accuracies[0] > 80
    assert accuracies[-1] > 97


def test_sentences_for_search():
    out = run("sentences_for_search", of=DYNAMO, quiet=False)  # transformers shows a progress bar
    nearest = dict(re.findall(r"^(\S.*\.) +0\.\d\d  (.*)$", out, re.M))
    assert len(nearest) == 10
    for one, other in [("The cat", "A kitten"), ("The stock", "Shares"), ("She bakes", "His gran")]:
        (found,) = [match for line, match in nearest.items() if line.startswith(one)]
        assert found.startswith(other)
