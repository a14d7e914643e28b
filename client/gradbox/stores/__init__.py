"""Gradient stores: rows that stay on the box, computed once and queried by the whole lab.

    store = client.store("wiki", model="minilm", projection=PerLayer(dim=16))
    store.add(inputs=shards, loss=loss, ids=ids)
    hits = store.query(inputs=test, loss=loss, top=10)

Read `store` first, then `jobs`: what appends rows, and what queries; `hits` shows what a query
found, `rows` reads rows. `begin` and `projections` are what a store is made of, `of_client` what a
client has of stores.
"""

from gradbox.stores.hits import Hits
from gradbox.stores.projections import CountSketch, PerLayer, Rademacher
from gradbox.stores.store import GradStore

__all__ = ["CountSketch", "GradStore", "Hits", "PerLayer", "Rademacher"]
