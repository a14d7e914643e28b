"""Which device runs for whom."""

from __future__ import annotations

from gradbox_worker.cluster.head.leases import LeaseRequest, Leases


def leases_of(*devices: str, without_files: tuple[str, ...] = ()) -> Leases:
    leases = Leases()
    for device in devices:
        leases.add(device, sees_files=device not in without_files)
    return leases


def granted(leases: Leases) -> dict[str, list[str]]:
    return {request.lease: devices for request, devices in leases.granted()}


def test_a_lease_gets_what_is_idle_and_no_more_than_it_asked_for() -> None:
    leases = leases_of("a", "b", "c")
    leases.ask(LeaseRequest("one", "m", at_most=2))
    assert granted(leases) == {"one": ["a", "b"]}
    leases.ask(LeaseRequest("two", "m", at_most=5))
    assert granted(leases) == {"two": ["c"]}


def test_a_lease_waits_for_one_device_and_not_for_all() -> None:
    leases = leases_of("a", "b")
    leases.ask(LeaseRequest("one", "m", at_most=2))
    granted(leases)
    leases.ask(LeaseRequest("two", "m", at_most=2))
    assert granted(leases) == {}
    leases.free("b")
    assert granted(leases) == {"two": ["b"]}


def test_those_that_wait_are_served_in_the_order_in_which_they_asked() -> None:
    leases = leases_of("a")
    for name in ("one", "two", "three"):
        leases.ask(LeaseRequest(name, "m"))
    order = list(granted(leases))
    for _ in range(2):
        leases.free("a")
        order += granted(leases)
    assert order == ["one", "two", "three"]


def test_a_device_that_ran_the_model_is_preferred() -> None:
    leases = leases_of("a", "b")
    leases.ask(LeaseRequest("one", "other"))
    leases.ask(LeaseRequest("two", "m"))
    granted(leases)
    leases.free("a")
    leases.free("b")
    leases.ask(LeaseRequest("three", "m"))
    assert granted(leases) == {"three": ["b"]}


def test_a_whole_job_gets_a_device_that_sees_the_files_first() -> None:
    leases = leases_of("far", "near", without_files=("far",))
    leases.ask(LeaseRequest("one", "m", at_most=2, with_files=True))
    assert granted(leases) == {"one": ["near", "far"]}
    leases.free("far")
    leases.ask(LeaseRequest("whole", "m", with_files=True))
    assert granted(leases) == {}


def test_a_job_in_ranges_waits_for_no_device_that_sees_the_files() -> None:
    leases = leases_of("far", "near", without_files=("far",))
    leases.ask(LeaseRequest("one", "m"))
    assert granted(leases) == {"one": ["near"]}
    leases.ask(LeaseRequest("wide", "m", at_most=2))
    assert granted(leases) == {"wide": ["far"]}


def test_a_lease_that_is_withdrawn_gets_nothing() -> None:
    leases = leases_of("a")
    leases.ask(LeaseRequest("one", "m"))
    leases.withdraw("one")
    assert granted(leases) == {}


def test_a_device_that_is_removed_is_lent_no_more() -> None:
    leases = leases_of("a", "b")
    leases.ask(LeaseRequest("one", "m"))
    assert granted(leases) == {"one": ["a"]}
    leases.remove("a")
    leases.free("a")
    leases.ask(LeaseRequest("two", "m", at_most=2))
    assert granted(leases) == {"two": ["b"]}


def test_a_job_that_follows_another_gets_the_devices_that_this_one_had() -> None:
    leases = leases_of("a", "b")
    leases.ask(LeaseRequest("forward", "m", job="f"))
    granted(leases)
    leases.free("a")  # idle for less time than b, which has the model too
    leases.ask(LeaseRequest("gradient", "m", follows="f"))
    assert granted(leases) == {"gradient": ["a"]}
