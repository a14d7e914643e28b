"""The allow-list: every name that may stand in a graph. Data only; nothing here knows torch.

The rule. A name is here if what it does depends on its arguments alone, if it writes nowhere but
into tensors of the graph, and if its result is a tensor, a number, a size or a tuple of those. So
there is nothing random, nothing that reads uninitialised memory (`empty`), nothing that takes a
callable or a string to evaluate, no input or output, no storage and no autograd engine. Nor is
there a function whose kernel believes values that it should check (`grid_sample`,
`linalg.lu_solve`, `linalg.ldl_solve`, `embedding_bag`, `max_unpool2d`): it would reach any memory
of the box. What such a kernel can be spared by a check is in
`gradbox_worker.interpreting.kernel_arguments`.

A function with two names has one here, the first of `FUNCTIONS` that is the same object; `targets`
looks functions up by identity. A method's in-place twin (`add_`) is listed where gradients flow
through it.
"""

from __future__ import annotations

from typing import Final


def _names(prefix: str, words: str) -> tuple[str, ...]:
    return tuple(prefix + word for word in words.split())


_POINTWISE = """
    abs absolute acos acosh add addcdiv addcmul angle arccos arccosh arcsin arcsinh arctan
    arctan2 arctanh asin asinh atan atan2 atanh ceil celu clamp clamp_max clamp_min clip complex
    conj conj_physical copysign cos cosh deg2rad digamma div divide erf erfc erfinv exp exp2
    expm1 fix float_power floor floor_divide fmax fmin fmod frac frexp gcd heaviside hypot i0
    igamma igammac imag lcm ldexp lerp lgamma log log10 log1p log2 log_softmax logaddexp
    logaddexp2 logit maximum minimum mul multiply mvlgamma nan_to_num neg negative nextafter
    polar polygamma positive pow prelu rad2deg real reciprocal relu remainder round rsqrt rsub
    selu sgn sigmoid sign sin sinc sinh softmax sqrt square sub subtract tan tanh threshold
    true_divide trunc where xlogy
"""

_COMPARISONS = """
    bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor eq ge
    greater greater_equal gt isclose isfinite isin isinf isnan isneginf isposinf isreal le less
    less_equal logical_and logical_not logical_or logical_xor lt ne not_equal signbit
"""

_REDUCTIONS = """
    all amax amin aminmax any argmax argmin argsort bincount bucketize corrcoef count_nonzero
    cov cummax cummin cumprod cumsum cumulative_trapezoid diff dist gradient histc kthvalue
    logcumsumexp logsumexp max mean median min mode msort nanmean nanmedian nanquantile nansum
    norm prod quantile searchsorted sort std std_mean sum topk trapezoid trapz unique
    unique_consecutive var var_mean
"""

_LINEAR_ALGEBRA = """
    addbmm addmm addmv addr baddbmm block_diag bmm cdist chain_matmul cholesky_inverse
    cholesky_solve cosine_similarity cross det dot einsum ger inner inverse kron logdet matmul
    matrix_exp matrix_power mm mv outer pairwise_distance pdist pinverse renorm slogdet
    tensordot trace tril tril_indices triu triu_indices vdot
"""

_SHAPES = """
    adjoint argwhere atleast_1d atleast_2d atleast_3d broadcast_tensors broadcast_to
    cartesian_prod cat channel_shuffle chunk clone column_stack combinations concat concatenate
    detach diag diag_embed diagflat diagonal diagonal_scatter dsplit dstack flatten flip fliplr
    flipud gather hsplit hstack index_add index_copy index_fill index_put index_reduce
    index_select masked_fill masked_scatter masked_select meshgrid moveaxis movedim narrow
    nonzero numel permute put ravel repeat_interleave reshape resolve_conj roll rot90 row_stack
    scatter scatter_add scatter_reduce select select_scatter slice_scatter split
    split_with_sizes squeeze stack swapaxes swapdims t take take_along_dim tensor_split tile
    transpose unbind unflatten unravel_index unsqueeze vander view_as_complex view_as_real
    vsplit vstack
"""

_FACTORIES = """
    arange bartlett_window blackman_window eye full full_like hamming_window hann_window
    kaiser_window linspace logspace ones ones_like scalar_tensor zeros zeros_like
"""

_FUNCTIONAL = """
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d
    adaptive_max_pool1d_with_indices adaptive_max_pool2d adaptive_max_pool2d_with_indices
    adaptive_max_pool3d adaptive_max_pool3d_with_indices affine_grid avg_pool1d avg_pool2d
    avg_pool3d batch_norm bilinear binary_cross_entropy binary_cross_entropy_with_logits celu
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
    cosine_embedding_loss cross_entropy ctc_loss elu embedding fold gaussian_nll_loss gelu glu
    group_norm hardshrink hardsigmoid hardswish hardtanh hinge_embedding_loss huber_loss
    instance_norm interpolate kl_div l1_loss layer_norm leaky_relu linear local_response_norm
    log_softmax logsigmoid lp_pool1d lp_pool2d lp_pool3d margin_ranking_loss max_pool1d
    max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool3d
    max_pool3d_with_indices mish mse_loss multi_head_attention_forward multi_margin_loss
    multilabel_margin_loss multilabel_soft_margin_loss nll_loss normalize one_hot pad
    pixel_shuffle pixel_unshuffle poisson_nll_loss relu relu6 rms_norm
    scaled_dot_product_attention selu sigmoid silu smooth_l1_loss soft_margin_loss softmax
    softmin softplus softshrink softsign tanhshrink threshold triplet_margin_loss unfold
"""

_LINALG = """
    cholesky cholesky_ex cond cross det diagonal eig eigh eigvals eigvalsh householder_product
    inv inv_ex ldl_factor lstsq lu lu_factor matmul matrix_exp matrix_norm
    matrix_power matrix_rank multi_dot norm pinv qr slogdet solve solve_ex solve_triangular svd
    svdvals tensorinv tensorsolve vander vecdot vector_norm
"""

_SPECIAL = """
    airy_ai bessel_j0 bessel_j1 digamma entr erf erfc erfcx erfinv exp2 expit expm1 gammainc
    gammaincc gammaln i0 i0e i1 i1e log1p log_ndtr log_softmax logit logsumexp ndtr
    ndtri polygamma psi round sinc softmax xlog1py xlogy zeta
"""

_FFT = """
    fft fft2 fftfreq fftn fftshift hfft hfft2 hfftn ifft ifft2 ifftn ifftshift ihfft ihfft2 ihfftn
    irfft irfft2 irfftn rfft rfft2 rfftfreq rfftn
"""

_SPECTROGRAMS = "istft stft"

OPERATORS: Final = frozenset(
    _names(
        "operator.",
        """
        abs add and_ eq floordiv ge getitem gt iadd iand ifloordiv ilshift imatmul imod imul invert
        ior ipow irshift isub itruediv ixor le lshift lt matmul mod mul ne neg or_ pos pow rshift
        setitem sub truediv xor
        """,
    )
)

# Functions that write into their first argument, or into running statistics.
WRITING_FUNCTIONS: Final = frozenset(
    (
        *_names(
            "operator.",
            """
            iadd iand ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor
            setitem
            """,
        ),
        *_names("torch.nn.functional.", "batch_norm instance_norm"),
    )
)

MATH: Final = frozenset(
    _names(
        "math.",
        """
        acos acosh asin asinh atan atan2 atanh ceil copysign cos cosh degrees erf erfc exp exp2
        expm1 fabs floor fmod gamma hypot isfinite isinf isnan lgamma log log10 log1p log2 pow
        radians sin sinh sqrt tan tanh trunc
        """,
    )
)

FACTORIES: Final = frozenset(
    (
        *_names("torch.", _FACTORIES),
        *_names("torch.", "tril_indices triu_indices"),
        *_names("torch.fft.", "fftfreq rfftfreq"),
    )
)

# What the interpreter itself gives a meaning to; see docs/graphs.md.
GRAD_MODE: Final = "torch.set_grad_enabled"
FIELD: Final = "gradbox.field"
ATTRIBUTE: Final = "builtins.getattr"
TYPE_LIMITS: Final = frozenset({"torch.finfo", "torch.iinfo"})
LENGTH: Final = "builtins.len"
EXTREMES: Final = ("builtins.max", "builtins.min")
ASSERT: Final = "torch._assert"

# In the order in which a function with several names is looked up.
FUNCTIONS: Final[tuple[str, ...]] = tuple(
    dict.fromkeys(
        (
            *_names("torch.", _POINTWISE),
            *_names("torch.", _COMPARISONS),
            *_names("torch.", _REDUCTIONS),
            *_names("torch.", _LINEAR_ALGEBRA),
            *_names("torch.", _SHAPES),
            *_names("torch.", _FACTORIES),
            *_names("torch.", _SPECTROGRAMS),
            *_names("torch.nn.functional.", _FUNCTIONAL),
            *_names("torch.linalg.", _LINALG),
            *_names("torch.special.", _SPECIAL),
            *_names("torch.fft.", _FFT),
            *sorted(OPERATORS),
            *sorted(MATH),
            *sorted(TYPE_LIMITS),
            ATTRIBUTE,
            LENGTH,
            *EXTREMES,
            ASSERT,
            FIELD,
            GRAD_MODE,
        )
    )
)

_METHODS = """
    abs absolute acos acosh add addbmm addcdiv addcmul addmm addmv addr adjoint all amax amin
    aminmax angle any arccos arccosh arcsin arcsinh arctan arctan2 arctanh argmax argmin argsort
    argwhere asin asinh atan atan2 atanh baddbmm bfloat16 bincount bitwise_and
    bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor bmm bool
    broadcast_to byte cdouble ceil cfloat char cholesky_inverse cholesky_solve chunk clamp
    clamp_max clamp_min clip clone conj conj_physical contiguous copysign corrcoef cos cosh
    count_nonzero cov cross cummax cummin cumprod cumsum deg2rad det detach diag diag_embed
    diagflat diagonal diagonal_scatter diff digamma dim dist div divide dot double dsplit eq erf
    erfc erfinv exp exp2 expand expand_as expm1 fix flatten flip fliplr flipud float float_power
    floor floor_divide fmax fmin fmod frac frexp gather gcd ge ger greater greater_equal gt half
    hardshrink heaviside histc hsplit hypot i0 igamma igammac index_add index_copy index_fill
    index_put index_reduce index_select inner int inverse is_complex is_floating_point isclose
    isfinite isinf isnan isneginf isposinf isreal istft kron kthvalue lcm ldexp le lerp less
    less_equal lgamma log log10 log1p log2 log_softmax logaddexp logaddexp2 logcumsumexp logdet
    logical_and logical_not logical_or logical_xor logit logsumexp long lt masked_fill
    masked_scatter masked_select matmul matrix_exp matrix_power max maximum mean median min
    minimum mm mode moveaxis movedim msort mul multiply mv mvlgamma nan_to_num nanmean nanmedian
    nanquantile nansum narrow narrow_copy ndimension ne neg negative nelement new_full new_ones
    new_zeros nextafter nonzero norm not_equal numel outer permute pinverse polygamma positive
    pow prelu prod put quantile rad2deg ravel reciprocal relu remainder renorm repeat
    repeat_interleave reshape reshape_as resolve_conj resolve_neg roll rot90 round rsqrt scatter
    scatter_add scatter_reduce select select_scatter sgn short sigmoid sign signbit sin sinc
    sinh size slice_scatter slogdet softmax sort split split_with_sizes sqrt square squeeze std
    stft stride sub subtract sum sum_to_size swapaxes swapdims t take take_along_dim tan tanh
    tensor_split tile to topk trace transpose tril triu true_divide trunc type_as unbind
    unflatten unfold unique unique_consecutive unsqueeze var vdot view view_as vsplit where
    xlogy
"""

_IN_PLACE = """
    abs_ absolute_ acos_ acosh_ add_ addbmm_ addcdiv_ addcmul_ addmm_ addmv_ addr_ arccos_
    arccosh_ arcsin_ arcsinh_ arctan_ arctanh_ asin_ asinh_ atan_ atan2_ atanh_ baddbmm_
    bitwise_and_ bitwise_left_shift_ bitwise_not_ bitwise_or_ bitwise_right_shift_ bitwise_xor_
    ceil_ clamp_ clamp_max_ clamp_min_ clip_ conj_physical_ copy_ copysign_ cos_ cosh_ cumprod_
    cumsum_ deg2rad_ digamma_ div_ divide_ eq_ erf_ erfc_ erfinv_ exp_ exp2_ expm1_ fill_
    fill_diagonal_ fix_ float_power_ floor_ floor_divide_ fmod_ frac_ gcd_ ge_ greater_
    greater_equal_ gt_ heaviside_ hypot_ i0_ index_add_ index_copy_ index_fill_ index_put_
    index_reduce_ lcm_ ldexp_ le_ lerp_ less_ less_equal_ lgamma_ log_ log10_ log1p_ log2_
    logical_and_ logical_not_ logical_or_ logical_xor_ logit_ lt_ masked_fill_ masked_scatter_
    mul_ multiply_ nan_to_num_ ne_ neg_ negative_ not_equal_ pow_ put_ rad2deg_ reciprocal_
    relu_ remainder_ round_ rsqrt_ scatter_ scatter_add_ scatter_reduce_ sgn_ sigmoid_ sign_
    sin_ sinc_ sinh_ sqrt_ square_ sub_ subtract_ tan_ tanh_ tril_ triu_ true_divide_ trunc_
    xlogy_ zero_
"""

IN_PLACE: Final = frozenset(_names("", _IN_PLACE))
METHODS: Final = frozenset(_names("", _METHODS)) | IN_PLACE

# Read by getattr from a tensor; from the named tuples that max, sort, topk, svd and so on return;
# and from torch.finfo.
TENSOR_ATTRIBUTES: Final = frozenset("H T device dtype imag mH mT ndim real shape".split())
RESULT_FIELDS: Final = frozenset(
    """
    D L LD LU P Q R S U Vh eigenvalues eigenvectors exponent indices info inverse_indices logabsdet
    mantissa max min pivots rank residuals sign singular_values solution values
    """.split()
)
LIMIT_FIELDS: Final = frozenset("bits eps max min resolution smallest_normal tiny".split())
ATTRIBUTES: Final = TENSOR_ATTRIBUTES | RESULT_FIELDS | LIMIT_FIELDS

DTYPES: Final = frozenset(
    """
    bfloat16 bool complex128 complex64 float16 float32 float64 int16 int32 int64 int8 uint8
    """.split()
)
MEMORY_FORMATS: Final = frozenset(
    "channels_last channels_last_3d contiguous_format preserve_format".split()
)

# Arguments that write into other tensors (`max_norm` into an embedding's weight, at indices that no
# kernel has checked), pin memory or draw random numbers.
FORBIDDEN_KEYWORDS: Final = frozenset(
    "generator max_norm names out pin_memory requires_grad".split()
)

# A loss is a function of its arguments: the probability with which attention drops entries, or a
# recurrent layer its outputs, is 0.
ZERO_KEYWORDS: Final = frozenset({"dropout", "dropout_p"})

# One call makes as many tensors as the data says: `build` counts them first.
PIECES: Final = frozenset(
    "chunk dsplit hsplit split split_with_sizes tensor_split unbind vsplit".split()
)
