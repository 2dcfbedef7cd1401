"""Whose requests a server answers, and the status of an answer for an error of ours.

A recorder answers its user's programs, and no web page that the user opens.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping

from trinity_buffer import errors

LOCAL = ("127.0.0.1", "localhost", "::1")
"""Names of this machine: a server without a token answers under no other."""

STATUS: dict[type[errors.TrinityBufferError], int] = {
    errors.UnknownNameError: 404,
    errors.UnknownExperimentError: 404,
    errors.InvalidArgumentError: 400,
    errors.ConflictError: 409,
    errors.InferenceServerError: 502,
    errors.StoreError: 503,
}
"""A subclass has the status of the first base that is here."""

_HOST = re.compile(r"\[?([^\[\]]*?)\]?(:\d+)?")


def status_of(error: Exception) -> int:
    """Return the status of an answer for an error."""
    return next((code for kind, code in STATUS.items() if isinstance(error, kind)), 500)


def refusal(method: str, headers: Mapping[str, str], token: str | None) -> tuple[int, str] | None:
    """Return status and reason if a request is not answered.

    A page of any origin can make a browser send a POST, though it cannot read the answer: then the
    browser names the page's origin, and a content type other than JSON. Where a name of the page's
    own leads to this machine, the page can read the answer too, and the browser names that host.
    """
    host = headers.get("host", "")
    name = _HOST.fullmatch(host)
    if token is None and (name is None or name[1].lower() not in LOCAL):
        return 421, f"ask for 127.0.0.1, not {host!r:.80}, or start the recorder with --token"
    # A GET changes nothing, and its answer is hidden from foreign pages by the browser.
    if method == "POST":
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            return 403, f"pages of {origin!r:.80} may not ask this recorder"
        kind = headers.get("content-type")
        if kind is not None and kind.partition(";")[0].strip().lower() != "application/json":
            return 415, (
                f"the content type is {kind!r:.80}: send JSON as application/json (with curl: "
                "-H 'content-type: application/json')"
            )
    brought = headers.get("authorization", "").removeprefix("Bearer ")
    if token is None or hmac.compare_digest(brought.encode(), token.encode()):
        return None
    return 401, "this recorder wants its token as the API key"
