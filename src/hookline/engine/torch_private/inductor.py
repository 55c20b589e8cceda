"""Inductor, called without dynamo."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hookline.engine.torch_private.dynamo import OLD_DYNAMO


def compile_graph(function: Callable[..., Any], *examples: Tensor) -> tuple[Any, list[Any]]:
    """Compile a function that returns a tuple of tensors, in this process, without guards.

    Returns:
        The compiled function of one list of arguments, and the fake arguments that it was traced
        with. Their shape environment has the guards, which the caller must check.
    """
    # These modules take a second to load.
    from torch._dynamo import config as dynamo
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    if dynamo.disable:  # TORCH_COMPILE_DISABLE=1
        raise RuntimeError("torch.compile is disabled")
    table = select_decomp_table()
    settings = {"compile_threads": 1, "triton.cudagraphs": False, "cpp_wrapper": False}
    if OLD_DYNAMO:  # which logs a traceback, because it cannot pickle such a graph for its cache
        settings["fx_graph_cache"] = False
    with torch.no_grad(), config.patch(settings):
        graph = make_fx(function, tracing_mode="symbolic", decomposition_table=table)(*examples)
        inputs = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
        with tracing(TracingContext(inputs[0].fake_mode)):
            return compile_fx_inner(graph, inputs), inputs
