"""The wish to stop: any rank may have it, because of a signal or because its time is over; all ranks stop after the same step."""

import time
from collections.abc import Callable

from mpar.exit_codes import TIME_OVER
from mpar.train._place import Phase
from mpar.train._watch import Watch

__all__ = ["Stop"]

_EVERY_S = 1.0  # about how often ranks ask each other: so rarely that it costs nothing, so often that nobody notices


class Stop:
    """The wish of this rank to stop, and what all ranks have agreed on.

    code: the exit code that the wish asks for (`mpar.exit_codes`); 0 without a wish.
    """

    def __init__(self, agree: Callable[[list[float]], list[float]], deadline: float | None = None) -> None:
        """agree: called by all ranks together, gives each the highest of all ranks' values, one by one.
        deadline: the time, in seconds since the epoch, at which this rank wishes to stop; None: never.
        """
        self._agree, self._deadline = agree, deadline
        self.code = 0
        self._next = 0  # the step after which the ranks ask each other again
        self._asked: tuple[int, float] | None = None  # the step after which they last asked, and when that was

    def wish(self, code: int) -> None:
        """Note the wish to stop. The first one counts. A signal handler may call this."""
        self.code = self.code or code

    def is_agreed(self, step: int, watch: Watch) -> bool:
        """Whether all ranks stop after `step`; `code` is then the same on all of them. All ranks must ask after every step.

        Ranks ask each other about once a second: at each question they count, from the time that the slowest of them took for a
        step, how many steps to go until the next one.
        """
        if step < self._next:
            return False
        if self._deadline is not None and time.time() >= self._deadline:
            self.wish(TIME_OVER)
        first, began = self._asked or (step - 1, time.monotonic() - _EVERY_S)
        watch.enter(Phase.MEET)
        code, step_s = self._agree([float(self.code), (time.monotonic() - began) / (step - first)])
        watch.between_steps(step)
        self._next = step + max(1, min(int(_EVERY_S / step_s), 4 * (step - first)))
        self._asked = step, time.monotonic()
        self.code = int(code) or self.code
        return code > 0
