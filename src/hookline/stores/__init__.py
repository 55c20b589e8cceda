"""Stores: values that outgrow memory, as shards by range of rows and a manifest."""

from hookline.stores.column import Column as Column
from hookline.stores.excerpt import excerpt as excerpt
from hookline.stores.merging import merge as merge
from hookline.stores.store import Store as Store
from hookline.stores.store import open_store as open_store
from hookline.stores.store_datasets import ShuffledRows as ShuffledRows
from hookline.stores.store_datasets import StoreDataset as StoreDataset
from hookline.stores.verify_and_repair import Damage as Damage
from hookline.stores.verify_and_repair import Repair as Repair
from hookline.stores.verify_and_repair import repair as repair
from hookline.stores.verify_and_repair import verify as verify
