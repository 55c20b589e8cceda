"""Moments of tensors: what is counted, of which dtypes, merged, and in compiled code."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hookline as hl
from hookline.statistics import compiled_reduction as compiled_reductions
from hookline.statistics import moments as moments_statistic
from thoroughness import examples

NUMBERS = st.floats(width=32)  # NaN, infinities, zeros of both signs and the largest are in it
BATCHES = st.lists(st.lists(NUMBERS, max_size=8), min_size=1, max_size=5)


def slots_of(*values, statistic=None):
    statistic = statistic or hl.stats.moments()
    slots = statistic.start(values[0])
    for value in values:
        slots = statistic.update(slots, value)
    return slots


def measure(*values):
    return hl.stats.moments().result(slots_of(*values))


def by_python(numbers):
    """The moments of Python floats, summed exactly."""
    finite = [x for x in numbers if math.isfinite(x)]
    return hl.stats.Moments(
        count=len(numbers),
        non_finite=len(numbers) - len(finite),
        zeros=finite.count(0),
        sum=math.fsum(finite),
        sum2=math.fsum(x**2 for x in finite),
        sum4=math.fsum(x**4 for x in finite),
        min=min(finite, default=math.inf),
        max=max(finite, default=-math.inf),
    )


def assert_same(one, other, rel=1e-6):
    """The same counts and extremes, and sums that agree in units of what was summed."""
    for name in ("count", "non_finite", "zeros", "min", "max"):
        assert getattr(one, name) == getattr(other, name), name
    assert one.sum == pytest.approx(other.sum, abs=rel * math.sqrt(other.sum2 * other.count))
    assert one.sum2 == pytest.approx(other.sum2, rel=rel)
    assert one.sum4 == pytest.approx(other.sum4, rel=rel)


@settings(max_examples=examples(60), deadline=None)
@given(BATCHES)
def test_batches_give_the_moments_of_the_whole(batches):
    tensors = [torch.tensor(batch) for batch in batches]
    assert_same(measure(*tensors), by_python([x for t in tensors for x in t.tolist()]))


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None)
@given(BATCHES, BATCHES, BATCHES)
def test_merging_is_associative_and_commutes(a, b, c):
    moments = hl.stats.moments()
    a, b, c = (slots_of(*map(torch.tensor, batches)) for batches in (a, b, c))
    left = moments.result(moments.merge(moments.merge(a, b), c))
    right = moments.result(moments.merge(a, moments.merge(b, c)))
    assert_same(left, right, rel=1e-14)
    assert torch.equal(moments.merge(a, b), moments.merge(b, a))


def test_empty_slots_change_nothing():
    moments = hl.stats.moments()
    slots = slots_of(torch.tensor([1.0, -2.0]))
    assert torch.equal(moments.merge(slots, moments.start(slots)), slots)
    assert torch.equal(moments.update(slots, torch.empty(0, 3)), slots)
    assert moments.result(moments.start(slots)) == hl.stats.Moments()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_numbers_are_counted_and_left_out(bad):
    assert measure(torch.tensor([1.0, bad, 3.0, 0.0])) == hl.stats.Moments(
        count=4, non_finite=1, zeros=1, sum=4, sum2=10, sum4=82, min=0, max=3
    )
    assert measure(torch.tensor([bad, bad])) == hl.stats.Moments(count=2, non_finite=2)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64,
        torch.int8, torch.uint8,
    ],
)  # fmt: skip
def test_every_dtype_of_real_numbers_is_measured(dtype):
    found = measure(torch.tensor([0.0, 1, 2, 4]).to(dtype))
    assert found == hl.stats.Moments(4, 0, 1, sum=7, sum2=21, sum4=273, min=0, max=4)


def test_bools_are_numbers_and_complex_numbers_magnitudes():
    assert measure(torch.tensor([True, False])) == hl.stats.Moments(2, 0, 1, 1, 1, 1, 0, 1)
    found = measure(torch.tensor([3 + 4j, 0j, complex("inf+1j")]))
    assert found == hl.stats.Moments(3, 1, 1, sum=5, sum2=25, sum4=625, min=0, max=5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sums_of_the_largest_numbers_do_not_overflow(dtype):
    largest = torch.finfo(dtype).max
    found = measure(torch.full((1000,), largest, dtype=dtype))
    assert found.sum == pytest.approx(1000 * largest, rel=1e-12)
    assert found.sum4 == pytest.approx(1000 * largest**4, rel=1e-12)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_sparse_nested_and_quantised_tensors_are_measured():
    assert measure(torch.eye(4).to_sparse()) == measure(torch.eye(4))
    parts = [torch.ones(2), torch.zeros(3)]
    nested = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    assert measure(nested) == measure(*parts)
    quantised = torch.quantize_per_tensor(torch.arange(4.0), 1.0, 0, torch.quint8)
    assert measure(quantised) == measure(torch.arange(4.0))


def test_the_imaginary_part_of_a_conjugate_is_measured():
    part = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    assert part.is_neg()
    assert measure(part) == measure(torch.tensor([-2.0, 4.0]))


def test_a_value_keeps_its_graph_and_its_numbers():
    parameter = torch.ones(3, requires_grad=True)
    doubled = parameter * 2
    assert not slots_of(doubled).requires_grad
    doubled.sum().backward()
    assert parameter.grad.tolist() == [2, 2, 2]


def test_a_meta_tensor_is_refused():
    with pytest.raises(hl.StructureError, match=r"must have data, got .*meta.*\n.*to_empty"):
        measure(torch.empty(3, device="meta"))


def test_an_update_leaves_the_slots_that_it_was_given():
    moments = hl.stats.moments()
    slots = moments.start(torch.ones(1))
    before = slots.clone()
    moments.update(slots, torch.ones(1))
    assert torch.equal(slots, before)


@pytest.mark.usefixtures("fresh_dynamo")
def test_an_update_is_traced_without_a_graph_break():
    moments = hl.stats.moments()

    @torch.compile(fullgraph=True)
    def step(slots, x):
        y = x * 2
        return moments.update(slots, y), y

    for x in (torch.tensor([[1.0, math.nan], [0.0, -3.0]]), torch.empty(0, 2)):
        slots, y = step(moments.start(x), x)
        assert_same(moments.result(slots), measure(y), rel=1e-12)


def test_the_statistic_is_one_of_the_protocol():
    assert isinstance(hl.stats.moments(), hl.stats.Statistic)


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@pytest.fixture(scope="module")
def compiled():
    """A statistic that measures by the compiled function, which no test of this file replaces."""
    statistic = hl.stats.moments(compile=True)
    slots_of(torch.zeros(2**14), statistic=statistic)
    assert moments_statistic._COMPILED.find_or_compile(torch.zeros(1), compile=False) is not None
    return statistic


@pytest.mark.compiles
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_compiled_form_gives_what_the_plain_form_gives(compiled, dtype):
    x = torch.randn(3, 5_701, generator=torch.Generator().manual_seed(0)).to(dtype) * 100
    x[0, :100] = 0
    x[1, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    x[2, 0] = torch.finfo(dtype).max / 2 if dtype is not torch.float64 else 1e70
    for value in (x, x.t(), x[:, ::2], x[0, 50:150], x[:2, 0], x[0, :1], x[:, :0]):
        found = compiled.result(slots_of(value, value, statistic=compiled))
        assert_same(found, measure(value, value), rel=1e-13)


@pytest.mark.compiles
def test_modes_of_the_caller_compile_nothing_anew(compiled, monkeypatch):
    x = torch.randn(2**14)
    expected = slots_of(x, statistic=compiled)
    monkeypatch.setattr(compiled_reductions, "compile_graph", None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(slots_of(x * 1, statistic=compiled), expected)
    with torch.inference_mode():
        assert torch.equal(slots_of(x * 1, statistic=compiled), expected)
    assert torch.equal(slots_of(x.requires_grad_(), statistic=compiled), expected)


@pytest.fixture
def nothing_compiled(monkeypatch):
    """Compiled functions are forgotten, and compiling one is counted."""
    forms = compiled_reductions.CompiledReduction(moments_statistic._add_by_torch, 8)
    monkeypatch.setattr(moments_statistic, "_COMPILED", forms)
    asked = []

    def compile_graph(function, *examples):
        asked.append(examples[1].dtype)
        raise RuntimeError("no C++ compiler\nof this name")

    monkeypatch.setattr(compiled_reductions, "compile_graph", compile_graph)
    return asked


def test_without_a_compiler_the_plain_form_goes_on_and_says_so(nothing_compiled):
    statistic = hl.stats.moments(compile=True)
    x = torch.randn(2**14)
    with pytest.warns(hl.HooklineWarning) as caught:
        found = [slots_of(value, statistic=statistic) for value in (x, x, x.double())]
    assert all(torch.equal(slots, slots_of(x)) for slots in found)
    assert nothing_compiled == [torch.float32, torch.float64]
    (warning,) = caught
    assert "RuntimeError: no C++ compiler." in str(warning.message)
    assert "compile=False" in str(warning.message)


@pytest.mark.filterwarnings("error")
def test_a_warning_that_is_an_error_is_raised_once(nothing_compiled):
    statistic = hl.stats.moments(compile=True)
    x = torch.randn(2**14)
    with pytest.raises(hl.HooklineWarning, match="could not be compiled"):
        slots_of(x, statistic=statistic)
    assert torch.equal(slots_of(x, statistic=statistic), slots_of(x))
    assert nothing_compiled == [torch.float32]


@pytest.mark.parametrize("way", ["eager", "compiled"])
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_recording_keeps_slots_in_place_of_values(way):
    torch.manual_seed(0)
    model, x = torch.nn.Linear(3, 4), torch.randn(5, 3)
    run_model = model if way == "eager" else torch.compile(model, fullgraph=True)
    moments = hl.stats.moments()
    with (
        torch.no_grad(),
        hl.record(model, keep=lambda t: moments.update(moments.start(t), t)) as run,
    ):
        run_model(x)
    assert_same(moments.result(run["(root)"]), measure(model(x).detach()), rel=1e-12)


@pytest.mark.filterwarnings("ignore:.*could not be compiled")
def test_small_tensors_compile_nothing(nothing_compiled, monkeypatch):
    monkeypatch.setattr(moments_statistic, "_WORTH_COMPILING", 3 * 2**14)
    statistic = hl.stats.moments()
    for n in (2**14 - 1, 2**14, 2**14, 100, 2**14):
        slots_of(torch.ones(n), statistic=statistic)
    assert nothing_compiled == []
    slots_of(torch.ones(2**14), statistic=statistic)
    assert nothing_compiled == [torch.float32]
    slots_of(torch.ones(2**14).double(), statistic=hl.stats.moments(compile=False))
    assert nothing_compiled == [torch.float32]


def test_under_vmap_all_examples_are_measured():
    found = []

    def one(x):
        found.append(measure(x))
        return x

    torch.vmap(one)(torch.arange(6.0).reshape(3, 2))
    assert found == [measure(torch.arange(6.0))]


def test_no_finite_number_has_no_greatest_magnitude():
    model = torch.nn.Identity()
    with hl.monitor(model, ports="output") as seen:
        model(torch.tensor([torch.nan]))
    assert math.isnan(measure(torch.tensor([torch.nan])).max_abs)
    assert all(math.isnan(getattr(seen[""], name)[0]) for name in ("max_abs", "min", "max"))


def test_squares_beyond_float64_leave_the_extremes_right():
    for size, norm in ((1e200, math.inf), (1e-200, 0.0)):
        found = measure(torch.tensor([size, -size], dtype=torch.float64))
        assert (found.norm, found.rms, found.max_abs, found.min) == (norm, norm, size, -size)


def test_the_numbers_of_moments_are_those_of_torch():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5
    found = measure(x)
    assert found.mean == pytest.approx(x.mean().item(), rel=1e-12)
    assert found.std == pytest.approx(x.std(correction=0).item(), rel=1e-12)
    assert found.rms == pytest.approx(x.square().mean().sqrt().item(), rel=1e-12)
    assert found.norm == pytest.approx(x.norm().item(), rel=1e-12)
    assert found.kurtosis == pytest.approx((x**4).mean().item() / x.square().mean().item() ** 2)
    assert (found.max_abs, found.finite) == (x.abs().max().item(), 1000)
    assert str(found).splitlines()[0] == "1,000 elements, 0 zeros, 0 non-finite"


def test_equal_numbers_have_no_deviation():
    assert measure(torch.full((1000,), 1000.1)).std == 0
    nothing = measure(torch.empty(0))
    assert all(math.isnan(one) for one in (nothing.mean, nothing.std, nothing.rms))
    assert math.isnan(measure(torch.zeros(3)).kurtosis)
    assert math.isnan(measure(torch.tensor([1e300, 2e300], dtype=torch.float64)).std)
    assert str(nothing) == "0 elements, 0 zeros, 0 non-finite"
