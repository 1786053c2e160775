"""Adds settled windows up to the rows that one flush writes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from app.energy.activity import Labels
from app.energy.attribution import APPROXIMATE, Credit, Settlement
from app.energy.rows import CreditRow, IntervalRow, RequestCreditRow
from app.energy.samplers.base import MeterInfo
from app.energy.track import Track


class Rows(NamedTuple):
    """What one flush adds to the ledger."""

    intervals: list[IntervalRow]
    credits: list[CreditRow]
    requests: list[RequestCreditRow]


@dataclass(slots=True)
class _Account:
    info: MeterInfo
    start_s: float
    end_s: float
    end_counter_j: float
    measured_j: float = 0.0
    idle_j: float | None = None
    credited_j: float = 0.0
    residual_j: float = 0.0
    approximate_j: float = 0.0


@dataclass(slots=True)
class _Sums:
    energy_j: float = 0.0
    approximate_j: float = 0.0
    idle_share_j: float = 0.0
    prefill_tokens: float = 0.0
    decode_tokens: float = 0.0

    def add(self, credit: Credit, approximate: bool) -> None:
        self.energy_j += credit.energy_j
        self.approximate_j += credit.energy_j if approximate else 0.0
        self.prefill_tokens += credit.prefill_tokens
        self.decode_tokens += credit.decode_tokens


@dataclass(slots=True)
class Accounts:
    """Sums since the last flush, in the host's monotonic seconds."""

    _devices: dict[str, _Account] = field(default_factory=dict)
    _groups: dict[tuple[str, str, Labels | None], _Sums] = field(default_factory=lambda: defaultdict(_Sums))
    _requests: dict[tuple[str, str, str], _Sums] = field(default_factory=lambda: defaultdict(_Sums))
    _infos: dict[str, MeterInfo] = field(default_factory=dict)

    def add(
        self,
        info: MeterInfo,
        settlement: Settlement,
        labels: Mapping[str, Labels],
        idle_shares: Mapping[str, float],
    ) -> None:
        """Book one window of one device."""
        window = settlement.window
        account = self._devices.setdefault(info.device, _Account(info, window.start_s, window.end_s, 0.0))
        self._infos[info.device] = info
        account.end_s, account.end_counter_j = window.end_s, window.end_energy_j
        account.measured_j += window.measured_j
        if settlement.idle_j is not None:
            account.idle_j = (account.idle_j or 0.0) + settlement.idle_j
        account.residual_j += settlement.residual_j
        approximate = settlement.basis in APPROXIMATE
        for credit in settlement.credits:
            account.credited_j += credit.energy_j
            label = labels.get(credit.request_id) if credit.request_id is not None else None
            self._groups[info.device, credit.engine, label].add(credit, approximate)
            if credit.request_id is not None:
                self._requests[credit.request_id, info.device, credit.engine].add(credit, approximate)
        if approximate:
            account.approximate_j += settlement.credited_j
        for engine, share_j in idle_shares.items():
            self._groups[info.device, engine, None].idle_share_j += share_j

    def pending(self, request_id: str) -> list[RequestCreditRow]:
        """What a request used since the last flush."""
        return [
            self._request_row(key, sums, 0.0, final=False)
            for key, sums in self._requests.items()
            if key[0] == request_id
        ]

    def take(
        self,
        wall_offset_s: float,
        final: set[str],
        tracks: Mapping[str, Track],
        boot: str,
    ) -> Rows:
        """The rows so far; the sums begin anew. `final` are requests that will get no more joules.

        `tracks` are the devices'. An interval's `unmeasured_s` is the track's sum since it began.
        """
        intervals = [
            IntervalRow(
                start_s=account.start_s + wall_offset_s,
                end_s=account.end_s + wall_offset_s,
                device=device,
                method=account.info.method.value,
                scope=account.info.scope,
                measured_j=account.measured_j,
                idle_j=account.idle_j,
                credited_j=account.credited_j,
                residual_j=account.residual_j,
                approximate_j=account.approximate_j,
                unmeasured_s=tracks[device].unmeasured_s,
                idle_w=tracks[device].baseline.idle_w,
                boot=boot,
                end_monotonic_s=account.end_s,
                end_counter_j=account.end_counter_j if account.info.absolute else None,
            )
            for device, account in self._devices.items()
        ]
        ends_s = {device: account.end_s + wall_offset_s for device, account in self._devices.items()}
        credits = [
            CreditRow(
                end_s=ends_s[device],
                device=device,
                engine=engine,
                mode=label.mode if label else None,
                tenant=label.tenant if label else None,
                request_class=label.request_class if label else None,
                energy_j=sums.energy_j,
                idle_share_j=sums.idle_share_j,
                prefill_tokens=sums.prefill_tokens,
                decode_tokens=sums.decode_tokens,
            )
            for (device, engine, label), sums in self._groups.items()
        ]
        requests = [
            self._request_row(key, sums, ends_s[key[1]], final=key[0] in final) for key, sums in self._requests.items()
        ]
        self._devices, self._groups, self._requests = {}, defaultdict(_Sums), defaultdict(_Sums)
        return Rows(intervals, credits, requests)

    def _request_row(self, key: tuple[str, str, str], sums: _Sums, end_s: float, final: bool) -> RequestCreditRow:
        request_id, device, engine = key
        info = self._infos[device]
        return RequestCreditRow(
            request_id=request_id,
            end_s=end_s,
            engine=engine,
            method=info.method.value,
            scope=info.scope,
            energy_j=sums.energy_j,
            approximate_j=sums.approximate_j,
            prefill_tokens=sums.prefill_tokens,
            decode_tokens=sums.decode_tokens,
            final=final,
        )
