"""The private names of inductor: each test says what breaks when one of them moves."""

from __future__ import annotations

import pytest
import torch

from hookline.engine.torch_private import inductor
from warm import run_python


def double_sum(x):
    return ((x * 2).sum(),)


@pytest.mark.compiles
def test_a_function_is_compiled_once_for_tensors_of_any_length():
    # Without it hl.stats.moments would stay with the plain form, and say so.
    function, (fake,) = inductor.compile_graph(double_sum, torch.zeros(101))
    assert fake.shape[0].node.expr in fake.fake_mode.shape_env.var_to_range
    for n in (2, 1000):
        assert function([torch.ones(n)])[0].item() == 2 * n


@pytest.mark.processes
def test_it_is_loaded_late_and_starts_no_process():
    code = (
        "import sys, torch, multiprocessing\n"
        "from hookline.engine.torch_private import inductor\n"
        "import hookline as hl\n"
        "moments = hl.stats.moments()\n"
        "moments.update(moments.start(torch.ones(1)), torch.ones(100_000))\n"
        "assert 'torch._inductor' not in sys.modules and 'torch._dynamo' not in sys.modules\n"
        "inductor.compile_graph(lambda x: (x.sum(),), torch.zeros(101))\n"
        "from torch._inductor import config\n"
        "from torch._inductor.async_compile import AsyncCompile\n"
        "assert AsyncCompile.process_pool.cache_info().currsize == 0\n"
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.compiles
def test_nothing_is_compiled_where_the_user_has_turned_it_off():
    from torch._dynamo import config

    with config.patch(disable=True), pytest.raises(RuntimeError, match="is disabled"):
        inductor.compile_graph(double_sum, torch.zeros(101))
