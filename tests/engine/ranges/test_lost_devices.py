"""Devices that are lost, in each phase: their ranges run again, and the result is exact."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gradbox_engine import DeviceLost, ReplayMismatch
from tests.cases import CASES
from tests.engine.ranges.running import in_ranges, on_devices, same_result

NAME = "cnn in train"  # batch norm and dropout


@pytest.mark.parametrize("retain", [0, 10**9])
@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("phase", ["forward", "replay"])
def test_a_device_that_dies_in_a_phase_costs_its_range(phase, number, retain):
    found, devices = on_devices(CASES[NAME](), 3, dies={number: phase}, retain=retain)
    assert same_result(found, in_ranges(CASES[NAME](), 3))
    assert [run.devices_lost for run in found.ranges] == [int(r == number) for r in range(3)]
    assert all(run.rerun_difference == 0 for run in found.ranges)
    passes = [device for kind, device in devices.calls if kind == "forward"]
    assert len(passes) == 4


@pytest.mark.parametrize(("phase", "lost"), [("added", [1, 1, 0]), ("fetched", [1, 1, 1])])
def test_sums_that_are_lost_are_computed_again(phase, lost):
    found, _ = on_devices(CASES[NAME](), 3, dies={0: phase})
    assert same_result(found, in_ranges(CASES[NAME](), 3))
    assert [run.devices_lost for run in found.ranges] == lost


@pytest.mark.parametrize("dies", [{0: "added"}, {2: "added"}, {0: "fetched"}])
def test_sums_are_computed_again_in_the_same_tree(dies):
    name = "mlp, shards of one"
    found, devices = on_devices(CASES[name](), 5, num_spare=3, dies=dies)
    assert same_result(found, in_ranges(CASES[name](), 5))
    assert devices.dead == dies.keys()


def test_several_devices_may_die_one_after_the_other():
    found, _ = on_devices(CASES[NAME](), 3, dies={0: "forward", 2: "replay"})
    assert same_result(found, in_ranges(CASES[NAME](), 3))
    assert sum(run.devices_lost for run in found.ranges) == 2


def test_a_job_ends_when_no_device_is_left():
    with pytest.raises(DeviceLost, match="none left"):
        on_devices(CASES[NAME](), 1, dies={0: "forward", 1: "forward"})


def test_a_range_that_ends_every_device_ends_the_job():
    dies = dict.fromkeys(range(9), "replay")
    with pytest.raises(DeviceLost, match=r"shards 0 to 3: expected one of 3 devices .* device 2"):
        on_devices(CASES["mlp"](), 1, num_spare=8, dies=dies)


def test_another_device_has_to_give_the_same_outputs():
    built: list[torch.nn.Module] = []

    def model() -> torch.nn.Module:
        module = CASES["mlp"]().model()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(1.001 if len(built) == 2 else 1.0)
        built.append(module)
        return module

    case = replace(CASES["mlp"](), model=model)
    with pytest.raises(ReplayMismatch, match="on another device"):
        on_devices(case, 2, dies={1: "replay"})
