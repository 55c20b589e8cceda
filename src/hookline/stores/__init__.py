"""Stores: values that outgrow memory, as shards by range of rows and a manifest."""

from hookline.stores.checking import Damage as Damage
from hookline.stores.checking import Repair as Repair
from hookline.stores.checking import repair as repair
from hookline.stores.checking import verify as verify
from hookline.stores.column import Column as Column
from hookline.stores.data_sets import ShuffledRows as ShuffledRows
from hookline.stores.data_sets import StoreDataset as StoreDataset
from hookline.stores.excerpt import excerpt as excerpt
from hookline.stores.merging import merge as merge
from hookline.stores.store import Store as Store
from hookline.stores.store import open_store as open_store
