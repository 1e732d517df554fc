"""The table of torch's ops that pass through: for each the dims that it works across; all other dims shard freely."""

from collections.abc import Callable

import torch
from torch import fx

from mpar.sharding._canonicalise import shape_of
from mpar.sharding._pass_through import Across, Pattern, fitted, values_of
from mpar.sharding._rules import RULES, NodeRule, pointwise, replicated

aten = torch.ops.aten
Entries = list[tuple[Callable[[fx.Node], NodeRule], str]]


def _repeated(node: fx.Node) -> NodeRule:
    """The rule of `repeat`: a dim that is repeated once passes through."""
    x, repeats = node.args[0], node.args[1]
    new = len(repeats) - len(shape_of(x))
    names = tuple((f"d{i}",) if times == 1 and i >= new else () for i, times in enumerate(repeats))
    return fitted(NodeRule([x], [names[new:]], [names], {}, linear={0}), values_of(node))


def _solved(node: fx.Node) -> NodeRule:
    """The rule of solving linear equations with as many matrices as right sides, which are matrices or vectors."""
    matrix, right = shape_of(node.args[0]), shape_of(node.args[1])
    if right == matrix[:-1]:
        return Pattern("... _ _, ... _ -> ... _, ... _ _, ... _, ...")(node)
    return Pattern("... _ _, ... _ _ -> ... _ _, ... _ _, ... _, ...")(node) if right[:-2] == matrix[:-2] else replicated(node)


ALONG: Entries = [
    (Across(), "cummax cummin cumprod glu glu_backward kthvalue linalg_cross logcumsumexp median.dim mode nanmedian.dim"),
    (Across(), "sort sort.stable"),
    (Across("dim", linear="self"), "_fft_c2c _fft_r2c _fft_c2r slice.Tensor split.Tensor split_with_sizes unbind.int"),
    (Across("dim", jointly=True), "cat"),
    (Across("dim", of="result", jointly=True), "stack"),
    (Across("dim", of="result", sized="input_sizes", linear="grad_output"), "select_backward slice_backward"),
    (Across("dims", linear="self"), "flip"),
    (Across("dimension", linear="self"), "unfold"),
    (Across("dim", of="result", sized="input_sizes", linear="grad_in"), "unfold_backward"),
    (Across("dim1 dim2", of="result", linear="self"), "diag_embed"),
    (Across("dim1 dim2", jointly=True), "diagonal_scatter"),
    (Across(jointly=True), "select_scatter slice_scatter"),
]
"""Ops that work across the dim that they are given."""
LAST: Entries = [
    (Across(1), "adaptive_avg_pool1d reflection_pad1d reflection_pad1d_backward replication_pad1d replication_pad1d_backward"),
    (Across(1, linear="self"), "upsample_linear1d upsample_nearest1d _upsample_nearest_exact1d"),
    (Across(2), "_adaptive_avg_pool2d _adaptive_avg_pool2d_backward adaptive_max_pool2d adaptive_max_pool2d_backward"),
    (Across(2), "max_pool2d_with_indices max_pool2d_with_indices_backward max_unpool2d reflection_pad2d"),
    (Across(2), "reflection_pad2d_backward replication_pad2d replication_pad2d_backward fractional_max_pool2d"),
    (Across(2, linear="self"), "upsample_bicubic2d upsample_bilinear2d upsample_nearest2d _upsample_nearest_exact2d"),
    (Across(2, linear="self"), "_upsample_bilinear2d_aa _upsample_bicubic2d_aa"),
    (Across(3), "_adaptive_avg_pool3d _adaptive_avg_pool3d_backward adaptive_max_pool3d adaptive_max_pool3d_backward"),
    (Across(3), "max_pool3d_with_indices max_pool3d_with_indices_backward max_unpool3d reflection_pad3d"),
    (Across(3), "reflection_pad3d_backward replication_pad3d replication_pad3d_backward channel_shuffle pixel_shuffle"),
    (Across(3), "pixel_unshuffle"),
    (Across(3, linear="self"), "upsample_nearest3d upsample_trilinear3d _upsample_nearest_exact3d"),
    (Across(1, sized="input_size", linear="grad_output"), "upsample_linear1d_backward upsample_nearest1d_backward"),
    (Across(1, sized="input_size", linear="grad_output"), "_upsample_nearest_exact1d_backward"),
    (Across(2, sized="input_size", linear="grad_output"), "upsample_bicubic2d_backward upsample_bilinear2d_backward"),
    (Across(2, sized="input_size", linear="grad_output"), "upsample_nearest2d_backward _upsample_nearest_exact2d_backward"),
    (Across(2, sized="input_size", linear="grad_output"), "_upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward"),
    (Across(3, sized="input_size", linear="grad_output"), "upsample_nearest3d_backward upsample_trilinear3d_backward"),
    (Across(3, sized="input_size", linear="grad_output"), "_upsample_nearest_exact3d_backward"),
    (Across(2), "_linalg_det _linalg_eigh _linalg_slogdet _linalg_svd cholesky cholesky_inverse linalg_cholesky_ex linalg_eig"),
    (Across(2), "linalg_householder_product linalg_inv_ex linalg_ldl_factor_ex linalg_lu linalg_lu_factor_ex linalg_matrix_exp"),
    (Across(2), "linalg_qr lu_unpack ormqr linalg_eigvals linalg_ldl_solve"),
    (Across(2, linear="self"), "tril triu"),
]
"""Ops that work across their last dims."""
PATTERNS: Entries = [
    (Pattern("... _ _, ... _ _ -> ... _ _"), "cholesky_solve linalg_solve_triangular"),
    (Pattern("... _ _, ..., ... -> ... _ _"), "linalg_pinv.atol_rtol_tensor"),
    (Pattern("... _ _, ... _ _ -> ... _ _, ... _ _"), "triangular_solve"),
    (Pattern("... _ _, ... _, ... _ _ -> ... _ _"), "linalg_lu_solve"),
    (Pattern("... m _, ... n _ -> ... m n"), "_cdist_forward _euclidean_dist"),
    (Pattern("... m n, ... m _, ... n _, ... m n -> ... m _", linear="grad"), "_cdist_backward"),
    (Pattern("b _ _ _ -> b _ _"), "im2col"),
    (Pattern("b _ _ -> b _ _ _"), "col2im"),
    (Pattern("b c _ _, b h w _ -> b c h w"), "grid_sampler_2d"),
    (Pattern("b c h w, b c _ _, b h w _ -> b c _ _, b h w _", linear="grad_output"), "grid_sampler_2d_backward"),
    (Pattern("b c _ _ _, b x y z _ -> b c x y z"), "grid_sampler_3d"),
    (Pattern("b c x y z, b c _ _ _, b x y z _ -> b c _ _ _, b x y z _", linear="grad_output"), "grid_sampler_3d_backward"),
    (Pattern("... _, ... v, ... _ -> ... v"), "searchsorted.Tensor"),
    (Pattern("..., _ -> ..."), "bucketize.Tensor isin.Tensor_Tensor"),
    (Pattern("... -> ... _", linear="self"), "view_as_real"),
    (Pattern("... _ -> ...", linear="self"), "view_as_complex"),
    (_repeated, "repeat"),
    (_solved, "_linalg_solve_ex"),
]
"""Ops whose tensors have dims of their own."""
ELEMENTWISE = """_prelu_kernel _prelu_kernel_backward complex copy elu_backward hardshrink_backward hardsigmoid_backward hardswish
hardswish_backward hardtanh_backward leaky_relu_backward masked_fill.Tensor polar softplus_backward softshrink_backward"""
"""Element-wise ops that torch does not tag as such."""


def _overload(name: str) -> Callable:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


TABLE = {_overload(name): rule for rule, names in (*ALONG, *LAST, *PATTERNS, (pointwise, ELEMENTWISE)) for name in names.split()}
assert not TABLE.keys() & RULES.keys(), "an op has two rules"
RULES.update(TABLE)
