"""Primitives: every op that has rules of its own, one file each."""

from mpar.ops._adamw import adamw, adamw_many
from mpar.ops._attention import attention
from mpar.ops._constrain import constrain, name
from mpar.ops._cross_entropy import cross_entropy
from mpar.ops._einsum import einsum
from mpar.ops._embedding import embedding
from mpar.ops._geglu import geglu
from mpar.ops._layer_norm import layer_norm
from mpar.ops._linear_cross_entropy import linear_cross_entropy
from mpar.ops._primitive import PRIMITIVES
from mpar.ops._random import Key, dropout, fold_in, fold_key, random_normal, random_uniform
from mpar.ops._rms_norm import rms_norm
from mpar.ops._rope import rope
from mpar.ops._sgd import sgd, sgd_many
from mpar.ops._sum_squares import sum_squares
from mpar.ops._swiglu import swiglu
from mpar.ops._widen import widen

__all__ = [
    "PRIMITIVES",
    "Key",
    "adamw",
    "adamw_many",
    "attention",
    "constrain",
    "cross_entropy",
    "dropout",
    "einsum",
    "embedding",
    "fold_in",
    "fold_key",
    "geglu",
    "layer_norm",
    "linear_cross_entropy",
    "name",
    "random_normal",
    "random_uniform",
    "rms_norm",
    "rope",
    "sgd",
    "sgd_many",
    "sum_squares",
    "swiglu",
    "widen",
]
