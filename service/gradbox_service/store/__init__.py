"""Blobs and results on the box's disk, and in Redis whose blobs are whose. Nothing knows HTTP.

To read in this order:

    files                how a file gets its name, and when it was last used
    room                 what may still be written: what the disk has free, less a reserve
    blobs, results       the two kinds of files
    owners, own_blobs    whose blobs are whose; the blobs as one owner sees them
    layout               where all of it lies under the data folder
"""

from gradbox_service.store.blobs import BlobStore, Upload
from gradbox_service.store.layout import blob_store, result_store
from gradbox_service.store.own_blobs import OwnBlobs
from gradbox_service.store.owners import BlobOwners, MemoryBlobOwners, RedisBlobOwners
from gradbox_service.store.results import ResultStore
from gradbox_service.store.room import Room

__all__ = [
    "BlobOwners",
    "BlobStore",
    "MemoryBlobOwners",
    "OwnBlobs",
    "RedisBlobOwners",
    "ResultStore",
    "Room",
    "Upload",
    "blob_store",
    "result_store",
]
