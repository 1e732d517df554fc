"""What else has to be told of the CPU if ATen is held below it by ATEN_CPU_CAPABILITY."""

import tempfile

__all__ = ["cpu_variables"]


def cpu_variables(capability: str | None) -> dict[str, str]:
    """Variables of the environment beside ATEN_CPU_CAPABILITY; none if that is not set.

    Inductor keeps code that it compiled, and would load it for another capability: each has a cache of its own. Torch packs
    bfloat16 as oneDNN finds the CPU, and refuses then what ATen was told not to use: oneDNN is held as well.
    """
    if capability is None:
        return {}
    variables = {"TORCHINDUCTOR_CACHE_DIR": f"{tempfile.gettempdir()}/torchinductor_{capability}"}
    return variables if capability == "avx512" else variables | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
