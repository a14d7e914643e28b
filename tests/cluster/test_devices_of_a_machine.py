"""Which devices the head starts on a machine, and what Ray reserves for each."""

from __future__ import annotations

import pytest

from gradbox_worker.cluster.machines import devices_of

CPU_ACTOR = ("cpu", {"num_cpus": 4})


def gpus(number: int) -> tuple[str, dict[str, float]]:
    return ("cuda:0", {"num_gpus": number, "num_cpus": 0})


@pytest.mark.parametrize(
    ("has", "asked", "num_gpus", "expected"),
    [
        (8, ["auto"], 1, [gpus(1)] * 8),
        (8, ["auto"], 4, [gpus(4)] * 2),
        (7, ["auto"], 4, [gpus(4)]),
        (2, ["auto"], 4, []),
        (0, ["auto"], 1, [("cpu", {"num_cpus": 8})]),
        (0, ["cpu", "cpu"], 4, [CPU_ACTOR] * 2),
        (8, ["cuda:0", "cuda:1"], 4, [gpus(4)] * 2),
        (2, ["cuda:0"], 4, []),
        (2, ["cuda:0", "cuda:1", "cuda:2"], 1, [gpus(1)] * 2),
        (0, ["cpu", "cuda:0"], 1, [CPU_ACTOR]),
    ],
)
def test_a_device_has_as_many_gpus_as_models_want(
    has: int, asked: list[str], num_gpus: int, expected: list[tuple[str, dict[str, float]]]
) -> None:
    facts = {"Resources": {"CPU": 8.0, "GPU": float(has)} if has else {"CPU": 8.0}}
    assert devices_of(facts, asked, num_gpus=num_gpus, with_gpus=has > 0) == expected


@pytest.mark.parametrize(
    ("resources", "asked", "with_gpus"),
    [
        ({}, ["cpu", "cpu"], False),
        ({}, ["auto"], False),
        ({"CPU": 8.0}, ["auto"], True),
        ({"CPU": 8.0}, ["cuda:0"], True),
    ],
    ids=["no core", "no core, auto", "cores beside other machines' GPUs", "no GPU"],
)
def test_a_machine_may_have_no_device(
    resources: dict[str, float], asked: list[str], with_gpus: bool
) -> None:
    assert devices_of({"Resources": resources}, asked, num_gpus=1, with_gpus=with_gpus) == []


@pytest.mark.parametrize("asked", [3, 7, 24])
def test_more_cpu_devices_than_cores_have_a_part_of_one_each(asked: int) -> None:
    found = devices_of({"Resources": {"CPU": 2.0}}, ["cpu"] * asked, num_gpus=1, with_gpus=False)
    shares = [resources["num_cpus"] for _, resources in found]
    assert len(shares) == asked
    assert min(shares) > 0
    assert sum(shares) <= 2  # or the last of them would wait for a core forever
