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
from collections.abc import Collection, Mapping
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
"""Names remembered that were taken from a header. A further one takes the place of the one not seen for longest, or
shares an account while all of them have requests under way: so that clients cannot grow tables."""
_MAX_NAME_CHARS = 64


class Keys:
    """API keys as SHA-256 digests, each with its tenant. Keys themselves are not kept.

    The variable holds `tenant:key` pairs separated by commas; the file holds a line `tenant:<sha256 of the key>` for
    each key, empty lines and `#` comments aside.
    """

    def __init__(self, digests: Mapping[bytes, str]) -> None:
        self._digests = dict(digests)
        self.tenants = frozenset(self._digests.values())
        """Everybody who has a key."""

    def __len__(self) -> int:
        return len(self._digests)

    @classmethod
    def load(cls, settings: AuthSettings) -> Keys:
        """The configured keys; none where nothing is configured: the variable is not set or empty, and no file named.

        Raises:
            ConfigError: a pair or a line is malformed, the file cannot be read, two tenants have the same key, or there
                is no key in what is configured. A key is never quoted.
        """
        digests: dict[bytes, str] = {}
        variable = os.environ.get(settings.keys_env, "")
        for place, pair in enumerate(filter(None, variable.split(",")), 1):
            tenant, colon, key = pair.strip().partition(":")
            if not (colon and tenant and key):
                raise ConfigError(f"{settings.keys_env}: pair {place} is not tenant:key")
            _add(digests, _digest(key), tenant)
        if settings.keys_file is not None:
            for digest, tenant in _read_file(settings.keys_file).items():
                _add(digests, digest, tenant)
        if not digests and (variable or settings.keys_file is not None):
            # Who configures keys wants a closed server; without keys it would be open to everybody, `/admin` as well.
            places = [settings.keys_env] if variable else []
            places += [] if settings.keys_file is None else [str(settings.keys_file)]
            raise ConfigError(
                f"API keys are configured, but {' and '.join(places)} held none: add one, or configure none to let "
                "everybody in"
            )
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
    budget: TokenBudget | None
    """What they were taken from. A budget that took its place meanwhile owes this request nothing."""
    reservation: Reservation
    settled: bool = False


class Tenants:
    """Owns all tenants' budgets and counters."""

    def __init__(self, keys: Keys, limits: Mapping[str, TenantLimits], admins: Collection[str] = ()) -> None:
        self._keys = keys
        self._admins = frozenset(admins)
        self._limits: Mapping[str, TenantLimits] = {}
        self._budgets: dict[str, TokenBudget] = {}
        self._shares = FairShares()
        self._named: dict[str, None] = {}
        """Names taken from a header, the one seen last at the end."""
        self.limit(limits, 0.0)
        if not keys:
            log.warning("API keys are off: everybody who reaches this server may use it")

    @property
    def keyed(self) -> bool:
        """API keys are on."""
        return bool(self._keys)

    @property
    def several(self) -> bool:
        """There is more than one tenant, so that one must leave room for others."""
        return len(self._keys.tenants if self._keys else self._shares) > 1

    def share(self, tenant: str) -> float:
        """A tenant's weight against others."""
        limits = self._limits.get(tenant)
        return limits.share if limits else 1.0

    def limit(self, limits: Mapping[str, TenantLimits], now_s: float) -> None:
        """New limits; a budget whose figures did not change keeps what was used of it."""
        for tenant, limit in limits.items():
            if limit.tokens_per_s is None:
                self._budgets.pop(tenant, None)
            else:
                burst_tokens = limit.burst_tokens or 60 * limit.tokens_per_s
                budget = self._budgets.get(tenant)
                if budget is None or (budget.tokens_per_s, budget.burst_tokens) != (limit.tokens_per_s, burst_tokens):
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
        return name if name in self._limits or self._remember(name) else OTHER_TENANTS

    def _remember(self, name: str) -> bool:
        """Note that a name was seen; False for a new one that there is no room for."""
        if name in self._named:
            del self._named[name]
        elif len(self._named) >= MAX_TENANTS:
            idle = next((old for old in self._named if self._shares.forget(old)), None)
            if idle is None:
                return False
            del self._named[idle]
        self._named[name] = None
        return True

    def only_of(self, authorization: str) -> str | None:
        """The one tenant whose figures a caller may see; None, those of all: an admin's key, or no keys at all.

        Raises:
            ApiError: 401 as `who` does.
        """
        tenant = self.who(authorization, "")
        return tenant if self._keys and tenant not in self._admins else None

    def admit(self, tenant: str, prompt_tokens: int, output_tokens: int, now_s: float) -> Admission:
        """Reserve a request's tokens and take its place in the order of tenants.

        Raises:
            ApiError: 429 when the tenant's budget has no room, with the time after which it would.
        """
        tokens = prompt_tokens + output_tokens
        budget = self._budgets.get(tenant)
        if budget is not None:
            wait_s = budget.reserve(tokens, now_s)
            if wait_s > 0:
                raise ApiError(
                    429,
                    f"the token budget of {tenant!r} is used up; this request fits in {wait_s:.0f} s",
                    code="token_budget_exhausted",
                    headers={"retry-after": str(math.ceil(wait_s))},
                )
        reservation = self._shares.reserve(tenant, prompt_tokens, output_tokens, self.share(tenant))
        return Admission(tenant, reservation.priority, tokens, budget, reservation)

    def settle(self, admission: Admission, prompt_tokens: int, output_tokens: int, now_s: float) -> None:
        """Replace what was reserved by what was used; a second call changes nothing."""
        if admission.settled:
            return
        admission.settled = True
        self._shares.settle(admission.reservation, prompt_tokens, output_tokens)
        if admission.budget is not None:
            admission.budget.settle(admission.reserved_tokens, prompt_tokens + output_tokens, now_s)

    def counters(self, only_of: str | None = None) -> dict[str, float]:
        """Weighted tokens that each tenant has been charged, relative to its share."""
        counters = self._shares.counters().items()
        return {tenant: round(counter, 1) for tenant, counter in counters if only_of in (None, tenant)}


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _read_file(path: Path) -> dict[bytes, str]:
    digests: dict[bytes, str] = {}
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
        _add(digests, raw, tenant.strip())
    return digests


def _add(digests: dict[bytes, str], digest: bytes, tenant: str) -> None:
    other = digests.setdefault(digest, tenant)
    if other != tenant:
        raise ConfigError(f"the tenants {other!r} and {tenant!r} have the same API key")
