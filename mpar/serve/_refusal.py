"""Refusal: an answer with an HTTP status of 400 or more, in the shape that OpenAI's clients read."""

from mpar.errors import MparError

__all__ = ["Refusal"]

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}


class Refusal(MparError):
    """A request that is not answered. `param`: the field that is wrong; `retry_after_s`: when it may be tried again."""

    def __init__(self, status: int, message: str, param: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.retry_after_s = status, param, retry_after_s

    @property
    def body(self) -> dict[str, object]:
        """The JSON object that says what is wrong."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": str(self.status)}}

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers of the answer."""
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
