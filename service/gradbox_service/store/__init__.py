"""Blobs and results on the box's disk. Nothing knows HTTP or Redis.

To read in this order:

    files                how a file gets its name, and when it was last used
    room                 what may still be written: what the disk has free, less a reserve
    blobs, results       the two kinds of files
"""

from gradbox_service.store.blobs import BlobStore, Upload, blob_store
from gradbox_service.store.results import ResultStore, result_store
from gradbox_service.store.room import Room

__all__ = [
    "BlobStore",
    "ResultStore",
    "Room",
    "Upload",
    "blob_store",
    "result_store",
]
