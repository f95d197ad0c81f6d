# In a vLLM branch: not needed (a test would fail with the exception itself).
"""Why an audit cannot go on, in one line."""

import json

import httpx
import openai

BROKEN_OFF = (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)


class AuditFailed(RuntimeError):
    """The audit cannot go on; the message says why, in one line."""


class FewerLogprobs(AuditFailed):
    """The server gives fewer logprobs a token than were asked for."""


def _reason(body: str) -> str:
    """The message in an error body, or its beginning."""
    try:
        found = json.loads(body)
    except ValueError:
        return body.strip()[:200]
    found = found.get("error", found) if isinstance(found, dict) else found
    found = found.get("message", found) if isinstance(found, dict) else found
    return str(found)


def _status(error: openai.APIStatusError, retries: int) -> str:
    reason = _reason(error.response.text)
    match error.status_code:
        case 401 | 403:
            return f"the server wants another API key (OPENAI_API_KEY): {reason}"
        case 429 | 503:
            return f"the server answered {error.status_code} to {retries + 1} tries: {reason}"
    return f"the server answered {error.status_code}: {reason}"


def failed(error: Exception, url: str, retries: int = 0) -> AuditFailed:
    """Say what went wrong between us and the server at ``url``.

    Args:
        error: what the openai or httpx client raised, or a `TimeoutError`.
        url: the server's address.
        retries: how often a refused request was sent again.

    """
    cause = error.__cause__ or error
    match error:
        case openai.APIStatusError():
            words = _status(error, retries)
        case TimeoutError() | openai.APITimeoutError() | httpx.TimeoutException():
            words = "no whole answer in time (--timeout)"
        case _ if isinstance(cause, BROKEN_OFF):
            words = f"the connection broke off: {cause}"
        case openai.APIConnectionError() | httpx.TransportError() | httpx.InvalidURL():
            words = f"cannot reach {url}: {cause}"
        case openai.APIError():  # an error event within a stream
            words = f"the server broke an answer off: {error.message}"
        case _:
            words = f"the answer could not be read: {error!r}"
    return AuditFailed(" ".join(words.split()))
