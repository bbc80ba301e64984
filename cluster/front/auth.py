"""API keys, for both faces."""

import hmac
from collections.abc import Sequence

from paceline.cluster.front.errors import PermissionDenied, Unauthenticated


class ApiKeys:
    """Users' keys and operators' keys. Without any key everything is open; an operator's key
    opens everything; operators' calls take a user's key only where no operator's is configured."""

    def __init__(self, user_keys: Sequence[str] = (), admin_keys: Sequence[str] = ()) -> None:
        self._user_keys = tuple(user_keys)
        self._admin_keys = tuple(admin_keys)

    def check(self, authorization: str, *, is_admin: bool = False) -> None:
        """`authorization`: the header's value. Raises: Unauthenticated, PermissionDenied."""
        needs_key = bool(self._user_keys) or (is_admin and bool(self._admin_keys))
        if not needs_key:
            return
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthenticated("no API key; send 'authorization: Bearer <key>'")
        key = key.strip()
        if _is_among(key, self._admin_keys):
            return
        if not _is_among(key, self._user_keys):
            raise Unauthenticated("unknown API key; send one that the server was started with")
        if is_admin and self._admin_keys:
            raise PermissionDenied("this call needs an operator's key, and this is a user's")


def _is_among(key: str, known: Sequence[str]) -> bool:
    """Compares with all of them in constant time, so that timing tells nothing."""
    matches = [hmac.compare_digest(key.encode(), other.encode()) for other in known]
    return any(matches)
