"""Kept checks: what the self-check has found of a config, for all processes of this user that import a model of it.

A finding counts only for the same config, the same source of mpar and the same versions of torch and transformers, and if nobody
but this user could have written it. Refusals are not kept: whoever tries again may have repaired what they name.
"""

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass

from mpar import plain
from mpar.code_facts import code_facts
from mpar.errors import ConfigError, PlainDataError
from mpar.kept_files import KeptFiles, NotUsableError
from mpar.models.traced._self_check import check_traced
from mpar.models.traced._traits import Traits
from mpar.user_cache import user_cache

__all__ = ["kept_check"]

_SUFFIX = ".check"
_MOST_ENTRIES, _MOST_BYTES = 256, 2**20
_PACKAGES = ("transformers", "numpy")
"""Besides torch and mpar, those of which the finding depends."""


@dataclass(frozen=True)
class _Entry:
    """key: of what was checked, so that an entry under another name is found out."""

    key: str
    traits: Traits


def kept_check(config_json: str) -> Traits:
    """What `check_traced` finds, from the folder of this user's caches if it was found before; else it is kept there.

    A finding that cannot be read or written is no error: then the model is checked in this process.
    """
    facts = [json.loads(config_json), *code_facts(_PACKAGES)]
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    try:
        kept = KeptFiles(user_cache() / "checks", _SUFFIX, _MOST_ENTRIES, _MOST_BYTES)
    except ConfigError:  # this user has no folder for caches
        return check_traced(config_json)
    with suppress(OSError, NotUsableError, PlainDataError):
        entry = plain.from_text(_Entry, kept.read(key))
        if entry.key == key:
            return entry.traits
    traits = check_traced(config_json)
    with suppress(OSError, NotUsableError):
        kept.write(key, plain.to_text(_Entry, _Entry(key, traits)))
    return traits
