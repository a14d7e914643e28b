"""The part of a box that runs need: what docs/wire.md says of them, with made-up numbers.

Forward jobs give their inputs times two. Step n has the loss 1 / n and the gradient norm n.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs

import httpx
import torch
from safetensors.torch import load, save

from gradbox import GradboxError, GradClient, Retry, RunConflict, RunNotFound
from gradbox.protocol import (
    JOB_AND_RESULT,
    CotangentStepSpec,
    ForwardSpec,
    JobState,
    JobView,
    ModelView,
    Problem,
    ResultView,
    RunView,
    SaveView,
    StepSpec,
    StepView,
    joined_with_result,
    spec_digest,
    step_seed,
)
from gradbox_service.http.bodies import is_form, read_parts

VERSION = "5" * 64
PATIENT = Retry(patience_s=2.0, first_pause_s=0.001, longest_pause_s=0.01)


class RunBox(httpx.BaseTransport):
    """A box; threads do not share it.

    Attributes:
        requests: method and path of each.
        specs: the jobs that were posted, as JSON.
        lost: the answers to so many posts are lost on their way.
        failing: what the next step fails with.
    """

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.specs: list[dict[str, Any]] = []
        self.lost = 0
        self.failing: GradboxError | None = None
        self.runs: dict[str, RunView] = {}
        self.steps: dict[tuple[str, int], tuple[str, bytes]] = {}  # digest, answer
        self.history: dict[str, list[StepView]] = {}
        self.state = {"weights/w": torch.ones(2), "buffers/b": torch.ones(1)}
        self._blobs: dict[str, bytes] = {}
        self._ids = (f"job{number}" for number in itertools.count())

    def client(self) -> GradClient:
        return GradClient("http://box", "token", transport=self, retry=PATIENT)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        path, _, _ = request.url.raw_path.decode().partition("?")
        query = {k: v[0] for k, v in parse_qs(request.url.query.decode()).items()}
        self.requests.append(f"{request.method} {request.url.raw_path.decode()}")
        try:
            answer = self._answer(request, path.removeprefix("/v1/").split("/"), query)
        except GradboxError as error:
            answer = _problem(error)
        if self.lost and request.method == "POST":
            self.lost -= 1
            raise httpx.ReadError("the connection broke before the answer came")
        return answer

    def _answer(
        self, request: httpx.Request, parts: list[str], query: dict[str, str]
    ) -> httpx.Response:
        body = request.read()
        match request.method, parts:
            case "PUT", ["blobs", digest]:
                self._blobs[digest] = body
                return httpx.Response(201)
            case "HEAD", ["blobs", digest]:
                return httpx.Response(200 if digest in self._blobs else 404)
            case "GET", ["models", _]:
                methods: Any = {"forward": {"arguments": ["x"], "required": ["x"]}}
                view = ModelView(name="m", version=VERSION, methods=methods, usable=True)
                return _json(view)
            case "POST", ["jobs"]:
                return self._forward(ForwardSpec.model_validate_json(self._job(request, body)))
            case "POST", ["runs"]:
                return _json(self._new_run(json.loads(body)), status=201)
            case "GET", ["runs"]:
                runs = list(reversed(self.runs.values()))
                named = [run for run in runs if query.get("name", run.name) == run.name]
                views = [run.model_dump(mode="json") for run in named]
                return httpx.Response(200, json={"runs": views})
            case "POST", ["runs", run_id, "steps", number]:
                return self._step(self._run(run_id), int(number), self._job(request, body))
            case "GET", ["runs", run_id, "steps"]:
                after, limit = int(query["after"]), int(query["limit"])
                found = [s for s in self.history[run_id] if s.number > after][:limit]
                return httpx.Response(200, json={"steps": [s.model_dump() for s in found]})
            case "GET", ["runs" | "saves", _, "weights"]:
                self.specs.append(query)
                return _done(next(self._ids), self._result(self.state, computation="state"))
            case "POST", ["runs", run_id, "saves"]:
                return self._save(self._run(run_id), json.loads(body))
            case "DELETE", ["runs", run_id, "saves", name]:
                run = self._run(run_id)
                self._put(run, saves=[save for save in run.saves if save.name != name])
                return httpx.Response(204)
            case "GET", ["runs", run_id]:
                return _json(self._run(run_id))
            case "DELETE", ["runs", run_id]:
                if self._run(run_id).saves:
                    raise RunConflict("expected a run without saves")
                del self.runs[run_id]
                return httpx.Response(204)
        raise AssertionError(f"{request.method} {parts}")

    def _job(self, request: httpx.Request, body: bytes) -> bytes:
        content_type = request.headers["content-type"]
        if not is_form(content_type):
            return body
        parts = read_parts(body, content_type=content_type)
        self._blobs |= {digest: bytes(blob) for digest, blob in parts.blobs.items()}
        return bytes(parts.job)

    def _run(self, run_id: str) -> RunView:
        if run_id not in self.runs:
            raise RunNotFound(f"expected a run, got {run_id!r}")
        return self.runs[run_id]

    def _put(self, run: RunView, **changed: Any) -> RunView:
        self.runs[run.id] = found = run.model_copy(update=changed)
        return found

    def _new_run(self, spec: dict[str, Any]) -> RunView:
        self.specs.append(spec)
        names = ("name", "model", "optimizer", "wrt", "adapter", "mode", "precision", "seed")
        run_id = f"{len(self.runs):032x}"
        self.history[run_id] = []
        given = {name: spec[name] for name in names}
        self.runs[run_id] = RunView(
            id=run_id, owner="ann", model_version=VERSION, created_s=0.0, **given
        )
        return self.runs[run_id]

    def _step(self, run: RunView, number: int, body: bytes) -> httpx.Response:
        at_cotangents = json.loads(body)["loss"]["kind"] == "cotangents"
        kind: Any = CotangentStepSpec if at_cotangents else StepSpec
        spec = kind.model_validate_json(body)
        self.specs.append(json.loads(body))
        assert (spec.run, spec.number) == (run.id, number)
        if not at_cotangents:
            assert spec.model == f"m@{VERSION}"
            assert spec.seed == step_seed(run.seed, number)
        digest = spec_digest(spec)
        made, answer = self.steps.get((run.id, number), (None, b""))
        if made is not None and made == digest:
            return httpx.Response(200, content=answer, headers={"Content-Type": JOB_AND_RESULT})
        if made is not None or number != run.num_steps + 1:
            raise RunConflict(
                f"expected step {run.num_steps + 1}, got another step {number}: the run is at "
                f"step {run.num_steps}",
                num_steps=run.num_steps,
            )
        if self.failing is not None:
            error, self.failing = self.failing, None
            return _json(_view(next(self._ids), JobState.FAILED, error=Problem.of(error)))
        loss = None if at_cotangents else 1 / number
        facts = {"run": run.id, "step": number, "grad_norm": float(number), "lr": [0.5]}
        result = self._result({}, computation="step", loss=loss, **facts)
        answered = _done(next(self._ids), result)
        self.steps[run.id, number] = digest, answered.content
        self._put(run, num_steps=number, loss=loss, grad_norm=float(number))
        view = StepView(
            number=number,
            job="j",
            loss=loss,
            grad_norm=number,
            lr=[0.5],
            seconds=0.1,
            finished_s=0.0,
        )
        self.history[run.id].append(view)
        return answered

    def _forward(self, spec: ForwardSpec) -> httpx.Response:
        self.specs.append(spec.model_dump(mode="json"))
        outputs = {}
        for group in spec.inputs:
            found = [
                tensor
                for shard in group.shards
                for name, tensor in load(self._blobs[shard.blob]).items()
                if name.startswith(shard.prefix)
            ]
            outputs[f"outputs/{group.name}"] = 2 * torch.cat(found)
        rows = {group.name: [1] for group in spec.inputs}
        return _done(next(self._ids), self._result(outputs, computation="forward", rows=rows))

    def _save(self, run: RunView, order: dict[str, Any]) -> httpx.Response:
        save_view = SaveView(
            name=order["name"],
            run=run.id,
            step=order["step"],
            created_s=0.0,
            size_bytes=8,
            shared=order["shared"],
        )
        self._put(run, saves=[*run.saves, save_view])
        return _done(next(self._ids), self._result({}, computation="state"))

    def _result(self, tensors: dict[str, torch.Tensor], **facts: Any) -> Callable[[str], bytes]:
        def result(job: str) -> bytes:
            receipt = {
                "protocol": 1,
                "job": job,
                "spec_digest": "",
                "model": "m",
                "model_version": VERSION,
                "seed": 0,
                "mode": "train",
                "precision": "fp32",
                "device": "cpu",
                "torch": "",
                "gradbox": "",
                "shards": {},
                "seconds": {},
                "peak_memory_bytes": 0,
                "memory_before_bytes": 0,
                **facts,
            }
            return save(tensors, metadata={"gradbox": json.dumps(receipt)})

        return result


def _view(job: str, state: JobState, **given: Any) -> JobView:
    return JobView(
        id=job, state=state, computation="step", model="m", owner="ann", created_s=0.0, **given
    )


def _done(job: str, result: Callable[[str], bytes]) -> httpx.Response:
    content = result(job)
    digest = hashlib.sha256(content).hexdigest()
    told = ResultView(size_bytes=len(content), sha256=digest)
    body = joined_with_result(_view(job, JobState.DONE, result=told), content)
    return httpx.Response(200, content=body, headers={"Content-Type": JOB_AND_RESULT})


def _json(view: Any, *, status: int = 200) -> httpx.Response:
    return httpx.Response(
        status, content=view.model_dump_json(), headers={"Content-Type": "application/json"}
    )


def _problem(error: GradboxError) -> httpx.Response:
    where = {"num_steps": error.num_steps} if isinstance(error, RunConflict) else {}
    found = Problem.of(error, **where)
    headers = {"Content-Type": "application/problem+json"}
    return httpx.Response(found.status, content=found.model_dump_json(), headers=headers)
