"""Bad records in Redis and bad bytes behind them, as a crash or another version writes them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import redis

from proofs.attacks.attack import attack
from proofs.attacks.target import Target, own_box

WITHIN_S = 20.0
JOB = "f" * 32


def _spoilt(record: dict[str, Any], **changes: Any) -> bytes:
    return json.dumps({**record, **changes}).encode()


def _without_model(record: dict[str, Any]) -> bytes:
    return json.dumps({name: value for name, value in record.items() if name != "model"}).encode()


BAD: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "not JSON": lambda record: b"\xff{",
    "empty": lambda record: b"",
    "a field is missing": _without_model,
    "a state that nobody knows": partial(_spoilt, state="paused-by-v9"),
    "an attempt that is no number": partial(_spoilt, attempt="many"),
}


def _bad_record(target: Target, spoil: Callable[[dict[str, Any]], bytes]) -> None:
    """Put a bad record among the active jobs; `redis_records` says how those are laid out."""
    with own_box() as own, redis.Redis(unix_socket_path=_socket(own)) as store:
        own.still_works()
        good = own.job(own.ann)
        record = json.loads(_bytes(store.get(f"gradbox:job:{good}")))
        record |= {"id": JOB, "state": "queued"}
        store.set(f"gradbox:job:{JOB}", spoil(record))
        store.zadd("gradbox:active:ann", {JOB: time.time()})
        store.zadd("gradbox:owner:ann", {JOB: time.time()})
        own.still_works(within_s=WITHIN_S)
        assert own.ann.get("/v1/jobs").status_code == 200
        assert own.ann.get(f"/v1/jobs/{JOB}").status_code in (200, 404)
        assert own.ann.get("/readyz").status_code == 200
        give_up = time.monotonic() + WITHIN_S
        while store.zscore("gradbox:active:ann", JOB) is not None:
            assert time.monotonic() < give_up, "the bad record is still among the active jobs"
            time.sleep(0.1)


for _name, _spoil in BAD.items():
    attack(
        f"record: {_name}",
        tries="a record among the active jobs that no version of ours can read",
        must="it is set aside; new jobs are dispatched, listed and done",
        slow=True,
    )(partial(_bad_record, spoil=_spoil))


@attack(
    "record: an event that nobody can read",
    tries="entries without fields, and with wrong ones, in the stream of changes",
    must="listeners of other jobs hear the end of theirs",
    slow=True,
)
def _bad_event(target: Target) -> None:
    with own_box() as own, redis.Redis(unix_socket_path=_socket(own)) as store:
        for fields in ({"nothing": "1"}, {"job": b"\xff", "kind": b"\xff"}, {"job": "x"}):
            store.xadd("gradbox:changes", fields)
        time.sleep(1.0)
        job = own.job(own.ann)
        heard = []
        with own.ann.stream("GET", f"/v1/jobs/{job}/events", timeout=WITHIN_S) as events:
            heard = [line for line in events.iter_lines() if '"state":"done"' in line]
        assert heard
        assert own.ann.get("/readyz").status_code == 200


@attack(
    "record: zero bytes behind the log of Redis",
    tries="4,096 zero bytes behind the append-only file, as a power cut leaves them",
    must="`gradbox up` starts, says what it cut, and knows its tokens and jobs",
    slow=True,
)
def _power_cut(target: Target) -> None:
    with own_box() as own:
        job = own.job(own.ann)
        own.ended(own.ann, job)
        own.box.stop()
        (log,) = (own.box.data / "redis" / "appendonlydir").glob("*.incr.aof")
        with log.open("ab") as file:
            file.write(bytes(4096))
        own.box.start()
        assert own.ann.get(f"/v1/jobs/{job}").json()["state"] == "done"
        own.still_works()


def _socket(target: Target) -> str:
    return str(target.box.data / "redis" / "redis.sock")


def _bytes(found: Any) -> bytes:
    assert isinstance(found, bytes)
    return found
