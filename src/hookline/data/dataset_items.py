"""Items of a map-style data set, such as a torch Dataset or a list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

from torch.utils.data import Subset, TensorDataset, default_collate

from hookline.data.indexed_source import SingleItems
from hookline.data.texts import text_or_skip_mark, unwrap_text_key

# Data sets that hold their items: to load them draws no random numbers.
_PLAIN = frozenset({TensorDataset, list, range})


@final
class DatasetItems(SingleItems):
    """Items of an object with `__len__` and `__getitem__`.

    Args:
        dataset: the object.
        collate: makes one value of a list of items.
        tokenize: makes one value of items that are texts; None to treat texts as any other item.
    """

    fix = (
        "Give torch.utils.data.DataLoader(dataset, batch_size=..., collate_fn=...) with a"
        " function that makes a batch of all its items."
    )

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any] = default_collate,
        tokenize: Callable[[list[str]], Any] | None = None,
    ) -> None:
        self.dataset = dataset
        self._collate_others = collate
        self._tokenize = tokenize
        inner = dataset
        while type(inner) is Subset:
            inner = inner.dataset
        self.may_draw_random: bool = type(inner) not in _PLAIN or collate is not default_collate

    def __len__(self) -> int:
        return len(self.dataset)

    def identity(self) -> dict[str, Any]:
        """Return the name of its class."""
        return {"kind": "dataset", "type": type(self.dataset).__name__}

    def read(self, indices: Sequence[int]) -> list[Any]:
        """Load items; mark blank texts."""
        # torch's own way to load many items at once; `Subset` has it, with that of its data set.
        together = getattr(self.dataset, "__getitems__", None)
        if together is not None:
            items = list(together(list(indices)))
        else:
            items = [self.dataset[index] for index in indices]
        if self._tokenize is None:
            return items
        texts = map(unwrap_text_key, items)
        return [text_or_skip_mark(text) if isinstance(text, str | None) else text for text in texts]

    def collate(self, values: list[Any], indices: list[int]) -> Any:
        """Tokenize texts; collate other items."""
        if self._tokenize is not None and all(isinstance(value, str) for value in values):
            return self._tokenize(values)
        return self._collate_others(values)
