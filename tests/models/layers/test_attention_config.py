"""AttentionConfig: what cannot be is refused where it is made."""

import pytest

from mpar.errors import ConfigError
from mpar.models.layers import AttentionConfig


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"qk_norm": "dog"}, "qk_norm='dog': must be 'head', 'width' or None"),
        ({"num_kv_heads": 3}, "num_heads=4, num_kv_heads=3, head_size=8: .* must divide num_heads"),
        ({"head_size": 0}, "head_size=0: must be positive"),
    ],
)
def test_what_cannot_be_is_refused(changes, words):
    """Norms that there are not, and heads that do not share keys evenly."""
    with pytest.raises(ConfigError, match=words):
        AttentionConfig(**{"num_heads": 4, "num_kv_heads": 2, "head_size": 8, **changes})
