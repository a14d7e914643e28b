"""The arithmetic and the bars of the benchmark of attribution, on numbers made up for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.attribution.report import (
    BESIDE,
    LAYERS,
    OURS,
    WIDE,
    Attribution,
    Compared,
    attribution_section,
)
from benchmarks.attribution.retrained import Retrained, spearman

AGREED = {"peer": "kronfluence", "spearman": 0.99, "least": 0.9}
MET = Attribution(
    compared=[
        Compared("digits", "dot", 0.3, **AGREED, peer_lds=0.329),
        Compared("digits", "ekfac", 0.6, **AGREED, peer_lds=0.571),
        Compared("digits", "trak", 0.5, peer="dattri", peer_lds=0.5, spearman=0.95, least=0.9),
        Compared("digits", "ggn", 0.7),
    ],
    rates=dict.fromkeys([*OURS, *BESIDE], 1000.0),
    versions="kronfluence 1",
    load=1.0,
)


def missed(**changed: Any) -> int:
    return attribution_section(replace(MET, **changed)).count("**not met**")


def test_bars_that_are_just_met_are_met() -> None:
    assert missed() == 0


def test_each_number_has_a_bar() -> None:
    dot, ekfac, trak, ggn = MET.compared
    assert missed(compared=[replace(dot, spearman=0.989), ekfac, trak, ggn]) == 1
    assert missed(compared=[dot, replace(ekfac, peer_lds=0.56), trak, ggn]) == 1
    assert missed(compared=[dot, ekfac, replace(trak, spearman=0.949), ggn]) == 1
    assert missed(compared=[dot, replace(ekfac, lds=0.599), trak, ggn]) == 1
    assert missed(rates=MET.rates | {(WIDE, "TRAK"): 1001.0}) == 1
    assert missed(rates=MET.rates | {LAYERS: 999.0}) == 2


def test_a_peer_that_is_absent_is_named_without_a_bar() -> None:
    rates = {who: rate for who, rate in MET.rates.items() if who[1] != "bergson"}
    text = attribution_section(replace(MET, rates=rates))
    assert text.count("not measured: pip install") == 2
    assert "of bergson" not in text


def test_the_correlation_is_that_of_scipy_row_by_row() -> None:
    from scipy.stats import spearmanr

    left, right = torch.randn(2, 3, 20, generator=torch.Generator().manual_seed(0))
    left[0, :5] = left[0, 5]  # ties
    expected = [spearmanr(a, b).statistic for a, b in zip(left, right, strict=True)]
    assert spearman(left, right).tolist() == pytest.approx(expected)


def test_scores_that_add_up_to_the_fall_of_the_loss_have_the_score_one() -> None:
    generator = torch.Generator().manual_seed(0)
    scores_QN = torch.randn(4, 10, generator=generator)
    subsets = torch.stack([torch.randperm(10, generator=generator)[:5] for _ in range(30)])
    retrained = Retrained(subsets, -scores_QN.double()[:, subsets].sum(2).T)
    assert retrained.lds(scores_QN) == pytest.approx(1)
    assert retrained.lds(-scores_QN) == pytest.approx(-1)
