"""The built-in losses over HTTP."""

from __future__ import annotations

from gradbox.builtin_losses.signatures import BUILTIN_SIGNATURES
from tests.service.conftest import Box


def test_every_loss_is_told_with_its_tensors_and_options(box: Box) -> None:
    listed = box.client.get("/v1/losses").json()["losses"]
    assert [loss["name"] for loss in listed] == list(BUILTIN_SIGNATURES)
    by_name = {loss["name"]: loss for loss in listed}
    first, second = by_name["info_nce"]["tensors"]
    assert (first["name"], first["required"]) == ("queries", True)
    assert (second["name"], second["required"]) == ("passages", False)
    (option,) = by_name["info_nce"]["options"]
    assert (option["default"], option["above"]) == (0.05, 0.0)
    assert by_name["cross_entropy"]["options"][1]["choices"] == ["mean", "sum"]


def test_no_answer_has_an_empty_description(box: Box) -> None:
    for loss in box.client.get("/v1/losses").json()["losses"]:
        assert loss["summary"]
        assert all(tensor["shape"] for tensor in loss["tensors"])
        assert all(option["meaning"] for option in loss["options"])
