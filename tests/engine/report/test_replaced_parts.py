"""Modules and parameters that leave their path while a line is on are told at the next pass."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import hookline as hl
from hookline.display.results import printout_of
from hookline.engine.report import replaced_parts
from thoroughness import examples
from zoo import data_parallel

X = torch.ones(1, 2)


class Lora(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x):
        return self.base(x) + 1000


def net():
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))


def both_ways(model):
    model(X).sum().backward()


def said_of(line, model, change, *, runs_before=1):
    """Run, change the model, run twice; return the first lines of the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with line:
            for _ in range(runs_before):
                both_ways(model)
            change(model)
            both_ways(model)
            both_ways(model)
    assert all(warning.category is hl.HooklineWarning for warning in caught)
    return [str(warning.message).partition("\n")[0] for warning in caught]


def set_inner(model):
    model[1] = nn.Sequential(nn.Linear(2, 2), nn.ReLU())


def set_lora(model):
    model[0] = Lora(model[0])


def remove(model):
    del model[1]


def assign(model):
    state = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def swap(model):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double().float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def edit(selector):
    return lambda model: hl.edit(model, selector, lambda value: value * 2)


CASES = {
    "a container": (edit("1.*"), set_inner,
        "hl.edit: the module 1 was replaced (another Sequential now) after the line was attached,"
        " so the edit of 1.0, 1.1 no longer happens."),
    "a wrapper": (edit("0"), set_lora,
        "hl.edit: the module 0 was replaced (Linear before, Lora now) after the line was attached,"
        " so the edit of 0 is at 0.base now."),
    "a deletion": (lambda model: hl.record(model, "1.0"), remove,
        "hl.record: the module 1 was removed after the line was attached,"
        " so the values of 1.0 are those of the old module."),
    "a state": (lambda model: hl.clip(model, norm=1.0), assign,
        "hl.clip: the parameters 0.weight, 0.bias, 1.0.weight and 1 more were replaced (another"
        " Parameter now) after the line was attached, so the clip of 0.weight:grad, 0.bias:grad,"
        " 1.0.weight:grad and 1 more no longer happens."),
    "a swap": (edit("0.bias:grad"), swap,
        "hl.edit: the parameter 0.bias was swapped (torch.utils.swap_tensors) after the line was"
        " attached, so the edit of 0.bias:grad no longer happens."),
    "a parametrization": (edit("0.weight:grad"),
        lambda model: parametrize.register_parametrization(model[0], "weight", nn.Identity()),
        "hl.edit: the parameter 0.weight was unregistered after the line was attached, so the edit"
        " of 0.weight:grad is at 0.parametrizations.weight.original:grad now."),
    "weight norm": (edit("0.weight:grad"), lambda model: parametrizations.weight_norm(model[0]),
        "hl.edit: the parameter 0.weight was unregistered after the line was attached, so the edit"
        " of 0.weight:grad no longer happens."),
    "pruning": (lambda model: hl.record(model, "0.bias:grad"),
        lambda model: prune.l1_unstructured(model[0], "bias", 0.5),
        "hl.record: the parameter 0.bias was unregistered after the line was attached, so the"
        " values of 0.bias:grad are those of 0.bias_orig:grad."),
}  # fmt: skip


@pytest.mark.parametrize("runs_before", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_a_replaced_part_is_told_once_at_the_next_pass(case, runs_before):
    make, change, expected = CASES[case]
    model = net()
    said = said_of(make(model), model, change, runs_before=runs_before)
    assert said == [expected]


def test_the_warning_says_what_to_do_and_names_the_users_line():
    model = net()
    with hl.edit(model, "0", hl.edits.scale(0)):
        model[0] = nn.Linear(2, 2)
        with pytest.warns(hl.HooklineWarning) as told:
            model(X)
    assert str(told[0].message).splitlines()[1:] == [
        "End the line, and call hl.edit again after the model has changed."
    ]
    assert told[0].filename == __file__


def test_the_report_says_what_was_replaced_and_where_it_is():
    model = net()
    line = hl.edit(model, ["0", "1.0"], hl.edits.scale(0))
    said_of(line, model, set_lora)
    report = line.report()
    assert str(report).splitlines() == [
        "hl.edit on Sequential: 2 sites, 3 passes, 2 fired, 0 never; ended; 1 site",
        "  replaced in the model",
        "  site  type    fired  remark",
        "  0     Linear      3  the module 0 was replaced (Linear before, Lora now) after",
        "                       the line was attached; it is now at 0.base",
        "  1.0   Linear      3",
    ]
    assert [str(site) for site in report.replaced] == ["0"]
    assert "1 site replaced in the model" in report._repr_html_()
    assert "it is now at 0.base" in report._repr_html_()


def test_a_report_between_does_not_keep_the_warning_back():
    model = net()
    with hl.record(model, ["0", "1.0.bias:grad"]) as run:
        model(X)
        model[0] = nn.Linear(2, 2)
        assert run.report().replaced == {}
        with pytest.warns(hl.HooklineWarning, match="the values of 0 are those of the old module"):
            both_ways(model)
        assert len(run.report().replaced) == 1


def test_the_report_of_clip_says_which_parameter_was_replaced():
    model = net()
    line = hl.clip(model, "0.bias", norm=1.0)
    said_of(line, model, set_lora)
    text = " ".join(str(line.report()).split())
    assert "; ended; 1 site replaced in the model site" in text
    assert text.endswith("after the line was attached; it is now at 0.base.bias:grad")
    total = hl.clip(model, "1.0", total_norm=1.0)
    said_of(total, model, set_inner)
    rows = printout_of(total.report()).rows
    event = "the module 1 was replaced (another Sequential now) after the line was attached"
    assert [(row[0], row[-1]) for row in rows[1:]] == [
        ("1.0.weight:grad", event), ("1.0.bias:grad", event)
    ]  # fmt: skip


def call_functionally(model):
    given = {name: nn.Parameter(value.clone()) for name, value in model.named_parameters()}
    torch.func.functional_call(model, given, (X,))


def put_back(model):
    first = model[0]
    model[0] = nn.Linear(2, 2)
    model[0] = first


HARMLESS = {
    "a dtype and back": lambda model: model.double().float(),
    "torch's wrapper": lambda model: model.__setitem__(0, data_parallel(model[0])),
    "functional_call": call_functionally,
    "put back": put_back,
    "new data": lambda model: model.load_state_dict(model.state_dict()),
    "more modules": lambda model: model.append(nn.Identity()),
    "a module that is not selected": lambda model: model[1].__setitem__(1, nn.Tanh()),
}


@pytest.mark.parametrize("change", HARMLESS.values(), ids=HARMLESS)
def test_what_stays_at_its_path_is_not_told(change):
    model = net()
    selector = ["0", "1", "1.0", "0.*:grad", "1.0.*:grad"]
    line = hl.record(model, selector)
    assert said_of(line, model, change) == []
    assert "replaced" not in str(line.report())


def test_a_shared_module_is_replaced_when_its_last_path_is():
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    with hl.record(model, "0") as run:
        model(X)
        model[0] = nn.Linear(2, 2)
        model(X)  # still at 2, its other path
        model[2] = nn.Linear(2, 2)
        with pytest.warns(hl.HooklineWarning, match="the module 0 was replaced"):
            model(X)
    assert run.report().fired[0][1] == 3


def test_modules_that_move_up_in_a_sequential_are_told():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    said = said_of(hl.edit(model, "2", lambda value: value), model, remove)
    assert said == [
        "hl.edit: the module 2 was removed after the line was attached, so the edit of 2 is at 1"
        " now."
    ]


@pytest.mark.parametrize("n_runs", [0, 1])
def test_two_modules_that_change_places_are_told(n_runs):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def change_places(model):
        model[0], model[1] = model[1], model[0]

    said = said_of(hl.record(model, "*"), model, change_places, runs_before=n_runs)
    assert said == [
        "hl.record: the modules 0, 1 were replaced (another Linear now) after the line was"
        " attached, so the values of 0, 1 are those of 1, 0."
    ]


def test_a_path_with_a_dot_in_a_name_is_found_again():
    model = net()
    setattr(model, "a.b", nn.Linear(2, 2))  # add_module would refuse this name
    with hl.edit(model, "a.b", lambda value: value) as line:
        both_ways(model)
        both_ways(model)
        assert not line.report().replaced
        delattr(model, "a.b")
        with pytest.warns(hl.HooklineWarning, match="the module a.b was removed"):
            both_ways(model)


def test_hooks_that_were_removed_are_not_told():
    model = net()
    with hl.attach(model) as line:
        handle = line.forward("0", lambda module, args, output: None)
        line.forward("1.0", lambda module, args, output: None)
        model(X)
        handle.remove()
        model[0] = nn.Linear(2, 2)
        model(X)
        set_inner(model)
        with pytest.warns(hl.HooklineWarning, match="so the hooks at 1.0:forward are on the old"):
            model(X)


def test_a_tensor_that_no_model_holds_is_never_replaced():
    model, own = net(), torch.ones(2, requires_grad=True)
    with hl.attach(model) as line:
        line.grad(own, lambda grad: None)
        (model(X) * own).sum().backward()
        (model(X) * own).sum().backward()


@pytest.mark.compiles
@pytest.mark.parametrize("where", ["the model", "a module", "in place"])
def test_compiled_models_are_looked_at_too(fresh_dynamo, where):
    model = net()
    if where == "in place":
        model.compile(backend="eager")
    elif where == "a module":
        model[1] = torch.compile(model[1], backend="eager")
    runs = torch.compile(model, backend="eager") if where == "the model" else model
    with torch.no_grad(), hl.edit(runs, ["0", "1.0"], hl.edits.scale(0)):
        runs(X)
        model[0] = nn.Linear(2, 2)
        with pytest.warns(hl.HooklineWarning, match="so the edit of 0 no longer happens") as told:
            runs(X)
        runs(X)
    # dynamo warns, too: of Python 3.13.0
    assert sum(issubclass(warning.category, hl.HooklineWarning) for warning in told) == 1


def test_each_thread_looks_and_one_tells():
    model = net()
    with hl.record(model, "0", every_thread=True), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model(X)
        model[0] = nn.Linear(2, 2)
        threads = [threading.Thread(target=model, args=(X,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(told) == 1


def test_a_warning_made_an_error_leaves_no_open_pass():
    model = net()
    with hl.record(model, "1.0") as run:
        model[1] = nn.ReLU()
        with warnings.catch_warnings():
            warnings.simplefilter("error", hl.HooklineWarning)
            with pytest.raises(hl.HooklineWarning, match="the module 1 was replaced"):
                model(X)
        model(X)
    assert [record.failed for record in run.passes] == [True, False]


class Grows(nn.Module):
    """Makes a new module beside the selected one in each forward."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2))

    def forward(self, x):
        self.inner.act = nn.Tanh()
        return self.inner(x)


def test_modules_beside_the_selected_ones_cost_no_search(monkeypatch):
    searches, module_tree = [], replaced_parts.module_tree
    monkeypatch.setattr(
        replaced_parts, "module_tree", lambda root: searches.append(root) or module_tree(root)
    )
    model = Grows()
    with hl.record(model, "inner.0") as run:
        for _ in range(5):
            model(X)
        assert not searches
        model.inner[0] = nn.Linear(2, 2)
        with pytest.warns(hl.HooklineWarning, match="the module inner.0 was replaced"):
            model(X)
    assert len(run.passes) == 6


def test_the_parameters_of_fsdp1_are_not_looked_at(monkeypatch):
    model = net()
    monkeypatch.setattr(replaced_parts, "sharding_kind", lambda model: "FSDP1")
    assert said_of(hl.record(model, "0.bias:grad"), model, assign) == []


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=4), st.booleans())
def test_exactly_the_replaced_sites_are_told(changes, with_gradients):
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    ports = ("output", "grad") if with_gradients else "output"
    with hl.edit(model, "*", lambda value: value, ports=ports) as line:
        both_ways(model)
        gone = set()
        for place, is_module in changes:
            if is_module:
                model[place] = nn.Linear(2, 2)
                gone |= {f"{place}", f"{place}.weight:grad", f"{place}.bias:grad"}
            else:
                model[place].bias = nn.Parameter(torch.zeros(2))
                gone.add(f"{place}.bias:grad")
        if not with_gradients:
            gone = {site for site in gone if ":" not in site}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            both_ways(model)
            both_ways(model)
        assert len(caught) == bool(gone)
        assert {str(site) for site in line.report().replaced} == gone


@pytest.mark.parametrize(("n_sites", "text"), [(3, "a, b, c"), (4, "a, b, c and 1 more")])
def test_up_to_three_sites_are_named_and_others_counted(n_sites, text):
    assert replaced_parts._list_first_three(["a", "b", "c", "d"][:n_sites]) == text
