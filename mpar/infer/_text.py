"""Text: the text of an answer while its tokens come one by one. It never ends inside a character or inside a stop text."""

from collections.abc import Callable, Sequence

__all__ = ["TextStream", "num_overlapping"]

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_HELD_BYTES = 3  # the most bytes, and so tokens, of a character whose last byte is missing
_CONTEXT = 4  # tokens that are decoded again with the next one, because decoders treat the first token of a text in their own way
_WINDOW = 16  # the number of tokens from which on earlier ones are not decoded again


class TextStream:
    """The text of the tokens that are pushed, as far as it is certain.

    decode: gives the text of tokens.
    stop:   texts that end the answer, which does not contain them.
    before: the tokens before the answer, on which the text of its first token may depend.
    ends_after: stop texts that are complete before so many tokens do not end the answer.

    text:       what is certain so far. stopped_by: the text that ended it; nothing comes after it.

    All texts together are what `decode` gives for all tokens. (Decoders that write each byte of a broken character as U+FFFD may
    take back a character when the next byte does not fit; that is too late here.)
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop: Sequence[str] = (),
        before: Sequence[int] = (),
        ends_after: int = 0,
    ) -> None:
        self._decode, self._stop, self._ends_after = decode, tuple(stop), ends_after
        self._num_pushed = 0
        self._tokens: list[int] = []  # those that are decoded again with the next one
        self._num_given = 0  # characters of their text that were given out
        self._keep_context(before)
        self._num_unfinished = 0  # how many tokens in a row ended inside a character, as far as can be told
        self._held = ""  # decoded, but it may be the beginning of a stop text
        self.text = ""
        self.stopped_by: str | None = None

    def push(self, token: int) -> str:
        """Take the next token; returns the text that has become certain."""
        if self.stopped_by is not None:
            return ""
        self._tokens.append(token)
        self._num_pushed += 1
        return self._give(self._new_text(at_end=False), at_end=False)

    def finish(self) -> str:
        """There are no more tokens; returns the text that was held back."""
        return "" if self.stopped_by is not None else self._give(self._new_text(at_end=True), at_end=True)

    def _new_text(self, *, at_end: bool) -> str:
        """The text that was not given out yet, without what may be a part of a character."""
        text = self._decode(self._tokens) if self._tokens else ""
        finished = text.rstrip(_UNFINISHED)
        self._num_unfinished = 0 if len(finished) == len(text) else self._num_unfinished + 1
        if at_end or not self._num_unfinished:
            certain = len(text)
        elif self._num_unfinished <= _HELD_BYTES:  # one decoder shows all bytes of an unfinished word as U+FFFD
            certain = 0
        else:  # no character has so many bytes: these never become one
            certain = max(len(finished), len(text) - _HELD_BYTES)
        new, self._num_given = text[self._num_given : certain], max(self._num_given, certain)
        if len(self._tokens) >= _WINDOW and certain == len(text):
            self._keep_context(self._tokens)
        return new

    def _keep_context(self, tokens: Sequence[int]) -> None:
        """Decode only the last of these tokens again with the next one, but enough of them that they have a text."""
        count = _CONTEXT
        while not (text := self._decode(tokens[-count:]) if tokens else "") and count < len(tokens):
            count *= 2
        self._tokens, self._num_given = list(tokens[-count:]), len(text)

    def _give(self, new: str, *, at_end: bool) -> str:
        """Give out what is held and new, up to a stop text, or up to where one may begin."""
        text = self._held + new
        stops = self._stop if self._num_pushed >= self._ends_after else ()
        found = [(text.index(stop), -len(stop), stop) for stop in stops if stop in text]
        if found:
            index, _, self.stopped_by = min(found)
            certain, self._held = text[:index], ""
        else:
            keep = 0 if at_end else max((num_overlapping(text, stop) for stop in stops), default=0)
            certain, self._held = text[: len(text) - keep], text[len(text) - keep :]
        self.text += certain
        return certain


def num_overlapping(text: str, stop: str) -> int:
    """The length of the longest end of `text` with which `stop` begins; it is less than all of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
