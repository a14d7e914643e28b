"""Losses over the outputs of all shards: each can be named (`Builtin`) or traced like one's own.

Shapes: N samples or pairs, M candidates, D features, C classes. A loss over pairs takes two groups
of inputs by name; given one group, its first half holds the left members and its second half the
right ones, in the same order. Every loss returns a scalar, and raises an error for tensors of other
shapes than it states. None normalises by anything that its formula does not show. All compare every
sample with every other, so memory grows with N², for `triplet_all` with N³; `cross_entropy`,
`wasserstein_1d` and `cox_partial_likelihood` are linear.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor


def check_one_each(name: str, given: Tensor, z: Tensor) -> None:
    """Raises:
    ValueError: it has not one entry for each sample.
    """
    if given.shape != z.shape[:1]:
        raise ValueError(
            f"{name}: expected shape {tuple(z.shape[:1])}, one entry for each of the outputs of "
            f"shape {tuple(z.shape)}, got {tuple(given.shape)}"
        )


def check_alike(name: str, given: Tensor, z: Tensor) -> None:
    """Raises:
    ValueError: it has another shape than z.
    """
    if given.shape != z.shape:
        raise ValueError(f"{name}: expected shape {tuple(z.shape)}, got {tuple(given.shape)}")


def check_scalar(name: str, given: Tensor) -> None:
    """Raises:
    ValueError: it is not one number.
    """
    if given.numel() != 1:
        raise ValueError(f"{name}: expected one number, got shape {tuple(given.shape)}")


def pairs(left: Tensor, right: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return both members of each pair; one tensor holds them in two halves."""
    if right is not None:
        return left, right
    halves = left.reshape(2, -1, left.shape[1])
    return halves[0], halves[1]


def info_nce(
    queries: Tensor, passages: Tensor | None = None, *, temperature: float = 0.05
) -> Tensor:
    """Contrast each query's passage with all other passages.

        L = −1/N Σ_i log( exp(s_ii/τ) / Σ_j exp(s_ij/τ) ),  s_ij = cos(q_i, p_j)

    Args:
        queries: (N, D); or (2N, D), queries then passages, when `passages` is left out.
        passages: (M, D) with M ≥ N: passage i answers query i, those from N on are hard negatives.
        temperature: τ > 0; 0.05 is the scale 20 of sentence-transformers' ranking loss.

    Source: van den Oord et al. 2018, eq. 4; Henderson et al. 2017, section 4.
    """
    left, right = pairs(queries, passages)
    cosines_NM = F.normalize(left, dim=1) @ F.normalize(right, dim=1).T
    matches_N = torch.arange(left.shape[0], device=left.device)
    return F.cross_entropy(cosines_NM / temperature, matches_N)


def clip_symmetric(
    images: Tensor,
    texts: Tensor | None = None,
    log_scale: Tensor | None = None,
    *,
    temperature: float = 0.07,
) -> Tensor:
    """Classify the text of each image and the image of each text.

        L = ½ [ CE(a·S, i) + CE(a·Sᵀ, i) ],  S_ij = cos(image_i, text_j)

    with a = exp(log_scale), or 1/temperature when no `log_scale` is given.

    Args:
        images: (N, D); or (2N, D), images then texts, when `texts` is left out.
        texts: (N, D).
        log_scale: a scalar; pass it as a loss input that requires grad to learn it.
        temperature: read only without `log_scale`.

    Source: Radford et al. 2021, figure 3.
    """
    left, right = pairs(images, texts)
    if log_scale is not None:
        check_scalar("log_scale", log_scale)
    scale = 1.0 / temperature if log_scale is None else log_scale.exp()
    logits_NN = scale * (F.normalize(left, dim=1) @ F.normalize(right, dim=1).T)
    matches_N = torch.arange(left.shape[0], device=left.device)
    return (F.cross_entropy(logits_NN, matches_N) + F.cross_entropy(logits_NN.T, matches_N)) / 2


def supervised_contrastive(z: Tensor, labels: Tensor, *, temperature: float = 0.07) -> Tensor:
    """Draw samples of one class together, against all others.

        L = −1/|A| Σ_{i∈A} 1/|P(i)| Σ_{p∈P(i)} log( exp(s_ip/τ) / Σ_{a≠i} exp(s_ia/τ) )

    with s_ij = cos(z_i, z_j), P(i) the other samples of i's class, A the samples with P(i) ≠ ∅.

    Args:
        z: (N, D).
        labels: (N,), whole numbers.
        temperature: τ > 0.

    Source: Khosla et al. 2020, eq. 2. Samples alone in their class are left out of the mean.
    """
    check_one_each("labels", labels, z)
    z = F.normalize(z, dim=1)
    itself_NN = torch.eye(z.shape[0], dtype=torch.bool, device=z.device)
    logits_NN = (z @ z.T / temperature).masked_fill(itself_NN, -math.inf)
    positive_NN = (labels[:, None] == labels[None, :]) & ~itself_NN
    log_softmax_NN = logits_NN - logits_NN.logsumexp(dim=1, keepdim=True)
    num_positive_N = positive_NN.sum(dim=1)
    mean_N = torch.where(positive_NN, log_softmax_NN, 0.0).sum(dim=1) / num_positive_N.clamp(min=1)
    return -mean_N.sum() / (num_positive_N > 0).sum().clamp(min=1)


def vicreg(
    left: Tensor,
    right: Tensor | None = None,
    *,
    invariance: float = 25.0,
    variance: float = 25.0,
    covariance: float = 1.0,
    epsilon: float = 1e-4,
) -> Tensor:
    """Hold two views together, each feature's spread up, and features uncorrelated.

        L = λ·mean (l − r)² + μ/2 [v(l) + v(r)] + ν [c(l) + c(r)]
        v(x) = mean_d max(0, 1 − √(Var x_d + ε)),  c(x) = 1/D Σ_{d≠e} Cov(x)_de²

    Args:
        left: (N, D); or (2N, D), both views one after the other, when `right` is left out.
        right: (N, D).
        invariance: λ.
        variance: μ.
        covariance: ν.

    Source: Bardes et al. 2022, with the means of the authors' code: the paper's eq. 5 and 6 divide
    the invariance by N alone and do not halve the variance.
    """
    left, right = pairs(left, right)
    check_alike("right", right, left)
    spread = (_low_spread(left, epsilon) + _low_spread(right, epsilon)) / 2
    correlation = _correlation(left) + _correlation(right)
    return invariance * F.mse_loss(left, right) + variance * spread + covariance * correlation


def barlow_twins(
    left: Tensor,
    right: Tensor | None = None,
    *,
    redundancy: float = 0.0051,
    epsilon: float = 1e-5,
) -> Tensor:
    """Make the cross-correlation of two views the identity.

        L = Σ_d (1 − C_dd)² + λ Σ_{d≠e} C_de²,  C = 1/N l̂ᵀ r̂

    l̂ and r̂ standardised per feature over the N samples, with variance + ε under the root.

    Args:
        left: (N, D); or (2N, D), both views one after the other, when `right` is left out.
        right: (N, D).
        redundancy: λ.

    Source: Zbontar et al. 2021, eq. 1 and 2.
    """
    left, right = pairs(left, right)
    check_alike("right", right, left)
    correlation_DD = (_standard(left, epsilon).T @ _standard(right, epsilon)) / left.shape[0]
    on_D = correlation_DD.diagonal()
    off = correlation_DD.square().sum() - on_D.square().sum()
    return (1 - on_D).square().sum() + redundancy * off


def mmd(z: Tensor, reference: Tensor, *, bandwidth: float = 1.0) -> Tensor:
    """Squared maximum mean discrepancy of two samples under a Gaussian kernel.

        L = mean k(z_i, z_j) + mean k(r_i, r_j) − 2 mean k(z_i, r_j),  k(a, b) = exp(−|a−b|²/2h²)

    Args:
        z: (N, D).
        reference: (M, D).
        bandwidth: h > 0.

    Source: Gretton et al. 2012, eq. 5: the biased estimate, whose means include i = j.
    """
    gamma = 1.0 / (2.0 * bandwidth**2)
    within = _kernel_mean(z, z, gamma) + _kernel_mean(reference, reference, gamma)
    return within - 2 * _kernel_mean(z, reference, gamma)


def wasserstein_1d(z: Tensor, reference: Tensor, *, power: float = 2.0) -> Tensor:
    """p-th power of the p-Wasserstein distance of two samples, feature by feature, averaged.

        L = 1/D Σ_d 1/N Σ_i | z_(i)d − r_(i)d |^p,  x_(i)d the i-th smallest of feature d

    Args:
        z: (N,) or (N, D).
        reference: of the same shape.
        power: p ≥ 1.

    Source: Peyré and Cuturi 2019, remark 2.28. Where samples tie, the gradient is one of several.
    """
    check_alike("reference", reference, z)
    gap = z.sort(dim=0).values - reference.sort(dim=0).values
    return gap.abs().pow(power).mean()


def triplet_all(z: Tensor, labels: Tensor, *, margin: float = 0.2) -> Tensor:
    """Every anchor with every positive and every negative.

        L = 1/T Σ_{(a,p,n)} max(0, |z_a−z_p|² − |z_a−z_n|² + m)

    over the T triplets with label_a = label_p ≠ label_n and a ≠ p; 0 when there are none.

    Args:
        z: (N, D).
        labels: (N,), whole numbers.
        margin: m ≥ 0.

    Source: Schroff et al. 2015, eq. 3; all triplets as in Hermans et al. 2017, section 2. N³ terms.
    """
    check_one_each("labels", labels, z)
    distance_NN = _squared_distances(z, z)
    same_NN = labels[:, None] == labels[None, :]
    itself_NN = torch.eye(z.shape[0], dtype=torch.bool, device=z.device)
    counts_NNN = (same_NN & ~itself_NN)[:, :, None] & ~same_NN[:, None, :]
    excess_NNN = (distance_NN[:, :, None] - distance_NN[:, None, :] + margin).relu()
    return torch.where(counts_NNN, excess_NNN, 0.0).sum() / counts_NNN.sum().clamp(min=1)


def cox_partial_likelihood(z: Tensor, times: Tensor, events: Tensor) -> Tensor:
    """Negative log partial likelihood of a proportional hazards model, per event.

        L = −1/E Σ_{i: event_i} ( z_i − log Σ_{j: t_j ≥ t_i} exp(z_j) )

    Args:
        z: (N,) or (N, 1), log relative hazards.
        times: (N,), of the event or of the last observation.
        events: (N,), 1 where the event was seen, 0 where it was censored; E of them are 1.

    Source: Cox 1972, eq. 12; tied times as Breslow 1974 has them. O(N log N).
    """
    check_one_each("times", times, z)
    check_one_each("events", events, z)
    risk_N = z.reshape(-1)
    check_one_each("times", times, risk_N)
    order_N = times.argsort(descending=True)
    risk_N, times_N = risk_N[order_N], times[order_N]
    num_earlier_N = torch.searchsorted(times_N.flip(0), times_N)
    at_risk_N = times.shape[0] - num_earlier_N - 1
    log_sum_N = risk_N.logcumsumexp(dim=0)[at_risk_N]
    seen_N = events[order_N].to(z.dtype)
    return ((log_sum_N - risk_N) * seen_N).sum() / seen_N.sum()


def cross_entropy(
    z: Tensor, labels: Tensor, *, label_smoothing: float = 0.0, reduction: str = "mean"
) -> Tensor:
    """Classify each sample.

        L = −1/N Σ_i log softmax(z_i)[label_i]   (the sum without 1/N where reduction is "sum")

    Args:
        z: (N, C), logits; or (N, C, ...).
        labels: (N,) whole numbers; or (N, ...); or probabilities of z's shape.
        label_smoothing: the share of the target that is spread over all classes, from 0 to 1.
        reduction: "mean" or "sum", over the samples.

    Source: torch.nn.functional.cross_entropy.
    """
    return F.cross_entropy(z, labels, label_smoothing=label_smoothing, reduction=reduction)


BUILTIN: Final[Mapping[str, Callable[..., Tensor]]] = {
    function.__name__: function
    for function in (
        info_nce,
        clip_symmetric,
        supervised_contrastive,
        vicreg,
        barlow_twins,
        mmd,
        wasserstein_1d,
        triplet_all,
        cox_partial_likelihood,
        cross_entropy,
    )
}


def _low_spread(x_ND: Tensor, epsilon: float) -> Tensor:
    return (1 - (x_ND.var(dim=0) + epsilon).sqrt()).relu().mean()


def _correlation(x_ND: Tensor) -> Tensor:
    num, width = x_ND.shape
    x_ND = x_ND - x_ND.mean(dim=0)
    covariance_DD = x_ND.T @ x_ND / (num - 1)
    return (covariance_DD.square().sum() - covariance_DD.diagonal().square().sum()) / width


def _standard(x_ND: Tensor, epsilon: float) -> Tensor:
    return (x_ND - x_ND.mean(dim=0)) / (x_ND.var(dim=0, unbiased=False) + epsilon).sqrt()


def _squared_distances(a_ND: Tensor, b_MD: Tensor) -> Tensor:
    # About one point near both: far from zero the three terms would cancel.
    center_D = b_MD.mean(dim=0).detach()
    a_ND, b_MD = a_ND - center_D, b_MD - center_D
    lengths_NM = a_ND.square().sum(dim=1)[:, None] + b_MD.square().sum(dim=1)[None, :]
    return (lengths_NM - 2 * a_ND @ b_MD.T).clamp(min=0)


def _kernel_mean(a_ND: Tensor, b_MD: Tensor, gamma: float) -> Tensor:
    return (-gamma * _squared_distances(a_ND, b_MD)).exp().mean()
