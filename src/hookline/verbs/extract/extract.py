"""Run a model over a data set, and store the values at the selected sites."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any, Unpack

from torch import nn

from hookline.engine import Selector, unwrapped
from hookline.stores import Store, open_store
from hookline.stores.place import place_of
from hookline.verbs.extract.engines import Apart
from hookline.verbs.extract.extraction import Extraction
from hookline.verbs.extract.ranks import Ranks
from hookline.verbs.extract.setup import Extracting, Setup
from hookline.verbs.extract.sources import source_of


def extract(
    model: nn.Module,
    data: Any,
    selector: Selector,
    to: str | os.PathLike[str],
    *,
    batch_size: int | None = None,
    resume: bool = True,
    **options: Unpack[Extracting],
) -> Store:
    """Run a model over a data set, and store the values at the selected sites.

        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> rows = torch.arange(200.0).reshape(100, 2)
        >>> store = hl.extract(model, rows, ["0", "1"], tmp_path / "mine", batch_size=32)
        >>> store["1"].shape
        (100, 3)
        >>> store["1"][40:42].shape
        torch.Size([2, 3])

    If a job was killed, the same call continues it and keeps the whole shards. The same call gives
    the same bits, however often it was interrupted, because batches are cut by the index of the
    items. This holds on the same type of processor, with the same versions and number of threads. A
    folder that holds the store of another model, selector, option or data set is refused.

    The model runs in eval mode, without gradients, and no further than the last selected site. Each
    module gets its own mode back afterwards. Values are written while the model runs.

    Args:
        model: the model.
        data: one of: a `Dataset`; a `DataLoader` that does not shuffle; an array or tensor (or a
            dict or tuple of these) whose rows are items; an iterable of batches; or the path of a
            folder of images, of a data set of Hugging Face, or of a `.npy`, `.npz`, `.txt`,
            `.jsonl` or `.parquet` file.
        selector: the sites, as in `hl.select`: outputs and inputs, and leaves of these.
        to: the folder, or a URL of fsspec such as `s3://bucket/features`.
        batch_size: the number of items in a batch; None takes the loader's, or 32.
        resume: False refuses a folder that holds a store.
        **options: `keep`, `dtype`, `mask`, `inputs`, `workers`, `on_error`, `preprocess`,
            `tokenize`, `eval`, `shard_bytes`, `progress`, as in `hookline.verbs.Extracting`.

    Returns:
        The store. `store[site]` is read like an array. `store.items` has the index of each row's
        item.

    Raises:
        SelectionError: the selector matches nothing, or a gradient.
        NotRecordedError: the model did not reach one of the sites.
        InputError: the data is empty, of an unknown kind, or in an order that changes.
        StructureError: a value has no row for each item or token, or its rows have another shape
            than before.
        FolderError: the folder holds other files or a store of another job, another process writes
            to it, or it cannot be written.
    """
    unknown = options.keys() - Extracting.__annotations__.keys()
    if unknown:
        raise TypeError(
            f"hl.extract() got an unexpected keyword argument {min(unknown)!r}."
            f"\nGive some of {', '.join(f'{known}=' for known in Extracting.__annotations__)}."
        )
    place = place_of(to)
    source = source_of(
        data,
        batch_size=batch_size,
        workers=options.get("workers", 0),
        on_error=options.get("on_error", "raise"),
        preprocess=options.get("preprocess"),
        tokenize=options.get("tokenize"),
    )
    ranks = Ranks()
    with ExitStack() as stack:
        setup = Setup(unwrapped(model), selector, source, options)
        worker = stack.enter_context(setup.worker())
        ranks.first(lambda: stack.enter_context(place.locked()))
        Extraction(place, setup, worker, ranks).run(Apart(place, worker, ranks), resume=resume)
    return open_store(place)
