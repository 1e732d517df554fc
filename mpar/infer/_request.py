"""Request: a prompt, its answer so far, and where the cache has its keys and values."""

from dataclasses import dataclass, field
from typing import Literal

from mpar.errors import NumericsError
from mpar.infer._choose import Chosen
from mpar.infer._sampling import Sampling

__all__ = ["Finish", "Request"]

Finish = Literal["stop", "length", "cancelled", "error"]
"""Why an answer ended: by a token or text that ends answers; because no more tokens were wanted, or fit; because whoever asked
left; because it could not be made."""


@dataclass(eq=False)
class Request:
    """A prompt, its answer so far, and where the cache has its keys and values.

    choice:       which of several answers to the same prompt it is.
    adapter:      the number of the adapter with which it is answered, from 1 on; 0: none.
    chosen:       the tokens of the answer, with their log-probabilities if these were asked for.
    finish:       why the answer ended; None: it has not ended.
    row:          the row of the step's tables that it occupies; -1: it waits.
    num_cached:   of how many tokens the cache has keys and values.
    num_shared:   of how many tokens of the prompt the cache had them when the request was first admitted.
    pages:        the pages of the cache that hold them, in order. chain: for each full page, the number of its content.
    """

    prompt: list[int]
    sampling: Sampling
    choice: int = 0
    adapter: int = 0
    chosen: list[Chosen] = field(default_factory=list)
    finish: Finish | None = None
    row: int = -1
    num_cached: int = 0
    num_shared: int | None = None
    pages: list[int] = field(default_factory=list)
    chain: list[int] = field(default_factory=list)
    tokens: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def answer(self) -> list[int]:
        """The tokens of the answer so far."""
        return self.tokens[len(self.prompt) :]

    @property
    def num_missing(self) -> int:
        """How many tokens must still be read before the next one can be chosen."""
        return len(self.tokens) - self.num_cached

    def check(self) -> None:
        """Raise NumericsError if the answer could not be made."""
        if self.finish == "error":
            raise NumericsError(
                f"cannot choose the next token: the logits behind {len(self.tokens)} tokens are no finite numbers. Look for "
                "NaN in the weights, or compute in a wider dtype."
            )

    def append(self, chosen: Chosen) -> None:
        """Add a token to the answer."""
        self.chosen.append(chosen)
        self.tokens.append(chosen.token)
