"""Who asks: API keys, each tenant's token budget, and its fair share of the engines.

Without keys everybody is let in, and the header `x-modeswitch-tenant` only says whose account a request goes to. With
keys the key alone says it, and the header is ignored.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from app.config import AuthSettings, ConfigError, TenantLimits
from app.controller.errors import ApiError
from app.routing.fairness import FairShares, Reservation
from app.routing.token_budget import TokenBudget

log = logging.getLogger("ray.serve")
DEFAULT_TENANT = "default"
OTHER_TENANTS = "other"
MAX_TENANTS = 100
"""Names taken from a header; further ones share an account, so that clients cannot grow labels and tables."""
_MAX_NAME_CHARS = 64


class Keys:
    """API keys as SHA-256 digests, each with its tenant. Keys themselves are not kept.

    The variable holds `tenant:key` pairs separated by commas; the file holds a line `tenant:<sha256 of the key>` for
    each key, empty lines and `#` comments aside.
    """

    def __init__(self, digests: Mapping[bytes, str]) -> None:
        self._digests = dict(digests)

    def __len__(self) -> int:
        return len(self._digests)

    @classmethod
    def load(cls, settings: AuthSettings) -> Keys:
        """The configured keys; none where nothing is configured.

        Raises:
            ConfigError: a pair or a line is malformed, or the file cannot be read. A key is never quoted.
        """
        digests: dict[bytes, str] = {}
        for place, pair in enumerate(filter(None, os.environ.get(settings.keys_env, "").split(",")), 1):
            tenant, colon, key = pair.strip().partition(":")
            if not (colon and tenant and key):
                raise ConfigError(f"{settings.keys_env}: pair {place} is not tenant:key")
            digests[_digest(key)] = tenant
        if settings.keys_file is not None:
            digests |= _read_file(settings.keys_file)
        return cls(digests)

    def tenant(self, authorization: str) -> str | None:
        """The tenant of `Bearer <key>`; None for a wrong or missing key. Takes equally long for every key."""
        scheme, _, key = authorization.partition(" ")
        given = _digest(key.strip())
        found = None
        for digest, tenant in self._digests.items():
            if hmac.compare_digest(digest, given):
                found = tenant
        return found if scheme.lower() == "bearer" else None


@dataclass(slots=True)
class Admission:
    """One admitted request's claim on its tenant's budget and share; settle it once."""

    tenant: str
    priority: int
    reserved_tokens: int
    reservation: Reservation
    settled: bool = False


class Tenants:
    """Owns all tenants' budgets and counters."""

    def __init__(self, keys: Keys, limits: Mapping[str, TenantLimits]) -> None:
        self._keys = keys
        self._limits: Mapping[str, TenantLimits] = {}
        self._budgets: dict[str, TokenBudget] = {}
        self._shares = FairShares()
        self._named: set[str] = set()
        self.limit(limits, 0.0)
        if not keys:
            log.warning("API keys are off: everybody who reaches this server may use it")

    @property
    def keyed(self) -> bool:
        """API keys are on."""
        return bool(self._keys)

    def limit(self, limits: Mapping[str, TenantLimits], now_s: float) -> None:
        """New limits; a budget whose figures did not change keeps what was used of it."""
        for tenant, limit in limits.items():
            if limit.tokens_per_s is None:
                self._budgets.pop(tenant, None)
            elif self._limits.get(tenant) != limit:
                burst_tokens = limit.burst_tokens or 60 * limit.tokens_per_s
                self._budgets[tenant] = TokenBudget(limit.tokens_per_s, burst_tokens, now_s)
        for tenant in set(self._budgets) - set(limits):
            del self._budgets[tenant]
        self._limits = dict(limits)

    def who(self, authorization: str, name: str) -> str:
        """The tenant of a request from its headers `authorization` and `x-modeswitch-tenant`.

        Raises:
            ApiError: 401 when keys are on and the key is none of them.
        """
        if self._keys:
            tenant = self._keys.tenant(authorization)
            if tenant is None:
                raise ApiError(
                    401,
                    "an API key is needed: Authorization: Bearer <key>" if not authorization else "wrong API key",
                    code="invalid_api_key",
                    headers={"www-authenticate": "Bearer"},
                )
            return tenant
        name = name.strip()
        if not name or len(name) > _MAX_NAME_CHARS or not name.isprintable():
            return DEFAULT_TENANT
        if name not in self._named and name not in self._limits:
            if len(self._named) >= MAX_TENANTS:
                return OTHER_TENANTS
            self._named.add(name)
        return name

    def admit(self, tenant: str, prompt_tokens: int, output_tokens: int, now_s: float) -> Admission:
        """Reserve a request's tokens and take its place in the order of tenants.

        Raises:
            ApiError: 429 when the tenant's budget has no room, with the time after which it would.
        """
        tokens = prompt_tokens + output_tokens
        if budget := self._budgets.get(tenant):
            wait_s = budget.reserve(tokens, now_s)
            if wait_s > 0:
                raise ApiError(
                    429,
                    f"the token budget of {tenant!r} is used up; this request fits in {wait_s:.0f} s",
                    code="token_budget_exhausted",
                    headers={"retry-after": str(math.ceil(wait_s))},
                )
        limits = self._limits.get(tenant)
        reservation = self._shares.reserve(tenant, prompt_tokens, output_tokens, limits.share if limits else 1.0)
        return Admission(tenant, reservation.priority, tokens, reservation)

    def settle(self, admission: Admission, prompt_tokens: int, output_tokens: int, now_s: float) -> None:
        """Replace what was reserved by what was used; a second call changes nothing."""
        if admission.settled:
            return
        admission.settled = True
        self._shares.settle(admission.reservation, prompt_tokens, output_tokens)
        if budget := self._budgets.get(admission.tenant):
            budget.settle(admission.reserved_tokens, prompt_tokens + output_tokens, now_s)

    def counters(self) -> dict[str, float]:
        """Weighted tokens that each tenant has been charged, relative to its share."""
        return {tenant: round(counter, 1) for tenant, counter in self._shares.counters().items()}


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _read_file(path: Path) -> dict[bytes, str]:
    digests = {}
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the file of API keys cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        if not (line := line.strip()) or line.startswith("#"):
            continue
        tenant, _, digest = line.rpartition(":")
        try:
            raw = bytes.fromhex(digest)
        except ValueError:
            raw = b""
        if not tenant or len(raw) != 32:
            raise ConfigError(f"{path}, line {number}: not tenant:<sha256 of the key in hexadecimal>")
        digests[raw] = tenant.strip()
    return digests
