"""summary: the table's numbers, and a model left as it was."""

from __future__ import annotations

import io
import warnings

import pytest
import torch
from torch import nn

import hookline as hl


def rows(table):
    return {row.path: row for row in table.rows}


def test_shapes_parameters_flops_and_memory_are_right(net, image):
    table = hl.summary(net, image)
    by_path = rows(table)
    stem = by_path["stem"]
    assert (stem.input, stem.output, stem.dtype) == ("[2, 3, 8, 8]", "[2, 4, 8, 8]", "float32")
    assert stem.parameters == 3 * 4 * 9 + 4
    assert stem.flops == 2 * (3 * 9) * (2 * 4 * 8 * 8)
    assert stem.output_bytes == 2 * 4 * 8 * 8 * 4
    assert by_path["fc"].flops == 2 * 2 * 4 * 5
    conv = 2 * (4 * 9) * (2 * 4 * 8 * 8)
    assert by_path["layer1"].flops == 2 * conv
    assert table.flops == stem.flops + 4 * conv + by_path["fc"].flops
    assert table.parameters == sum(p.numel() for p in net.parameters())
    assert table.parameter_bytes == 4 * table.parameters
    assert table.input_bytes == image.nbytes
    assert table.failure is None


def test_activations_are_the_outputs_of_innermost_modules():
    model = nn.Sequential(nn.Linear(2, 4), nn.Sequential(nn.Linear(4, 8), nn.ReLU()))
    table = hl.summary(model, torch.zeros(3, 2))
    assert table.activation_bytes == 4 * 3 * (4 + 8 + 8)
    assert hl.summary(nn.ReLU(), torch.zeros(3, 2)).activation_bytes == 4 * 3 * 2


class Encoder(nn.Module):
    """Has a method beside its forward, which runs a part of it."""

    def __init__(self):
        super().__init__()
        self.encoder, self.head = nn.Linear(3, 4), nn.Linear(4, 5)

    def encode(self, x):
        return self.encoder(x)


def test_a_run_of_a_part_of_the_model_has_its_flops():
    model = Encoder()
    table = hl.summary(model, lambda: model.encode(torch.ones(2, 3)))
    assert (table.flops, rows(table)[""].flops) == (48, 0)
    assert table.to_dict()["flops"] == 48
    assert "FLOPs              48" in str(table)


def test_the_model_is_left_as_it_was(image, left_as_found):
    model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2), nn.Dropout(0.5)).train()
    model[1].eval()
    before = left_as_found(model)
    hl.summary(model, image)
    assert left_as_found(model) == before
    assert [module.training for module in model.modules()] == [True, True, False, True]


def test_buffers_that_the_forward_writes_to_are_put_back():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("n", torch.zeros(1))

        def forward(self, x):
            self.n += 1
            return x * self.n

    model = Counting()
    hl.summary(model, torch.ones(2))
    assert model.n.item() == 0


def test_attributes_and_new_buffers_are_put_back():
    class Holding(nn.Module):
        n_runs, held = 0, None

        def forward(self, x):
            self.n_runs += 1
            self.held = x
            self.register_buffer("last", x.mean())
            return x

    model = Holding()
    before = dict(vars(model))
    for look in (hl.summary, lambda *given: hl.operations(*given, "")):
        look(model, torch.ones(2))
        assert vars(model) == before
        assert (model.n_runs, model.held, [*model.buffers()]) == (0, None, [])


def test_shared_modules_and_parameters_are_counted_once():
    shared = nn.Linear(3, 3)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    table = hl.summary(model, torch.ones(1, 3))
    assert table.parameters == 12
    row = rows(table)["0"]
    assert (row.calls, row.aliases) == (2, ("2",))
    assert row.flops == 2 * (2 * 9)
    assert len(table.rows) == 3


def test_a_model_larger_than_memory_is_described_on_meta():
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(200_000, 200_000, bias=False) for _ in range(4)])
    table = hl.summary(model, torch.zeros(1, 200_000))
    assert table.parameters == 160_000_000_000
    assert table.flops == 2 * table.parameters
    assert rows(table)["3"].output == "[1, 200000]"


def test_a_failing_forward_keeps_what_ran_and_names_the_module(net):
    net.fc = nn.Linear(7, 5)
    table = hl.summary(net, torch.zeros(1, 3, 8, 8))
    assert table.failure.startswith("fc (Linear), which got Tensor[1, 4]: RuntimeError: ")
    assert rows(table)["layer2"].output == "[1, 4, 8, 8]"
    assert rows(table)["fc"].calls == 0
    assert "fc (Linear), which got Tensor[1, 4]" in " ".join(str(table).split())


def test_without_an_input_only_the_parameters_are_described(net):
    table = hl.summary(net)
    assert not table.ran
    assert rows(table)["fc"].parameters == 25
    assert "[2, " not in str(table)


def test_every_form_of_input_is_taken(net, image, holder):
    for inputs in ((image,), {"x": image}, lambda: net(image)):
        assert hl.summary(net, inputs).flops == hl.summary(net, image).flops
    assert "OrderedDict" in rows(hl.summary(holder, torch.ones(2)))["inner"].output


def test_a_module_that_calls_itself_is_counted_once():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 2, bias=False)

        def forward(self, x, again=True):
            x = self.fc(x)
            return self(x, again=False) if again else x

    table = hl.summary(Twice(), torch.ones(1, 2))
    assert table.flops == 2 * (2 * 4)
    assert rows(table)["fc"].calls == 2


def test_a_lazy_model_is_not_made_real_by_looking_at_it():
    model = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(hl.InputError, match="lazy"):
        hl.summary(model, torch.ones(1, 3))
    assert hl.summary(model).parameters == 0


def test_frozen_parameters_are_told_apart(net):
    net.fc.requires_grad_(False)
    table = hl.summary(net)
    assert table.parameters - table.trainable == 25


def test_it_prints_as_a_table(net, image):
    text = str(hl.summary(net, image))
    assert "SmallNet" in text
    assert "BatchNorm2d" in text


def test_a_model_that_reacts_to_its_mode_is_not_told():
    class Merging(nn.Linear):
        merged = False

        def train(self, mode=True):
            self.merged = not mode
            return super().train(mode)

    model = nn.Sequential(Merging(2, 2))
    hl.summary(model, torch.ones(1, 2))
    assert not model[0].merged
    assert model[0].training


def test_replaced_and_inference_buffers_are_put_back():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("n", torch.zeros(1))

        def forward(self, x):
            self.n = self.n + 1
            return x * self.n

    model = Counting()
    n = model.n
    hl.summary(model, torch.ones(2))
    assert model.n is n
    assert n.item() == 0
    with torch.inference_mode():
        model = nn.BatchNorm1d(2)
    hl.summary(model, torch.ones(3, 2))


def test_nested_and_sparse_tensors_do_not_stop_it():
    class Odd(nn.Module):
        def forward(self, x):
            return x

    model = nn.Sequential(Odd())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's, that these are in beta
        values = [
            torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
            torch.eye(3).to_sparse(),
            torch.eye(3).to_sparse_csr(),
        ]
    for value in values:
        assert hl.summary(model, value).failure is None
        with hl.record(model, ports=("input", "output")) as run:
            model(value)
        with hl.watch(model, file=io.StringIO()):
            model(value)
        with hl.edit(model, "0", lambda t: t):
            model(value)
        assert run["0"] is not None


def test_fused_attention_is_counted():
    class Attention(nn.Module):
        def forward(self, q):
            return nn.functional.scaled_dot_product_attention(q, q, q)

    q = torch.zeros(1, 2, 8, 4)
    expected = 2 * (2 * 2 * 8 * 8 * 4)
    assert hl.summary(Attention(), q).flops == expected
    assert hl.summary(Attention(), q.to("meta")).flops == expected


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, x):
        heads = self.proj(x)[:, None]
        return nn.functional.scaled_dot_product_attention(heads, heads, heads)[:, 0]


def test_a_pattern_that_a_line_reads_is_not_the_models():
    model, x = Attends().eval(), torch.ones(2, 5, 8)
    plain = hl.summary(model, x).flops
    for names in ("@pattern", ["@scores", "@pattern"], "@q"):
        with hl.record(model, names):
            assert hl.summary(model, x).flops == plain
    with hl.monitor(model, "@pattern", ports="output"):
        assert hl.summary(model, x).flops == plain
    with hl.edit(model, "@pattern", hl.edits.scale(0)):  # the model's own product then
        assert hl.summary(model, x).flops == plain


def test_arithmetic_of_hooks_that_read_is_not_the_models():
    model, x = nn.Sequential(nn.Linear(3, 4)), torch.ones(2, 3)
    reader = nn.Linear(4, 8)
    with (
        hl.watch(model, file=io.StringIO()),
        hl.record(model, "0", keep=lambda value: torch.fft.fft(reader(value)).abs()),
    ):
        table = hl.summary(model, x)
    assert (table.flops, table.without_formula) == (48, ())
    with hl.edit(model, "0", lambda value: value @ torch.ones(4, 4)):
        assert hl.summary(model, x).flops == 48 + 64  # an edit is part of the run


def test_tables_give_their_rows_one_by_one():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU()), torch.ones(2, 3)
    with hl.profile(model) as prof:
        model(x)
    paths = ["", "0", "1"]
    for table in (hl.summary(model, x), prof, prof.per_pass, prof.fold(1)):
        assert [row.path for row in table] == paths
    assert [str(verdict.site) for verdict in hl.doctor(model, x, ["0", "1"])] == paths[1:]


def test_bytes_and_flops_of_vmap_are_those_of_all_examples():
    model, x = nn.Linear(3, 4), torch.ones(5, 3)
    table = hl.summary(model, lambda: torch.func.vmap(model)(x))
    assert (table.flops, table.activation_bytes) == (2 * 5 * 3 * 4, 4 * 5 * 4)


def test_the_outputs_of_modules_whose_parts_do_not_run_are_kept():
    x = torch.ones(2, 5, 8)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)  # its out_proj is never called
    assert hl.summary(attention, (x, x, x)).activation_bytes == 4 * (2 * 5 * 8 + 2 * 5 * 5)
    layer = torch.nn.utils.parametrizations.orthogonal(nn.Linear(8, 4))
    weight = 4 * (8 * 4)  # the parametrization returns it
    for model in (layer, nn.Sequential(layer)):
        assert hl.summary(model, x).activation_bytes == 4 * (2 * 5 * 4) + weight


@pytest.mark.filterwarnings("ignore:.*nested:UserWarning")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_run_and_their_flops_are_not_known(layout):
    value = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=layout)
    table = hl.summary(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), value)
    assert (table.failure, table.flops) == (None, 0)
    assert table.without_formula == ("aten::linear on nested tensors",)
    text = " ".join(str(table).split())
    assert "FLOPs leave out aten::linear on nested tensors: no formula is known." in text
    assert "Register" not in text


@pytest.mark.filterwarnings("ignore:.*nested:UserWarning")
def test_the_fast_path_of_transformers_runs_with_a_mask():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    mask = torch.tensor([[False] * 5, [False, False, False, True, True]])
    table = hl.summary(nn.TransformerEncoder(layer, 1), (torch.ones(2, 5, 8), None, mask))
    assert table.failure is None
    assert "aten::linear on nested tensors" in table.without_formula


def test_marks_of_the_profiler_do_no_work():
    class Marked(nn.Module):
        def forward(self, x):
            with torch.profiler.record_function("mark"):
                return x + 1

    assert hl.summary(Marked(), torch.ones(2)).without_formula == ()


SPARSE = {
    "coo": lambda dense: dense.to_sparse(),
    "csr": lambda dense: dense.to_sparse_csr(),
    "csc": lambda dense: dense.to_sparse_csc(),
    "bsr": lambda dense: dense.to_sparse_bsr((2, 2)),
    "bsc": lambda dense: dense.to_sparse_bsc((2, 2)),
}


class Graph(nn.Module):
    """A sparse matrix of links between nodes, which multiplies features of the nodes."""

    def __init__(self, links):
        super().__init__()
        self.register_buffer("links", links)

    def forward(self, x):
        both = self.links @ x, torch.sparse.mm(self.links, x)
        return torch.sparse.addmm(both[0], self.links, both[1]), self.links @ x[:, 0]


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize(("layout", "n_values"), [("coo", 6), ("csr", 6), ("bsr", 12)])
def test_products_of_sparse_tensors_count_the_values_they_hold(layout, n_values):
    links = SPARSE[layout](torch.diag(torch.ones(6)))
    table = hl.summary(Graph(links), torch.ones(6, 5))
    assert table.failure is None
    assert (table.flops, table.without_formula) == (2 * n_values * (3 * 5 + 1), ())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("layout", SPARSE)
def test_the_bytes_of_a_sparse_buffer_are_those_it_holds(layout, tmp_path):
    sparse = SPARSE[layout](torch.eye(4))
    held = n_bytes_held(sparse)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    model.register_buffer("mask", sparse)
    assert hl.summary(model).buffer_bytes == held
    x = torch.ones(2, 5, 8)
    with hl.record(model.eval(), "layers.0", to=tmp_path / "run"):
        model(x)
    assert hl.open(tmp_path / "run")["layers.0"].shape == x.shape
    assert hl.anatomy(model, x)["mlp_out"]


def test_a_table_can_be_folded():
    model = nn.Sequential(nn.ModuleList([nn.Linear(2, 2).double()]), nn.Identity())
    table = hl.summary(model, lambda: model[0][0](torch.ones(1, 2).double()))
    folded = table.fold(1)
    assert [row.path for row in folded.rows] == ["", "0", "1"]
    assert [row["path"] for row in folded.to_dict()["rows"]] == ["", "0", "1"]
    assert (folded.flops, folded.dtypes) == (table.flops, {"float64"})
    lines = [line.split()[:3] for line in str(folded).splitlines()[2:5]]
    assert (
        lines == [line.split()[:3] for line in str(table).splitlines() if "Linear" not in line][2:5]
    )
    assert [row.path for row in folded.fold(0).rows] == [""]
    with pytest.raises(hl.InputError, match="integer from 0 on, got True"):
        table.fold(True)


def n_bytes_held(sparse):
    names = ("indices", "values", "crow_indices", "col_indices", "ccol_indices", "row_indices")
    total = 0
    for name in names:
        try:
            total += getattr(sparse, name)().nbytes
        except RuntimeError:  # of another layout
            continue
    return total
