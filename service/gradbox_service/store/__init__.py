"""Blobs and results: on the box's disk, and small ones in its Redis. Nothing knows HTTP.

To read in this order:

    files                how a file gets its name, and when it was last used
    room                 what may still be written: what the disk has free, less a reserve
    small                small files in Redis, until they were kept for a while
    blobs, results       the two kinds of files
    folders              those of runs and stores
    estimates            what was measured of jobs
"""

from gradbox_service.store.blobs import BlobStore, Upload
from gradbox_service.store.results import ResultStore
from gradbox_service.store.room import Room
from gradbox_service.store.small import SMALL_BYTES

__all__ = [
    "SMALL_BYTES",
    "BlobStore",
    "ResultStore",
    "Room",
    "Upload",
]
