"""Primitives: the ops that have rules of their own for shapes, derivative, sharding, batching and cost; one file each."""

from mpar.ops._adamw import adamw, adamw_many
from mpar.ops._add_layer_norm import add_layer_norm
from mpar.ops._add_rms_norm import add_rms_norm
from mpar.ops._constrain import Marks, constrain, decode_axes, marking, name
from mpar.ops._cross_entropy import cross_entropy, token_losses
from mpar.ops._eigenbasis import eigenbasis
from mpar.ops._einsum import einsum
from mpar.ops._embedding import embedding
from mpar.ops._few_rows import FEW_ROWS_OPS, few_rows_read_columns
from mpar.ops._geglu import geglu
from mpar.ops._int8 import Int8, dequantise_int8, quantise_int8
from mpar.ops._joined_linear import (
    joined_linear,
    joined_product,
    lay_by_columns,
    lay_side_by_side,
    lie_side_by_side,
    summed_dims,
)
from mpar.ops._largest_logits import MAX_SCREENED_ROWS, Screen, fill_screen, largest_logits, screens_logits
from mpar.ops._layer_norm import layer_norm
from mpar.ops._linear_cross_entropy import linear_cross_entropy, linear_token_losses
from mpar.ops._linear_divergence import linear_divergence
from mpar.ops._matmul import MATMUL_OPS, matmul_is_faster
from mpar.ops._mlp_tiled import Activation, mlp_tiled
from mpar.ops._newton_schulz import newton_schulz
from mpar.ops._nf4 import NF4_BLOCK, NF4_CODES, Nf4, dequantise_nf4, nf4_scale_codes, nf4_shapes, quantise_nf4
from mpar.ops._overwrite import overwrite
from mpar.ops._packed_matrix import PackedMatrix, pack_matrices, pack_matrix
from mpar.ops._quantise_fp8 import (
    FP8_MAX,
    FP8_SIDE,
    FP8_SMALLEST_SCALE,
    dequantise_fp8,
    fp8_matmul,
    fp8_scale_shape,
    quantise_fp8,
    quantise_fp8_both,
)
from mpar.ops._random import Key, dropout, fold_in, fold_key, random_normal, random_quads, random_uniform
from mpar.ops._rms_norm import rms_norm
from mpar.ops._rope import rope, rope_many
from mpar.ops._row_max import row_max
from mpar.ops._sgd import sgd, sgd_many
from mpar.ops._stand_in import StandIn, of_rows
from mpar.ops._sum_squares import sum_squares
from mpar.ops._swiglu import swiglu
from mpar.ops._token_dropout import token_dropout
from mpar.ops._widen import widen
from mpar.ops.experts import (
    ROUTER_TINY,
    RouterOrder,
    RouterScore,
    combine,
    dispatch,
    expert_counts,
    expert_order,
    expert_slots,
    fill_slots,
    group_counts,
    group_sizes,
    grouped_matmul,
    limit_capacity,
    permute,
    sinkhorn,
    take_slots,
    topk_router,
    unpermute,
)
from mpar.ops.primitive import (
    PRIMITIVES,
    Cost,
    Factors,
    Operand,
    Primitive,
    ShardingRule,
    Static,
    declare_sharding,
    declared_rule,
    parse_sharding,
    primitive_of,
)
from mpar.ops.sequence import (
    KeyPart,
    attention,
    attention_parts,
    causal_conv1d,
    conv_by_rows,
    merge_attention,
    paged_attention,
    scan_by_rows,
    ssd_scan,
    write_rows,
)

OPAQUE_OPS = {**FEW_ROWS_OPS, **MATMUL_OPS}
"""What stays one op in traces of references, and its function."""

__all__ = [
    "FP8_MAX",
    "FP8_SIDE",
    "FP8_SMALLEST_SCALE",
    "MAX_SCREENED_ROWS",
    "NF4_BLOCK",
    "NF4_CODES",
    "OPAQUE_OPS",
    "PRIMITIVES",
    "ROUTER_TINY",
    "Activation",
    "Cost",
    "Factors",
    "Int8",
    "Key",
    "KeyPart",
    "Marks",
    "Nf4",
    "Operand",
    "PackedMatrix",
    "Primitive",
    "RouterOrder",
    "RouterScore",
    "Screen",
    "ShardingRule",
    "StandIn",
    "Static",
    "adamw",
    "adamw_many",
    "add_layer_norm",
    "add_rms_norm",
    "attention",
    "attention_parts",
    "causal_conv1d",
    "combine",
    "constrain",
    "conv_by_rows",
    "cross_entropy",
    "declare_sharding",
    "declared_rule",
    "decode_axes",
    "dequantise_fp8",
    "dequantise_int8",
    "dequantise_nf4",
    "dispatch",
    "dropout",
    "eigenbasis",
    "einsum",
    "embedding",
    "expert_counts",
    "expert_order",
    "expert_slots",
    "few_rows_read_columns",
    "fill_screen",
    "fill_slots",
    "fold_in",
    "fold_key",
    "fp8_matmul",
    "fp8_scale_shape",
    "geglu",
    "group_counts",
    "group_sizes",
    "grouped_matmul",
    "joined_linear",
    "joined_product",
    "largest_logits",
    "lay_by_columns",
    "lay_side_by_side",
    "layer_norm",
    "lie_side_by_side",
    "limit_capacity",
    "linear_cross_entropy",
    "linear_divergence",
    "linear_token_losses",
    "marking",
    "matmul_is_faster",
    "merge_attention",
    "mlp_tiled",
    "name",
    "newton_schulz",
    "nf4_scale_codes",
    "nf4_shapes",
    "of_rows",
    "overwrite",
    "pack_matrices",
    "pack_matrix",
    "paged_attention",
    "parse_sharding",
    "permute",
    "primitive_of",
    "quantise_fp8",
    "quantise_fp8_both",
    "quantise_int8",
    "quantise_nf4",
    "random_normal",
    "random_quads",
    "random_uniform",
    "rms_norm",
    "rope",
    "rope_many",
    "row_max",
    "scan_by_rows",
    "screens_logits",
    "sgd",
    "sgd_many",
    "sinkhorn",
    "ssd_scan",
    "sum_squares",
    "summed_dims",
    "swiglu",
    "take_slots",
    "token_dropout",
    "token_losses",
    "topk_router",
    "unpermute",
    "widen",
    "write_rows",
]
