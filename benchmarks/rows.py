"""The rows of the table: which contenders do which work, and what is to be reached."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks import contenders, models, other_libraries
from benchmarks.attention_parts import compiled_inside_row, inside_row
from benchmarks.backward import gradient_row
from benchmarks.checking import checking_row
from benchmarks.comparing import comparing_row
from benchmarks.compiling import compiled_row
from benchmarks.drawing import drawing_row
from benchmarks.extracting import extracting_row
from benchmarks.importing import import_row, size_row
from benchmarks.models import Case
from benchmarks.monitoring import monitor_row
from benchmarks.profiling import profile_row
from benchmarks.ray_extraction import ray_row
from benchmarks.reading import opening_row, reading_row, shuffled_row
from benchmarks.saving import look_up_row, saving_row, stack_row
from benchmarks.scaling import select_row
from benchmarks.sweeping import sweep_row
from benchmarks.tensor_moments import measuring_row
from benchmarks.timing import Plan, Result, Step, run_rounds


@dataclass(frozen=True)
class Row:
    """A row: its name for `--only`, how many rounds it takes, and how it is measured."""

    name: str
    rounds: int
    quick_rounds: int
    measure: Callable[[str, Plan], Result]


def _steady(
    make_case: Callable[[], Case], title: str, target: float, calls: int
) -> Callable[[str, Plan], Result]:
    def measure(name: str, plan: Plan) -> Result:
        case = make_case()
        others, skipped = other_libraries.made(other_libraries.STEADY, case)
        result = Result(name, title, "hand-written", target, calls=calls, skipped=skipped)
        ours = [contenders.bare(case), contenders.hand_written(case), contenders.hookline(case)]
        return run_rounds(result, ours + others, plan)

    return measure


def _each(
    make_case: Callable[[], Case], title: str, base: str, target: float, calls: int
) -> Callable[[str, Plan], Result]:
    def measure(name: str, plan: Plan) -> Result:
        case = make_case()
        others, skipped = other_libraries.made(other_libraries.EACH, case)
        result = Result(name, title, base, target, calls=calls, skipped=skipped)
        ours = [
            contenders.bare(case),
            contenders.hand_written_each(case),
            contenders.hookline_each(case),
        ]
        return run_rounds(result, ours + others, plan)

    return measure


def _features(
    make_case: Callable[[], Case], make_prefix: Callable[[], Step], path: str, title: str
) -> Callable[[str, Plan], Result]:
    def measure(name: str, plan: Plan) -> Result:
        case = dataclasses.replace(make_case(), paths=(path,))
        prefix = make_prefix()
        by_hand = contenders.contender(
            "hand-written",
            "the prefix of the model alone",
            contenders.session_without_setup(prefix),
        )
        others, skipped = other_libraries.made(other_libraries.FEATURES, case)
        result = Result(name, title, "hand-written", 1.05, skipped=skipped)
        result.notes.append("hand-written is the prefix alone; bare is the whole forward")
        ours = [
            contenders.bare(case),
            by_hand,
            contenders.hookline_features(case, path, prefix),
        ]
        return run_rounds(result, ours + others, plan)

    return measure


def _compiled_gpt2(work: str, title: str, target: float) -> Callable[[str, Plan], Result]:
    title = f"compiled GPT-2: {title}"
    return compiled_row(models.gpt2, work, title, target, 2, base="bare")


ROWS = (
    Row(
        "tiny",
        200,
        20,
        _steady(models.tiny, "record 200 tiny layers; hooks attached once", 1.05, calls=10),
    ),
    Row(
        "tiny-each",
        200,
        20,
        _each(
            models.tiny,
            "record 200 tiny layers; hooks attached and removed each time",
            "hand-written",
            1.15,
            calls=2,
        ),
    ),
    Row(
        "identities",
        200,
        20,
        _steady(
            models.tiny_identities,
            "record 100 tiny layers and 100 identities; hooks attached once",
            1.08,
            calls=10,
        ),
    ),
    Row(
        "identities-each",
        200,
        20,
        _each(
            models.tiny_identities,
            "record 100 tiny layers and 100 identities; hooks attached and removed each time",
            "hand-written",
            1.15,
            calls=2,
        ),
    ),
    Row(
        "own",
        200,
        20,
        _steady(
            models.tiny_own,
            "record 200 tiny layers of one's own class; hooks attached once",
            1.05,
            10,
        ),
    ),
    Row(
        "resnet34",
        40,
        6,
        _steady(
            models.resnet34,
            "record 36 convolutions of ResNet-34; hooks attached once",
            1.02,
            1,
        ),
    ),
    Row(
        "resnet34-each",
        40,
        6,
        _each(
            models.resnet34,
            "record 36 convolutions of ResNet-34; hooks attached and removed each time",
            "hand-written",
            1.02,
            1,
        ),
    ),
    Row(
        "gpt2",
        100,
        10,
        _steady(models.gpt2, "record 12 blocks of a GPT-2; hooks attached once", 1.02, 1),
    ),
    Row(
        "gpt2-each",
        100,
        10,
        _each(
            models.gpt2,
            "record 12 blocks of a GPT-2; hooks attached and removed each time",
            "hand-written",
            1.02,
            1,
        ),
    ),
    Row(
        "features-resnet34",
        60,
        10,
        _features(
            models.resnet34,
            models.resnet34_prefix,
            "layer1",
            "features of layer1 of ResNet-34; by hand, call those layers alone",
        ),
    ),
    Row(
        "features-gpt2",
        100,
        10,
        _features(
            models.gpt2,
            models.gpt2_prefix,
            "h.2",
            "features of block 3 of 12 of a GPT-2; by hand, call those layers alone",
        ),
    ),
    Row(
        "gradients-tiny",
        200,
        20,
        gradient_row(
            models.tiny, "gradients of 200 tiny linear layers, forward and backward", 1.40, calls=4
        ),
    ),
    Row(
        "gradients-gpt2",
        100,
        10,
        gradient_row(
            models.gpt2, "gradients of 12 blocks of a GPT-2, forward and backward", 1.06, calls=1
        ),
    ),
    Row(
        "profile-gpt2",
        20,
        5,
        profile_row(models.gpt2, "`hl.profile`, a training step of a GPT-2", 1.05, calls=4),
    ),
    Row(
        "check-gpt2",
        60,
        4,
        checking_row("`hl.check`, a training step of a GPT-2", 1.02, compiled=False),
    ),
    Row(
        "check-gpt2-compiled",
        60,
        4,
        checking_row("`hl.check`, a training step of a compiled GPT-2", 1.02, compiled=True),
    ),
    Row("inside-qkv", 60, 6, inside_row(("q", "k", "v"), 1.10)),
    Row("inside-pattern", 60, 6, inside_row(("pattern",), 1.15)),
    Row("compiled-inside-qkv", 60, 6, compiled_inside_row(("q", "k", "v"), 1.05)),
    Row("compiled-inside-pattern", 60, 6, compiled_inside_row(("pattern",), 1.15)),
    Row("compiled-idle", 100, 10, _compiled_gpt2("idle", "a line that sees nothing", 1.01)),
    Row("compiled-record", 100, 10, _compiled_gpt2("record", "record 12 blocks", 1.03)),
    Row(
        "compiled-statistics",
        100,
        10,
        _compiled_gpt2("statistics", "4 statistics of 12 blocks", 1.05),
    ),
    Row(
        "compiled-gradients",
        100,
        10,
        _compiled_gpt2("gradients", "outputs and gradients of 12 blocks, in training", 1.05),
    ),
    Row("compiled-edit", 100, 10, _compiled_gpt2("edit", "an edit of one block", 1.06)),
    Row(
        "compiled-resnet34",
        40,
        6,
        compiled_row(
            models.resnet34,
            "record",
            "compiled ResNet-34: record 36 convolutions",
            1.02,
            1,
            base="hand-written",
        ),
    ),
    Row(
        "compiled-tiny",
        200,
        20,
        compiled_row(
            models.tiny,
            "record",
            "200 compiled tiny layers: record them",
            1.02,
            20,
            base="hand-written",
        ),
    ),
    Row(
        "monitor-gpt2",
        20,
        4,
        monitor_row("activations", "`hl.monitor` of the outputs of 12 blocks, each step", 1.05),
    ),
    Row(
        "monitor-gpt2-all",
        12,
        3,
        monitor_row(
            "all", "`hl.monitor` of outputs, gradients, weights and updates, each step", 1.10
        ),
    ),
    Row(
        "monitor-gpt2-tenth",
        8,
        2,
        monitor_row("tenth", "`hl.monitor` of all of these, every 10th step", 1.02),
    ),
    Row(
        "monitor-small",
        20,
        4,
        monitor_row("small", "small GPT-2: `hl.monitor` of the outputs of all modules", 1.15),
    ),
    Row(
        "monitor-small-all",
        12,
        3,
        monitor_row(
            "small-all", "small GPT-2: `hl.monitor` of outputs, gradients, weights and updates", 1.5
        ),
    ),
    Row(
        "monitor-gpt2-compiled",
        20,
        4,
        monitor_row(
            "compiled", "compiled GPT-2: `hl.monitor` of the outputs of 12 blocks, each step", 1.05
        ),
    ),
    Row("sweep-gpt2", 7, 1, sweep_row(12, 256, 0.334)),
    Row("sweep-gpt2-small", 15, 3, sweep_row(4, 64, 0.2)),
    Row(
        "extract-resnet34",
        15,
        2,
        extracting_row(
            models.resnet34,
            ["layer4"],
            8,
            "`hl.extract` of ResNet-34's layer4 from 32 images",
            1.053,
        ),
    ),
    Row(
        "extract-resnet34-four",
        15,
        2,
        extracting_row(
            models.resnet34,
            ["layer1", "layer2", "layer3", "layer4"],
            8,
            "`hl.extract` of four stages of ResNet-34",
            1.087,
        ),
    ),
    Row(
        "extract-ray",
        3,
        1,
        ray_row(
            models.gpt2,
            "h.11",
            (40, 20),
            "`hl.extract` of a block of a GPT-2 by two actors of Ray, against two processes",
            1.176,  # 0.85 of their speed
        ),
    ),
    Row(
        "extract-resnet34-all",
        10,
        2,
        extracting_row(
            models.resnet34, ["layer*.*"], 8, "`hl.extract` of all 16 blocks of ResNet-34", 1.25
        ),
    ),
    Row(
        "extract-gpt2",
        15,
        2,
        extracting_row(
            models.gpt2,
            ["h.11"],
            40,
            "`hl.extract` of the last block of a GPT-2 from 160 texts",
            1.053,
        ),
    ),
    Row(
        "extract-gpt2-four",
        15,
        2,
        extracting_row(
            models.gpt2,
            ["h.2", "h.5", "h.8", "h.11"],
            40,
            "`hl.extract` of four blocks of a GPT-2",
            1.087,
        ),
    ),
    Row(
        "extract-gpt2-all",
        10,
        2,
        extracting_row(models.gpt2, ["h.*"], 40, "`hl.extract` of all 12 blocks of a GPT-2", 1.25),
    ),
    Row(
        "store-slices",
        30,
        5,
        reading_row("slice", "read a store of 403 MB in slices of 1,024 rows; time per row", 1.43),
    ),
    Row("store-rows", 30, 5, reading_row("row", "read random rows of a store; time per row", 2.22)),
    Row(
        "store-batches",
        30,
        5,
        reading_row("batch", "read random batches of 64 rows of a store; time per row", 1.67),
    ),
    Row(
        "store-shuffled", 20, 4, shuffled_row(16, "a shuffled epoch of a store; time per row", 5.0)
    ),
    Row(
        "store-shuffled-one",
        20,
        4,
        shuffled_row(1, "a shuffled epoch, one shard at a time; time per row", 5.0),
    ),
    Row(
        "store-shuffled-four",
        20,
        4,
        shuffled_row(4, "a shuffled epoch, four shards mixed; time per row", 5.0),
    ),
    Row(
        "store-open",
        40,
        10,
        opening_row(10_000, 5, "open a store of 10,000 shards and 5 sites", 0.05),
    ),
    Row("import", 20, 4, import_row),
    Row("size", 1, 1, size_row),
    Row("select", 15, 3, select_row),
    Row("plots", 20, 5, drawing_row),
    Row(
        "save",
        40,
        6,
        saving_row(10_000, 64, "`run.save` of 10,000 small values; time per value", 1.10),
    ),
    Row(
        "save-large",
        20,
        4,
        saving_row(32, 2**20, "`run.save` of 32 values of 4 MiB each; time per value", 1.10),
    ),
    Row(
        "look-up",
        40,
        6,
        look_up_row(
            10_000,
            64,
            "look up 10,000 small values of an opened recording, and sum each; time per value",
            1.20,
        ),
    ),
    Row(
        "look-up-large",
        40,
        6,
        look_up_row(
            32,
            2**20,
            "look up 32 values of 4 MiB each of an opened recording, and sum each; time per value",
            1.50,
        ),
    ),
    Row(
        "compare-large",
        9,
        2,
        comparing_row(
            64,
            (1024, 1280),
            "compare two recordings of 64 x 5 MiB; from the page cache",
            2.50,
            is_cold=False,
        ),
    ),
    Row(
        "compare-large-cold",
        9,
        2,
        comparing_row(
            64,
            (1024, 1280),
            "compare two recordings of 64 x 5 MiB; from the disk",
            1.20,
            is_cold=True,
        ),
    ),
    Row("stats-1e3", 60, 10, measuring_row(10**3, 2.50, 200)),
    Row("stats-1e5", 60, 10, measuring_row(10**5, 0.90, 20)),
    Row("stats-1e7", 15, 5, measuring_row(10**7, 0.30, 1)),
    Row(
        "stack",
        20,
        5,
        stack_row(16_000, 16, "`run.stack` of the values of 16,000 passes; time per value", 8e-6),
    ),
)


def measure(row: Row, plan: Plan) -> Result:
    """Measure one row, without gradients, as one records."""
    with torch.no_grad():
        return row.measure(row.name, plan)
