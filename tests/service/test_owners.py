"""A blob is stored once, belongs to all who sent its bytes, and counts against each of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from gradbox_service.accounting.blob_owners import BlobOwners
from gradbox_service.backing import Backing
from gradbox_service.settings import Settings

ONE, TWO = "1" * 64, "2" * 64


@pytest.fixture
def owners(backing: Backing) -> BlobOwners:
    return backing.owners


def test_a_blob_belongs_to_those_who_claimed_it(owners: BlobOwners) -> None:
    owners.claim("bob", {ONE: 10})
    owners.claim("ann", {ONE: 10})
    assert owners.owns("ann", ONE)
    assert owners.owns("bob", ONE)
    assert not owners.owns("eve", ONE)
    assert not owners.owns("ann", TWO)
    assert list(owners.owners_of(ONE)) == ["ann", "bob"]
    assert list(owners.owners_of(TWO)) == []


def test_bytes_count_once_against_each_owner(owners: BlobOwners) -> None:
    for owner, digest, size_bytes in [("ann", ONE, 10), ("bob", ONE, 10), ("ann", TWO, 5)]:
        owners.claim(owner, {digest: size_bytes})
        owners.claim(owner, {digest: size_bytes})
    assert (owners.totals()["ann"], owners.totals()["bob"], owners.totals()["eve"]) == (15, 10, 0)


def test_several_are_claimed_at_once(owners: BlobOwners) -> None:
    owners.claim("bob", {TWO: 5})
    owners.claim("ann", {ONE: 10, TWO: 5})
    assert owners.owned_among("ann", [ONE, TWO]) == {ONE, TWO}
    assert (owners.totals()["ann"], owners.totals()["bob"]) == (15, 5)


def test_a_forgotten_blob_belongs_to_nobody(owners: BlobOwners) -> None:
    owners.claim("ann", {ONE: 10})
    owners.claim("bob", {ONE: 10})
    owners.forget(ONE)
    owners.forget(ONE)
    assert not owners.owns("ann", ONE)
    assert owners.totals()["ann"] == 0
    owners.claim("bob", {ONE: 10})
    assert (owners.totals()["ann"], owners.totals()["bob"]) == (0, 10)


def test_a_released_blob_stays_with_its_other_owners(owners: BlobOwners) -> None:
    for owner, digest in [("ann", ONE), ("bob", ONE), ("ann", TWO)]:
        owners.claim(owner, {digest: 10})
    assert set(owners.blobs_of("ann")) == {ONE, TWO}
    assert not owners.release("ann", ONE)
    assert not owners.release("ann", ONE)
    assert list(owners.owners_of(ONE)) == ["bob"]
    assert dict(owners.totals()) == {"ann": 10, "bob": 10}
    assert (set(owners.blobs_of("ann")), set(owners.blobs_of("bob"))) == ({TWO}, {ONE})
    assert owners.release("bob", ONE)
    assert owners.release("bob", ONE)
    assert list(owners.owners()) == [TWO]
    assert dict(owners.totals()) == {"ann": 10}
    owners.forget(TWO)
    assert not owners.blobs_of("ann")


def test_many_are_asked_about_at_once(owners: BlobOwners) -> None:
    digests = [f"{number:064x}" for number in range(2500)]
    for digest in digests[::500]:
        owners.claim("ann", {digest: 1})
    assert owners.owned_among("ann", digests) == frozenset(digests[::500])
    assert owners.owned_among("bob", digests) == frozenset()
    assert owners.owned_among("ann", []) == frozenset()


def test_claims_at_once_count_once(owners: BlobOwners) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: owners.claim(f"user{number % 2}", {ONE: 7}), range(8)))
    assert len(owners.owners_of(ONE)) == 2
    assert dict(owners.totals()) == {"user0": 7, "user1": 7}
    assert dict(owners.sizes()) == {ONE: 7}


def test_ownership_outlives_the_process(redis_settings: Settings) -> None:
    Backing.on_redis(redis_settings).owners.claim("ann", {ONE: 7})
    assert Backing.on_redis(redis_settings).owners.owns("ann", ONE)
