"""Compile decode: the program of one step of inference, which reads prompts and new tokens alike."""

from dataclasses import replace

from mpar.errors import ConfigError
from mpar.hardware import Hardware
from mpar.kernels import Kernels
from mpar.mesh import Mesh
from mpar.models import CacheSizes, ScoredDecoder, Trainable, with_cache
from mpar.precision import Precision
from mpar.precision import precision as make_precision
from mpar.program import Program
from mpar.program.compile import compile_forward
from mpar.strategy import Strategy, preset

__all__ = ["compile_decode", "compile_scores"]


def compile_decode(
    model: Trainable,
    mesh: Mesh,
    strategy: Strategy | str,
    sizes: CacheSizes,
    *,
    precision: Precision | str | None = None,
    hardware: Hardware | None = None,
    kernels: Kernels | None = None,
    screened: bool = False,
) -> Program:
    """Compile a step that reads tokens of many rows, each after those that the cache holds, and gives logits of the last ones.

    Whether a token is of a prompt or was chosen before makes no difference: a step may read both. `mpar.models.CachedDecoder`
    says what its batch is. The cache is the state of the program, kv heads sharded over tp, pages over cp, layers over pp, groups
    over dp. The other arguments are those of `compile_forward`.

    screened: whether the program has a screen of the output matrix, see `mpar.models.with_cache`.
    Raises ConfigError for a model that has no such cache, or if ranks cannot divide its pages evenly, and what `compile_forward`
    raises.
    """
    precision, strategy = make_precision(precision), preset(strategy) if isinstance(strategy, str) else strategy
    ranks = mesh.axis_size(strategy.compute.get("pages", ()))
    if sizes.num_pages % ranks:
        raise ConfigError(
            f"cannot divide a cache of {sizes.num_pages} pages among {ranks} ranks on {mesh}: each has the same number of whole "
            f"pages.\nUse {-(-sizes.num_pages // ranks) * ranks} pages."
        )
    chain = with_cache(model, sizes, screened=screened)
    chain = replace(chain, dtype=precision.compute_dtype("layers.0.attention.k_DKH", chain.dtype))
    return compile_forward(chain, mesh, strategy, chain.batch_shape, precision=precision, hardware=hardware, kernels=kernels)


def compile_scores(
    chain: ScoredDecoder,
    mesh: Mesh,
    strategy: Strategy | str,
    *,
    precision: Precision | str | None = None,
    kernels: Kernels | None = None,
) -> Program:
    """Compile the log-probabilities of texts, which are computed as wholes. The arguments are those of `compile_forward`."""
    return compile_forward(chain, mesh, strategy, chain.batch_shape, precision=precision, kernels=kernels)
