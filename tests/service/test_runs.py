"""Runs: made, stepped exactly once, saved and deleted; a worker is played, no device is there."""

from __future__ import annotations

import hashlib
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from gradbox.protocol import ResultView, StateRef, StepView, step_seed
from gradbox_service.backing import Backing
from gradbox_service.cleaning.cleaner import Cleaner
from gradbox_service.database.conditional_commands import Beside
from gradbox_service.jobs import JobRecord
from gradbox_service.settings import Settings
from tests.service.boxes import SHARDS, VERSION, announce, begin, blob_of, spec_for, upload
from tests.service.conftest import Box, client_with, serve

ADAMW = {"name": "adamw", "options": {"lr": 1e-3}}


def grouped(*wrt: str) -> dict[str, Any]:
    """Return an optimizer with a group of options for the parameters of these names."""
    return {"name": "sgd", "groups": [{"wrt": list(wrt), "options": {"lr": 0.5}}]}


def a_run(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = client.post("/v1/runs", json={"model": "tiny", "optimizer": ADAMW} | fields)
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


def step_of(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    spec = spec_for(upload(client, SHARDS), computation="step")
    del spec["model"]
    return spec | fields


def post(
    client: httpx.Client, run: dict[str, Any], number: int, /, **fields: Any
) -> httpx.Response:
    return client.post(f"/v1/runs/{run['id']}/steps/{number}", json=step_of(client, **fields))


def end(box: Backing, record: JobRecord, beside: Any) -> JobRecord | None:
    """End a job as its worker does."""
    data = record.id.encode()
    result = ResultView(size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())

    def write(after: JobRecord) -> Beside:
        more: Beside = beside(after)

        def both(pipe: Any) -> None:
            more.write(pipe)
            box.results.write(pipe, record.id, attempt=record.attempt, content=data)

        return Beside(both, more.where)

    return box.records.update(
        record.id,
        lambda r: r.finish(attempt=record.attempt, result=result, now_s=time.time()),
        beside=write,
    )


def make(box: Backing, run: str, job_id: str, *, number: int) -> None:
    """Play the worker that makes a step."""

    def made(after: JobRecord) -> Beside:
        ended_s = after.finished_s or 0.0
        seconds = ended_s - (after.started_s or ended_s)
        view = StepView(
            number=number,
            job=job_id,
            loss=0.5,
            grad_norm=2.0,
            lr=[1e-3],
            seconds=seconds,
            finished_s=ended_s,
        )
        return box.runs.making(run, view)

    assert end(box, begin(box.records, job_id), made) is not None


def step(box: Box, run: dict[str, Any], number: int, **fields: Any) -> str:
    """Post a step and make it; return its job."""
    answer = post(box.client, run, number, **fields)
    assert answer.status_code == 202, answer.text
    job = str(answer.json()["id"])
    make(box.backing, run["id"], job, number=number)
    return job


def save(box: Box, run: dict[str, Any], name: str, **fields: Any) -> str:
    """Save a state, and write its file as the worker does."""
    answer = box.client.post(f"/v1/runs/{run['id']}/saves", json={"name": name} | fields)
    assert answer.status_code == 202, answer.text
    job = str(answer.json()["id"])
    write_save(box, job)
    return job


def write_save(box: Box, job: str) -> None:
    spec: Any = box.backing.records.spec(job)
    run, name = spec.state.run, spec.save
    path = box.backing.run_files.path(StateRef(run=run, save=name))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"state")
    saved = lambda _: box.backing.runs.saved(run, name, job=job, size_bytes=5)  # noqa: E731
    assert end(box.backing, begin(box.backing.records, job), saved) is not None


def problem(answer: httpx.Response) -> str:
    return str(answer.json()["type"]).rpartition(":")[2]


def test_a_run_is_made_listed_and_seen_by_its_owner_alone(box: Box) -> None:
    run = a_run(box.client, name="towers", wrt=["layer"], seed=7)
    assert (run["model_version"], run["num_steps"], run["mode"]) == (VERSION, 0, "train")
    assert run["optimizer"] == ADAMW
    other = a_run(box.client, name="other")
    assert [r["id"] for r in box.client.get("/v1/runs").json()["runs"]] == [other["id"], run["id"]]
    named = box.client.get("/v1/runs?name=towers").json()
    assert [r["id"] for r in named["runs"]] == [run["id"]]
    first = box.client.get("/v1/runs?limit=1").json()
    second = box.client.get(f"/v1/runs?limit=1&cursor={first['next']}").json()
    assert (first["runs"][0]["id"], second["runs"][0]["id"]) == (other["id"], run["id"])
    assert second["next"] is None
    bob = box.client_of("bob")
    assert bob.get("/v1/runs").json()["runs"] == []
    assert problem(bob.get(f"/v1/runs/{run['id']}")) == "run-not-found"
    assert problem(post(bob, run, 1)) == "run-not-found"
    assert bob.delete(f"/v1/runs/{run['id']}").status_code == 204
    assert box.client.get(f"/v1/runs/{run['id']}").status_code == 200
    assert problem(bob.get("/v1/runs?all=true")) == "owner-only"
    root = client_with(box.transport, box.backing.tokens.create("root", admin=True))
    assert len(root.get("/v1/runs?all=true").json()["runs"]) == 2
    assert root.get(f"/v1/runs/{run['id']}").json()["owner"] == "ann"


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"optimizer": {"name": "adamv"}}, "invalid-job"),
        ({"optimizer": {"name": "sgd", "options": {"lr": -1}}}, "invalid-job"),
        ({"model": "none"}, "unknown-model"),
        ({"wrt": ["layers.*"]}, "invalid-inputs"),
        (
            {"wrt": ["layer"], "adapter": {"rank": 2, "alpha": 4, "targets": ["layer"]}},
            "invalid-job",
        ),
        ({"adapter": {"rank": 2, "alpha": 4, "targets": ["*.query"]}}, "invalid-inputs"),
        ({"optimizer": grouped("layer.biass")}, "invalid-inputs"),
        ({"optimizer": grouped("layer.bias"), "wrt": ["layer.weight"]}, "invalid-inputs"),
        ({"start": {"save": "none"}}, "run-not-found"),
        ({"speed": 3}, "invalid-job"),
    ],
)
def test_a_run_that_does_not_fit_is_refused_at_once(
    box: Box, fields: dict[str, Any], kind: str
) -> None:
    answer = box.client.post("/v1/runs", json={"model": "tiny", "optimizer": ADAMW} | fields)
    assert (answer.status_code // 100, problem(answer)) == (4, kind), answer.text


@pytest.mark.parametrize("glob", ["layer", "*.weight", "loss.head", "loss_inputs.*", "*.scale"])
def test_a_group_of_what_a_run_may_train_is_taken(box: Box, glob: str) -> None:
    assert a_run(box.client, optimizer=grouped(glob))["num_steps"] == 0


def test_one_key_makes_one_run(box: Box) -> None:
    headers = {"Idempotency-Key": "k"}
    body = {"model": "tiny", "optimizer": ADAMW}
    first = box.client.post("/v1/runs", json=body, headers=headers).json()
    assert box.client.post("/v1/runs", json=body, headers=headers).json()["id"] == first["id"]
    other = box.client.post("/v1/runs", json=body | {"seed": 1}, headers=headers)
    assert problem(other) == "idempotency-conflict"
    box.client.delete(f"/v1/runs/{first['id']}")
    again = box.client.post("/v1/runs", json=body, headers=headers).json()
    assert again["id"] != first["id"]
    assert box.client.get(f"/v1/runs/{again['id']}").status_code == 200


def test_steps_are_made_in_order_and_remembered(box: Box) -> None:
    run = a_run(box.client, seed=7, wrt=["layer.weight"])
    first = post(box.client, run, 1, lr=0.1)
    assert first.status_code == 202, first.text
    spec: Any = box.backing.records.spec(first.json()["id"])
    assert (spec.run, spec.number, spec.seed) == (run["id"], 1, step_seed(7, 1))
    assert (spec.model, spec.mode, spec.wrt) == (f"tiny@{VERSION}", "train", ["layer.weight"])
    now = box.client.get(f"/v1/runs/{run['id']}").json()
    assert (now["num_steps"], now["under_way"]) == (0, first.json()["id"])
    make(box.backing, run["id"], first.json()["id"], number=1)
    second = step(box, run, 2)
    now = box.client.get(f"/v1/runs/{run['id']}").json()
    assert (now["num_steps"], now["under_way"], now["loss"], now["grad_norm"]) == (2, None, 0.5, 2)
    steps = box.client.get(f"/v1/runs/{run['id']}/steps").json()["steps"]
    assert [(s["number"], s["job"]) for s in steps] == [(1, first.json()["id"]), (2, second)]
    assert steps[0]["seconds"] >= 0
    behind = box.client.get(f"/v1/runs/{run['id']}/steps?after=1").json()["steps"]
    assert [s["number"] for s in behind] == [2]


def test_the_same_step_is_the_same_job_before_and_after_its_end(box: Box) -> None:
    run = a_run(box.client)
    job = post(box.client, run, 1).json()["id"]
    assert post(box.client, run, 1).json()["id"] == job
    make(box.backing, run["id"], job, number=1)
    step(box, run, 2)
    assert post(box.client, run, 1).json()["id"] == job
    assert post(box.client, run, 1, model=f"tiny@{VERSION}", number=1).json()["id"] == job
    assert len(box.client.get("/v1/jobs").json()["jobs"]) == 2


def test_other_content_and_other_numbers_are_conflicts(box: Box) -> None:
    run = a_run(box.client)
    job = post(box.client, run, 1).json()["id"]
    other = post(box.client, run, 1, lr=0.5)
    assert (other.status_code, problem(other)) == (409, "run-conflict")
    assert (other.json()["num_steps"], other.json()["under_way"]) == (0, job)
    assert problem(post(box.client, run, 2)) == "run-conflict"
    make(box.backing, run["id"], job, number=1)
    made = post(box.client, run, 1, lr=0.5)
    assert (problem(made), made.json()["num_steps"]) == ("run-conflict", 1)
    assert problem(post(box.client, run, 3)) == "run-conflict"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"seed": 1}, "seed"),
        ({"mode": "eval"}, "mode"),
        ({"model": "other"}, "model"),
        ({"number": 2}, "number"),
        ({"weights": {"layer.bias": {"blob": "0" * 64, "tensor": "b"}}}, "weights"),
        ({"computation": "gradient"}, "computation"),
    ],
)
def test_what_a_run_says_of_its_steps_cannot_be_said_otherwise(
    box: Box, fields: dict[str, Any], words: str
) -> None:
    answer = post(box.client, a_run(box.client), 1, **fields)
    assert (problem(answer), words in answer.json()["detail"]) == ("invalid-job", True)


def test_a_step_that_was_cancelled_leaves_its_number_free(box: Box) -> None:
    run = a_run(box.client)
    job = post(box.client, run, 1).json()["id"]
    box.client.delete(f"/v1/jobs/{job}")
    assert box.client.get(f"/v1/runs/{run['id']}").json()["under_way"] is None
    other = post(box.client, run, 1, lr=0.5)
    assert (other.status_code, other.json()["id"] == job) == (202, False)
    make(box.backing, run["id"], other.json()["id"], number=1)
    assert box.client.get(f"/v1/runs/{run['id']}").json()["num_steps"] == 1


def test_of_many_who_post_a_step_at_once_one_wins(box: Box) -> None:
    run = a_run(box.client)
    blob = upload(box.client, SHARDS)
    answers: list[httpx.Response] = []

    def send(lr: float) -> None:
        spec = spec_for(blob, computation="step", lr=lr)
        answers.append(box.client.post(f"/v1/runs/{run['id']}/steps/1", json=spec))

    threads = [threading.Thread(target=send, args=[0.1 * n]) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answer.status_code for answer in answers) == [202] + [409] * 5
    assert len(box.backing.records.active()) == 1


def test_a_step_at_cotangents_goes_on_from_a_forward_at_the_newest_state(box: Box) -> None:
    run = a_run(box.client, seed=3, wrt=["layer"])
    spec = spec_for(upload(box.client, SHARDS), computation="forward", mode="train")
    spec |= {"seed": step_seed(3, 1), "state": {"run": run["id"]}, "wrt": ["layer"]}
    del spec["loss"], spec["loss_inputs"]
    posted = box.client.post("/v1/jobs", json=spec)
    assert posted.status_code == 202, posted.text
    forward = posted.json()["id"]
    found = box.backing.records.spec(forward)
    assert found is not None
    assert found.state is not None
    assert (found.state.run, found.state.step) == (run["id"], 0)
    digest, data = blob_of({"outputs/0/0": SHARDS["0/x"]})
    record = begin(box.backing.records, forward)
    path = box.backing.results.path(forward, attempt=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    box.backing.records.update(
        forward,
        lambda r: r.finish(
            attempt=record.attempt,
            result=ResultView(size_bytes=len(data), sha256=digest),
            now_s=time.time(),
        ),
    )
    upload(box.client, {"outputs/0/0": SHARDS["0/x"]})
    tensors = {"0/0": {"blob": digest, "tensor": "outputs/0/0"}}
    loss = {"kind": "cotangents", "forward": forward, "tensors": tensors}
    step = {"computation": "step", "loss": loss, "lr": 0.1}
    answer = box.client.post(f"/v1/runs/{run['id']}/steps/1", json=step)
    assert answer.status_code == 202, answer.text
    whole: Any = box.backing.records.spec(answer.json()["id"])
    assert (whole.number, whole.state, whole.mode, whole.wrt) == (1, None, "train", ["layer"])
    make(box.backing, run["id"], answer.json()["id"], number=1)
    again = box.client.post(f"/v1/runs/{run['id']}/steps/1", json=step)
    assert again.json()["id"] == answer.json()["id"]
    assert problem(box.client.post(f"/v1/runs/{run['id']}/steps/2", json=step)) == "run-conflict"


def test_every_computation_takes_a_state_which_is_settled_at_once(box: Box) -> None:
    run = a_run(box.client)
    step(box, run, 1)
    blob = upload(box.client, SHARDS)
    newest = box.client.post("/v1/jobs", json=spec_for(blob, state={"run": run["id"]}))
    spec = box.backing.records.spec(newest.json()["id"])
    assert spec is not None
    assert spec.state is not None
    assert (spec.state.step, spec.model) == (1, f"tiny@{VERSION}")
    late = box.client.post("/v1/jobs", json=spec_for(blob, state={"run": run["id"], "step": 2}))
    assert problem(late) == "run-not-found"
    bob = box.client_of("bob")
    upload(bob, SHARDS)
    assert problem(bob.post("/v1/jobs", json=spec_for(blob, state={"run": run["id"]}))) == (
        "run-not-found"
    )
    for computation in ("step", "state"):
        answer = box.client.post("/v1/jobs", json=spec_for(blob, computation=computation))
        assert problem(answer) == "invalid-job"


def test_a_post_with_a_key_is_the_same_job_though_the_run_went_on(box: Box) -> None:
    run = a_run(box.client)
    spec = spec_for(upload(box.client, SHARDS), state={"run": run["id"]})
    headers = {"Idempotency-Key": "eval"}
    first = box.client.post("/v1/jobs", json=spec, headers=headers).json()["id"]
    step(box, run, 1)
    assert box.client.post("/v1/jobs", json=spec, headers=headers).json()["id"] == first


def test_weights_are_the_result_of_one_job_while_that_is_there(box: Box) -> None:
    run = a_run(box.client)
    step(box, run, 1)
    first = box.client.get(f"/v1/runs/{run['id']}/weights")
    assert (first.status_code, first.json()["computation"]) == (202, "state")
    assert box.client.get(f"/v1/runs/{run['id']}/weights?step=1").json()["id"] == first.json()["id"]
    end(box.backing, begin(box.backing.records, first.json()["id"]), lambda _: Beside())
    done = box.client.get(f"/v1/runs/{run['id']}/weights")
    assert (done.status_code, done.json()["id"]) == (200, first.json()["id"])
    box.client.delete(f"/v1/jobs/{first.json()['id']}/result")
    assert box.client.get(f"/v1/runs/{run['id']}/weights").json()["id"] != first.json()["id"]
    assert problem(box.client.get(f"/v1/runs/{run['id']}/weights?step=5")) == "run-not-found"


def test_a_save_has_one_name_is_shared_and_deleted(box: Box) -> None:
    run = a_run(box.client)
    step(box, run, 1)
    job = save(box, run, "good")
    step(box, run, 2)
    saves = f"/v1/runs/{run['id']}/saves"
    assert box.client.post(saves, json={"name": "good", "step": 1}).json()["id"] == job
    assert problem(box.client.post(saves, json={"name": "good"})) == "run-conflict"
    [seen] = box.client.get(f"/v1/runs/{run['id']}").json()["saves"]
    assert (seen["name"], seen["step"], seen["size_bytes"]) == ("good", 1, 5)
    assert box.backing.runs.totals()["ann"] == 5
    bob, of_save = (
        box.client_of("bob"),
        spec_for(upload(box.client, SHARDS), state={"save": "good"}),
    )
    upload(bob, SHARDS)
    assert problem(bob.post("/v1/jobs", json=of_save)) == "run-not-found"
    box.client.post(saves, json={"name": "good", "step": 1, "shared": True})
    needing = bob.post("/v1/jobs", json=of_save)
    assert needing.status_code == 202, needing.text
    assert problem(box.client.delete(f"{saves}/good")) == "run-conflict"
    assert problem(box.client.delete(f"/v1/runs/{run['id']}")) == "run-conflict"
    bob.delete(f"/v1/jobs/{needing.json()['id']}")
    assert box.client.delete(f"{saves}/good").status_code == 204
    assert box.client.delete(f"{saves}/good").status_code == 204
    assert box.backing.runs.totals()["ann"] == 0
    assert box.client.delete(f"/v1/runs/{run['id']}").status_code == 204
    assert problem(box.client.get(f"/v1/runs/{run['id']}")) == "run-not-found"


def test_the_weights_of_a_shared_save_are_everybodys_to_fetch(box: Box) -> None:
    run = a_run(box.client)
    step(box, run, 1)
    save(box, run, "good")
    bob, weights = box.client_of("bob"), "/v1/saves/good/weights"
    assert problem(bob.get(weights)) == "run-not-found"
    own = box.client.get(weights)
    assert own.status_code == 202
    saves = f"/v1/runs/{run['id']}/saves"
    box.client.post(saves, json={"name": "good", "step": 1, "shared": True})
    asked = bob.get(weights)
    assert (asked.status_code, asked.json()["owner"]) == (202, "bob")
    assert asked.json()["id"] != own.json()["id"]
    spec: Any = box.backing.records.spec(asked.json()["id"])
    assert spec.state == StateRef(run=run["id"], save="good")
    of_run = f"/v1/runs/{run['id']}/weights"
    assert bob.get(f"{of_run}?save=good").json()["id"] == asked.json()["id"]
    assert problem(box.client.delete(f"{saves}/good")) == "run-conflict"  # a job needs it
    assert problem(bob.get(of_run)) == problem(bob.get(f"{of_run}?step=1")) == "run-not-found"
    box.client.post(saves, json={"name": "good", "step": 1})
    assert problem(bob.get(weights)) == "run-not-found"


def test_a_run_goes_on_from_a_save(box: Box) -> None:
    run = a_run(box.client)
    step(box, run, 1)
    save(box, run, "good")
    on = a_run(box.client, start={"save": "good"})
    assert on["num_steps"] == 1
    step(box, on, 2)
    weights = a_run(box.client, start={"run": run["id"], "save": "good"}, start_moments=False)
    assert weights["num_steps"] == 0
    other = {"model": "tiny", "optimizer": {"name": "sgd"}, "start": {"save": "good"}}
    assert problem(box.client.post("/v1/runs", json=other)) == "invalid-job"


def test_a_run_goes_on_from_a_state_that_no_file_has_yet(box: Box) -> None:
    run = a_run(box.client)
    step(box, run, 1)
    given = {"model": "tiny", "optimizer": ADAMW, "start": {"run": run["id"]}}
    for _ in range(2):
        answer = box.client.post("/v1/runs", json=given)
        assert (problem(answer), "retry-after" in answer.headers) == ("service-unavailable", True)
    [job] = box.backing.records.active()
    write_save(box, job.id)
    assert a_run(box.client, start={"run": run["id"]})["num_steps"] == 1
    assert box.client.get(f"/v1/runs/{run['id']}").json()["saves"] == []
    assert box.client.delete(f"/v1/runs/{run['id']}").status_code == 204


def test_a_run_with_a_step_under_way_is_not_deleted(box: Box) -> None:
    run = a_run(box.client)
    job = post(box.client, run, 1).json()["id"]
    assert problem(box.client.delete(f"/v1/runs/{run['id']}")) == "run-conflict"
    box.client.delete(f"/v1/jobs/{job}")
    assert box.client.delete(f"/v1/runs/{run['id']}").status_code == 204


def test_what_a_lost_state_is_made_again_from_is_kept(box: Box) -> None:
    run, cleaner = a_run(box.client), Cleaner(Settings(), box.backing)
    jobs = [step(box, run, number) for number in (1, 2, 3)]
    blob, _ = blob_of(SHARDS)
    assert blob in cleaner.needed()
    assert problem(box.client.delete(f"/v1/blobs/{blob}")) == "blob-in-use"
    box.backing.runs.written(run["id"], [2], size_bytes=10)
    now = box.backing.runs.get(run["id"])
    assert now is not None
    assert [s.job for s in box.backing.runs.kept(now)] == jobs
    box.backing.runs.written(run["id"], [3, 2], size_bytes=20)
    assert list(box.backing.runs.jobs_of_kept()) == jobs[2:]
    box.backing.runs.written(run["id"], [4, 3], size_bytes=25)
    assert blob not in cleaner.needed()
    assert box.client.delete(f"/v1/blobs/{blob}").status_code == 204
    seen = box.client.get(f"/v1/runs/{run['id']}").json()
    assert (seen["state_step"], seen["state_bytes"]) == (4, 25)
    assert box.backing.runs.totals()["ann"] == 25
    box.client.delete(f"/v1/runs/{run['id']}")
    assert box.backing.runs.totals()["ann"] == 0


def test_a_run_without_steps_goes_but_not_one_with_saves(box: Box) -> None:
    old, saved = a_run(box.client), a_run(box.client)
    step(box, saved, 1)
    save(box, saved, "good")
    folder = box.backing.run_files.path(StateRef(run=old["id"], step=1)).parent
    folder.mkdir(parents=True)
    Cleaner(Settings(), box.backing).clean()
    assert len(box.client.get("/v1/runs").json()["runs"]) == 2
    time.sleep(0.01)
    Cleaner(Settings(run_age_s=0.001), box.backing).clean()
    assert [r["id"] for r in box.client.get("/v1/runs").json()["runs"]] == [saved["id"]]
    assert (folder.exists(), folder.with_name(saved["id"]).exists()) == (False, True)


def test_folders_of_runs_that_are_gone_are_swept(box: Box) -> None:
    run = a_run(box.client)
    files = box.backing.run_files
    for run_id in (run["id"], "gone"):
        path = files.path(StateRef(run=run_id, step=1))
        path.parent.mkdir(parents=True)
        path.with_suffix(".writing").write_bytes(b"half")
    files.sweep(box.backing.runs.all(), unused_for_s=60.0)
    assert path.parent.exists()
    files.sweep(box.backing.runs.all(), unused_for_s=-1.0)
    assert not path.parent.exists()
    assert list(path.parent.with_name(run["id"]).iterdir()) == []


def test_states_count_against_the_quota(backing: Backing, tmp_path: Path) -> None:
    settings = Settings(data=tmp_path / "data", owner_quota_bytes=100_000)
    for box in serve(backing, settings):
        run = a_run(box.client)
        box.backing.runs.written(run["id"], [1], size_bytes=100_000)
        answer = box.client.put(f"/v1/blobs/{blob_of(SHARDS)[0]}", content=blob_of(SHARDS)[1])
        assert problem(answer) == "storage-full"
        assert "your runs 97.7 KiB" in answer.json()["detail"]


def test_the_worker_that_made_the_last_step_makes_the_next_if_it_idles(box: Box) -> None:
    announce(box.backing, name="worker-2")
    run, turns = a_run(box.client), box.backing.turns
    own = turns._own_key("worker-1")
    for number in range(1, 30):
        job = post(box.client, run, number).json()["id"]
        if box.backing.records._redis.llen(own):  # else the dispatcher was at work just then
            assert number > 1
            assert turns.waiting() == []
            turn = turns.take(wait_s=1, worker="worker-1")
            assert turn is not None
            assert turn.job_id == job
            return
        turns.take(wait_s=5)
        make(box.backing, run["id"], job, number=number)
    raise AssertionError("no step went to the worker that has the run")
