"""Run a model over a data set, and store the values at the selected sites."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, Unpack

from torch import nn

from hookline.data.data_source import LoadOptions
from hookline.data.make_source import make_source
from hookline.engine import Selector, require_model, sharding_kind, unwrap_ddp
from hookline.errors import FolderError, HooklineError, InputError, check_one_of, check_option_names
from hookline.files.folder_or_url import as_place
from hookline.stores import Store, open_store
from hookline.stores.job_manifest import is_store_finished
from hookline.verbs.extract.collective_steps import Ranks
from hookline.verbs.extract.engines import Engine, in_process_engine
from hookline.verbs.extract.process_setup import ExtractOptions, ProcessSetup, check_options
from hookline.verbs.extract.ray_engine import RayEngine
from hookline.verbs.extract.resumable_extraction import Extraction, check_empty_or_store
from hookline.verbs.extract.sharded_ranks_engine import sharded_ranks_engine
from hookline.verbs.extract.worker import Worker

# A finished store is only read, so it may lie where this process may not write.
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


def extract(
    model: nn.Module,
    data: Any,
    selector: Selector,
    to: str | os.PathLike[str],
    *,
    batch_size: int | None = None,
    resume: bool = True,
    engine: Literal["ray"] | None = None,
    **options: Unpack[ExtractOptions],
) -> Store:
    """Run a model over a data set, and store the values at the selected sites.

        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> rows = torch.arange(200.0).reshape(100, 2)
        >>> store = hl.extract(model, rows, ["0", "1"], tmp_path / "mine", batch_size=32)
        >>> store["1"].shape
        (100, 3)
        >>> store["1"][40:42].shape
        torch.Size([2, 3])

    The rows are written to several files, the shards. If a job was killed, the same call continues
    it, and keeps the shards that are complete. The same call gives the same bits, however often it
    was interrupted, because batches are cut by the index of the items. This holds on the same type
    of processor, with the same versions and number of threads. A folder that holds the store of
    another model, selector, option or data set is refused. To notice another model, the first batch
    runs in each call, also if the store is finished. Hooks, edits and plain attributes count by the
    values that they change.

    The model runs in eval mode, without gradients, and no further than the last selected site. Only
    the first batch runs to the end of the model, so that a module which runs several times is
    noticed. Before each batch, torch's, NumPy's and Python's generators are seeded with its number.
    Afterwards the generators have their old states, and each module its old mode. Values are
    written while the model runs.

    A model that keeps state runs to its end while each batch changes a buffer, or a tensor, a
    number or a text in an attribute. Not noticed are writes past torch's version counter to a
    parameter or to a tensor of more than 1 MiB; attributes of other objects, such as a cache of an
    own class; sets, global variables and closures; sharded weights; and what the model changes for
    the first time after a batch that has changed nothing. On Ray, only the first batch is looked
    at.

    To notice other data and options, hookline compares:

    - `keep`, `mask`, `inputs`: name, code, default arguments and closure of the function
    - `preprocess`, `tokenize`: the first batch that they return
    - a `Dataset`, `DataLoader` or iterable: the type, the first batch, and the length
    - arrays, `.npy`, `.npz`, `.parquet` and saved data sets of Hugging Face: all bytes; above 64
      MiB, at most 1,024 evenly spaced rows or blocks
    - `.txt`, `.jsonl`: all bytes
    - a folder of images: the names and sizes of the files, and the first batch

    In a process group of several ranks (`torchrun`), the call is a collective. Each rank makes its
    share of the shards, and rank 0 writes the manifest, the list of shards. An error on one rank is
    an error on all. The weights may be replicated, or sharded by `fully_shard` or tensor
    parallelism.

    Args:
        model: the model.
        data: one of these.

            - a `Dataset`, a list or any other sequence, whose elements are items; an
              `IterableDataset`, whose elements are items, too
            - a `DataLoader` that does not shuffle
            - an array or tensor, or a dict or tuple of these, whose rows are items
            - an iterator, or another iterable that is no sequence, which gives batches; the first
              dimension of a batch's first tensor is the number of its items
            - a data set of Hugging Face
            - a path: of an image, or of a folder of images, those in folders inside it included; of
              the folder of a data set of Hugging Face; of a `.npy`, `.npz`, `.pt` or `.safetensors`
              file of arrays; of a `.txt` file, a text a line; of a `.jsonl` or `.parquet` file with
              the key or column "text"
        selector: the sites, as in `hl.select`: outputs and inputs, and leaves of these.
        to: the folder, or a URL of fsspec such as `s3://bucket/features`.
        batch_size: the number of items in a batch; None takes the loader's, or 32.
        resume: False refuses a folder that holds a store.
        engine: None makes the shards in this process, or on the ranks of its process group. "ray"
            makes them on a Ray cluster, in as many actors as the cluster has room for. This is the
            cluster that `ray.init(...)` has connected this process to, or else that of the
            environment variable `RAY_ADDRESS`. Without either, a cluster is started here, and ended
            afterwards; Ray keeps its access token in `~/.ray/auth_token`.
        keep: a function of each value, padding included; its result is stored. None, the default,
            stores the value. A warning says if the result depends on padding.
        dtype: the dtype of floating tensors as stored; None, the default, keeps theirs.
        mask: for a row for each token, without padding: the key of the mask in a batch that is a
            dict. Or a function of the batch that returns a mask of shape `(items, tokens)`, or the
            number of tokens of each item, shape `(items,)`. The default is "attention_mask" in a
            batch that has this key. Otherwise, and with None, rows are items. If a decoder has
            tokens, too, "decoder_attention_mask" stores those, with the ids "decoder_input_ids".
        inputs: a function of a batch that returns what the model takes; None, the default, takes
            the whole batch. A batch that is a list of one tensor is that tensor.
        workers: the number of processes that load data; 0, the default, loads it in this one, as
            does data without a length.
        on_error: "raise", the default, stops at an item that cannot be loaded. "skip" leaves it
            out, and lists it in `store.skipped`.
        preprocess: for images: a function that makes a tensor of a picture.
        tokenize: for texts, or rows with the key "text": a function that takes a list of strings
            and returns a dict of tensors, padded to one length. Or a tokenizer of transformers: it
            pads to the longest text of the batch, and cuts texts at its `model_max_length`. For one
            length in all batches give
            `functools.partial(tokenizer, max_length=128, padding="max_length", truncation=True,
            return_tensors="pt")`.
        eval: True, the default, runs the model in eval mode. False leaves each module in its mode.
        shard_bytes: about the size of a shard in bytes; 32 MiB by default. A shard has whole
            batches, at least one.
        progress: False shows no progress bar. By default, a terminal shows one.

    Returns:
        The store. `store[site]` is read like an array. `store.items` has the index of each row's
        item.

    Raises:
        SelectionError: the selector matches nothing, or a gradient.
        NotRecordedError: the model did not reach one of the sites.
        AmbiguousError: a module ran several times in a batch.
        InputError: an option is invalid, or the data is empty, of an unknown kind, or in an order
            that changes.
        AttachError: `model` is not a module, `keep` or `dtype` is invalid, or the model cannot be
            hooked.
        TypeError: there is no such option.
        StructureError: a value has no row for each item or token, or its rows have another shape
            than before.
        FolderError: the folder holds other files or a store of another job or model, another
            process writes to it, or it cannot be written or is not shared by all machines.
        RanksError: a rank or an actor has other arguments or another model, failed, or did not
            come.
    """
    require_model(model, "hl.extract(model, data, selector, to)")
    check_option_names(extract, options, ExtractOptions.__annotations__)
    check_options(options)
    place, ranks = as_place(to), Ranks()
    with ExitStack() as stack:

        def prepare() -> tuple[ProcessSetup, Worker, Engine]:
            first_parameter = next(model.parameters(), None)
            loading = LoadOptions(
                batch_size,
                options.get("workers", 0),
                options.get("on_error", "raise"),
                options.get("preprocess"),
                options.get("tokenize"),
                pin_memory=first_parameter is not None and first_parameter.is_cuda,
            )
            setup = ProcessSetup(unwrap_ddp(model), selector, make_source(data, loading), options)
            _check_engine(engine, ranks, setup)
            # Before this process attaches to the model: actors get a copy of it without hooks.
            ray = RayEngine(place, setup) if engine == "ray" else None
            if ray is not None:
                stack.callback(ray.close)  # before it connects: Ctrl-C may come at any time
                ray.connect()
            worker = stack.enter_context(setup.worker())
            _ = worker.first_batch  # loaded here, where an error is told to all ranks
            if ray is not None:
                return setup, worker, ray.run
            if ranks.n_ranks > 1 and sharding_kind(setup.model):
                return setup, worker, sharded_ranks_engine(place, setup.model, worker, ranks)
            return setup, worker, in_process_engine(place, worker, ranks)

        setup, worker, chosen = ranks.run_on_each(prepare)

        def lock() -> None:
            check_empty_or_store(place)
            try:
                place.lock_until_exit(stack)
            except FolderError as error:
                is_read_only = getattr(error.__cause__, "errno", None) in _READ_ONLY
                if not (is_read_only and is_store_finished(place)):
                    raise

        ranks.run_on_first(lock)
        with _explain_errors(data):
            Extraction(place, setup, worker, ranks).run(chosen, resume=resume)
    return open_store(place)


@contextmanager
def _explain_errors(data: Any) -> Iterator[None]:
    """Tell what to do where data may be a list of batches, or the system refuses a thread."""
    try:
        yield
    except Exception as error:
        if type(data) is list and not isinstance(error, HooklineError):
            error.add_note(
                "hookline: a list holds items, which become the rows of batches."
                "\nIf it holds batches, give iter(data)."
            )
        if not isinstance(error, RuntimeError) or "can't start new thread" not in str(error):
            raise
        raise HooklineError(
            "hl.extract must start threads that read and write shards, got RuntimeError: can't"
            " start new thread.\nRaise the limit of processes (ulimit -u, or that of the"
            " container), or end other processes. Shards that are written are kept."
        ) from error


def _check_engine(engine: Any, ranks: Ranks, setup: ProcessSetup) -> None:
    """Refuse what an engine cannot do."""
    fix = "Leave it out to run in this process, or on the ranks of its process group."
    check_one_of("engine", engine, ("ray", None), fix)
    if engine == "ray" and ranks.n_ranks > 1:
        raise InputError(
            f"engine must be None in a process group, got 'ray' on {ranks.n_ranks} ranks."
            "\nLeave it out, or call it in one process without a process group."
        )
    if ranks.n_ranks > 1 and setup.source.n_items is None:
        raise InputError(
            f"data must have a length for {ranks.n_ranks} ranks, which share its batches by"
            " number, got an iterable.\nGive a Dataset, arrays or files."
        )
    if sharding_kind(setup.model) == "FSDP1":
        raise InputError(
            "model must be sharded by fully_shard, got a FullyShardedDataParallel."
            "\nWrite torch.distributed.fsdp.fully_shard(model)."
        )
