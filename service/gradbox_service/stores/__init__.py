"""Gradient stores: rows that jobs append to files, and who may read them.

record     what is known of a store, and how a part is added to it
records    where that is kept; what is written together with the end of a job that appended
files      the folders of the parts, DATA/stores/ID
ids        the ids of rows, as jobs and parts hold them: each comes once in a store
"""

from gradbox_service.stores.files import StoreFiles
from gradbox_service.stores.record import StorePart, StoreRecord
from gradbox_service.stores.records import Stores

__all__ = ["StoreFiles", "StorePart", "StoreRecord", "Stores"]
