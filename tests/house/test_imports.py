"""Imports point one way within every package, those inside functions and TYPE_CHECKING included."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house.imports import by_room, cycles, import_graph

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "gradbox": "client",
    "gradbox_factors": "client",
    "gradbox_service": "service",
    "gradbox_engine": "worker",
    "gradbox_worker": "worker",
}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_imports_itself_through_others(package: str) -> None:
    graph = import_graph(ROOT / PACKAGES[package], package)
    assert cycles(graph) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_room_imports_itself_through_others(package: str) -> None:
    graph = by_room(import_graph(ROOT / PACKAGES[package], package))
    assert cycles(graph) == []


def test_a_cycle_hidden_in_a_function_or_under_type_checking_is_seen(tmp_path: Path) -> None:
    room = tmp_path / "package" / "room"
    room.mkdir(parents=True)
    (room / "__init__.py").write_text("")
    (room / "one.py").write_text("def f():\n    from package.room import two\n")
    (room / "two.py").write_text("if TYPE_CHECKING:\n    from package.room.one import f\n")
    assert cycles(import_graph(tmp_path, "package")) == [["package.room.one", "package.room.two"]]
