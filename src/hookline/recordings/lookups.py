"""Look-ups shared by recordings and their passes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from hookline.engine import TIMEOUT_S, Pass, is_dtensor, layout_json
from hookline.engine.pytree import describe, tree
from hookline.errors import StructureError
from hookline.recordings.gather_and_reduce import (
    CollectiveLookup,
    gather_value,
    join_by_replica,
    join_saved_ranks,
    reduce_over_ranks,
    reduce_saved_ranks,
)
from hookline.recordings.join_dtensor_parts import DTensorLayout, Part
from hookline.recordings.key_index import Key, ParsedKey
from hookline.recordings.log_entries import Entry
from hookline.recordings.pass_log import Log, Read
from hookline.recordings.stored_values import StoredValue

_N_LEAVES_SHOWN = 3


class Lookups(Mapping[str, Any]):
    """A mapping from sites to values, with look-ups of tensors and of other ranks."""

    _log: Log

    def __getitem__(self, key: Key) -> Any:
        """Return the only value of a site; raise if it has none or several."""
        return self._single_value(key)

    @abstractmethod
    def _single_value(self, key: Key, read: Read | None = None) -> Any:
        """Return the only value of a site, or the result of `read` on its entry."""

    @property
    @abstractmethod
    def _name(self) -> str:
        """The code that names these values in messages: `run`, `run.passes[0]`."""

    @abstractmethod
    def _find_entries(self, parsed_key: ParsedKey) -> list[tuple[Pass, list[Entry]]]:
        """Return the entries of a site, pass by pass; passes without any are left out."""

    def __len__(self) -> int:
        return len(list(iter(self)))

    def _parse_key(self, key: Key) -> ParsedKey:
        return self._log.index.parse(key)

    def holds_shard(self, key: Key) -> bool:
        """Return whether a value of a site holds this rank's part of a DTensor."""
        return any(
            entry.value.holds_shard()
            if isinstance(entry.value, StoredValue)
            else any(is_dtensor(tensor) for _, tensor in tree.tensors(entry.value))
            for _, entries in self._find_entries(self._parse_key(key))
            for entry in entries
        )

    def layouts(self, key: Key) -> list[DTensorLayout]:
        """Return the layout of each DTensor of which a value of a site holds this rank's part."""
        placed: dict[int, Part] = {}
        value = self._single_value(key, partial(_load_with_layouts, placed))
        live = [layout_json(tensor) for _, tensor in tree.tensors(value) if is_dtensor(tensor)]
        layouts = [layout for layout, _ in placed.values()]
        return layouts + [layout for data in live if (layout := DTensorLayout.from_json(data))]

    def values_by_replica(self, key: Key, dim: int | str | None = None) -> dict[int, Any]:
        """Return the value of each rank that has one, with whole DTensors, each value once.

        Where `full` takes one of the replicas of a DTensor, this returns each.

        Raises:
            RanksError: the values are of several kinds, or parts cannot be joined.
            AmbiguousError: several calls or passes of a rank have a value.
        """
        placed: dict[int, Part] = {}
        values: dict[int, Any] = {}
        for number, rank in enumerate(self._rank_recordings()):
            of_rank: dict[int, Part] = {}
            value = (
                rank._single_value(key, partial(_load_with_layouts, of_rank))
                if key in rank
                else None
            )
            is_outside = any(not layout.at for layout, _ in of_rank.values())  # of the mesh
            if key in rank and not is_outside:
                values[number] = value
                placed |= of_rank
        return join_by_replica(values, placed, dim, f"{self._name}.full({str(key)!r}, dim={dim!r})")

    def _rank_recordings(self) -> tuple[Lookups, ...]:
        """Return the recordings of all ranks if they were opened together, else ()."""
        return ()

    def tensor(self, key: Key) -> Tensor:
        """Look up a value that is one tensor; type checkers see the result as a `Tensor`.

            >>> import hookline as hl
            >>> model = nn.Linear(2, 3)
            >>> with hl.record(model) as run:
            ...     _ = model(torch.zeros(4, 2))
            >>> run.tensor("(root)").shape
            torch.Size([4, 3])

        Args:
            key: the site, as in a look-up.

        Returns:
            The tensor that `[key]` gives.

        Raises:
            StructureError: the value is not a tensor; the message names the tensors in it.
            NotRecordedError, AmbiguousError, OverwrittenError: as in a look-up.
        """
        value = self[key]
        if isinstance(value, Tensor):
            return value
        parsed_key = self._parse_key(key)
        leaves = [parsed_key.key_of_leaf(leaf) for leaf, _ in tree.tensors(value)]
        examples = ", ".join(f"{self._name}.tensor({leaf!r})" for leaf in leaves[:_N_LEAVES_SHOWN])
        more = f" or {len(leaves) - _N_LEAVES_SHOWN} more" * (len(leaves) > _N_LEAVES_SHOWN)
        raise StructureError(
            f"the value at {str(parsed_key)!r} must be one tensor, got {describe.in_words(value)}."
            f"\nWrite {examples + more if leaves else f'{self._name}[{str(parsed_key)!r}]'}."
        )

    def leaves(self, key: Key) -> dict[str, Tensor]:
        """Return a dict of every tensor in the value at a site, each under its own key.

            >>> import hookline as hl
            >>> model = nn.LSTM(2, 3)
            >>> with hl.record(model) as run:
            ...     _ = model(torch.zeros(4, 2))
            >>> list(run.leaves("(root)"))
            ['(root):output[0]', '(root):output[1][0]', '(root):output[1][1]']

        Args:
            key: the site, as in a look-up.

        Returns:
            The tensors by their keys, which any look-up takes. If the value itself is a tensor, its
            key is that of the site.

        Raises:
            NotRecordedError, AmbiguousError, OverwrittenError: as in a look-up.
        """
        value = self[key]
        parsed_key = self._parse_key(key)
        return {parsed_key.key_of_leaf(leaf): tensor for leaf, tensor in tree.tensors(value)}

    def full(
        self, key: Key, dim: int | None = None, *, group: Any = None, timeout: float = TIMEOUT_S
    ) -> Any:
        """Gather a value from the ranks of a distributed job. A collective.

        All ranks must call it, and each rank gets the whole value. A DTensor knows how it is
        sharded, and needs no `dim`. Plain tensors and NumPy arrays are concatenated along `dim`, in
        the order of the ranks; other parts of the value must be the same on all ranks. If `hl.open`
        read the recordings of all ranks, one process is enough; DTensors of several meshes, such as
        the halves of a batch, are then concatenated along `dim`, too.

            >>> import hookline as hl
            >>> model = nn.Linear(2, 3)
            >>> with hl.record(model) as run:
            ...     _ = model(torch.zeros(4, 2))
            >>> try:
            ...     run.full("(root)", dim=0)
            ... except hl.RanksError as error:
            ...     print(str(error)[:60])
            run.full('(root)', dim=0) asks all ranks of a process group,

        Args:
            key: the site, as in a look-up.
            dim: the dimension along which plain tensors are concatenated: 0 if each rank has a part
                of the batch (DDP, FSDP), or the dimension that tensor parallelism splits.
            group: the process group that holds the parts; None means all ranks.
            timeout: the time that ranks wait for one another, in seconds.

        Returns:
            The whole value, on this rank's device.

        Raises:
            RanksError: on every rank: a rank did not call it in time, has no such value, or has a
                value of another kind; a part that is not joined differs; or there is no process
                group. Of a folder: the recording of a rank of the mesh is missing, or a placement
                is unknown.
            AmbiguousError: `dim` is None, and the tensors are plain or of several meshes; or
                several calls or passes have a value.
            ValueError: the tensors have no dimension `dim`, or differ in another dimension.
        """
        question = f"{self._name}.full({str(key)!r}, dim={dim})"
        if ranks := self._rank_recordings():
            placed: dict[int, Part] = {}
            read = partial(_load_with_layouts, placed)
            # A rank outside of the mesh may lack the site. `join_parts` misses a part of the mesh.
            having = [rank._single_value(key, read) for rank in ranks if key in rank]
            values = having if placed else [rank._single_value(key, read) for rank in ranks]
            return join_saved_ranks(values, placed, dim, question)
        ask = CollectiveLookup(question, self._log.sites, group, timeout)
        return gather_value(ask, lambda: self._single_value(key, self._log.read_with_dtensors), dim)

    def reduced(
        self, key: Key, op: str = "mean", *, group: Any = None, timeout: float = TIMEOUT_S
    ) -> Any:
        """Reduce a value over the ranks of a distributed job, element by element. A collective.

        Tensors, NumPy arrays and numbers are reduced, at any depth; other parts of the value must
        be the same on all ranks, and are kept. Use it for statistics (`keep=lambda t:
        t.float().mean()`) and for parameters' gradients under DDP, which are recorded before DDP
        averages them over the ranks. All ranks must call it, and all get the same result. If
        `hl.open` read the recordings of all ranks, one process is enough.

            >>> import hookline as hl
            >>> model = nn.Linear(2, 3)
            >>> with hl.record(model, keep=lambda t: t.mean()) as run:
            ...     _ = model(torch.zeros(4, 2))
            >>> try:
            ...     run.reduced("(root)")
            ... except hl.RanksError as error:
            ...     print(str(error)[:32])
            run.reduced('(root)', op='mean')

        Args:
            key: the site, as in a look-up.
            op: "mean", "sum", "max" or "min".
            group: the process group; None means all ranks.
            timeout: the time that ranks wait for one another, in seconds.

        Returns:
            The reduced value; sums and means in at least float32.

        Raises:
            RanksError: on every rank: a rank did not call it in time, has no such value, or has a
                value of another shape; the value is a DTensor; a part that is not reduced differs;
                or there is no process group.
            ValueError: op is not one of the four.
        """
        question = f"{self._name}.reduced({str(key)!r}, op={op!r})"
        if ranks := self._rank_recordings():
            is_sharded = any(rank.holds_shard(key) for rank in ranks)
            return reduce_saved_ranks(
                [rank[key] for rank in ranks], op, question, is_sharded=is_sharded
            )
        ask = CollectiveLookup(question, self._log.sites, group, timeout)
        return reduce_over_ranks(
            ask, lambda: self._single_value(key, self._log.read_with_dtensors), op
        )


def _load_with_layouts(part_by_id: dict[int, Part], entry: Entry) -> Any:
    """Read the value of an entry, and note the tensors that were parts of DTensors."""
    return entry.value.load(part_by_id) if isinstance(entry.value, StoredValue) else entry.value
