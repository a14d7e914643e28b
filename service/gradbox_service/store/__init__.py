"""Blobs and results on the box's disk, and in Redis whose blobs are whose. Nothing knows HTTP."""

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
