"""Whose blobs are whose, in Redis or in memory (`owners`); one owner's view of them (`own_blobs`).

A worker, which reads every blob that its job names, needs none of it, and so no Redis for files.
"""

from gradbox_service.ownership.own_blobs import OwnBlobs
from gradbox_service.ownership.owners import BlobOwners, MemoryBlobOwners, RedisBlobOwners

__all__ = ["BlobOwners", "MemoryBlobOwners", "OwnBlobs", "RedisBlobOwners"]
