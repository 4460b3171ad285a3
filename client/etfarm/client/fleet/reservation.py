"""`AsyncReservation`: devices that are reserved inside of a block, and renewed until its end."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Final, Self

from etfarm.client.errors import EtfarmError
from etfarm.client.models import ReservationInfo
from etfarm.client.transport.decode import decoded
from etfarm.v1 import device_pb2
from etfarm.wire.errors import error_for

if TYPE_CHECKING:
    from etfarm.client.transport.stubs import Stubs

RENEWALS: Final = 3
"""Number of renewals within the duration of a reservation: two may be late."""

_RETRY_S: Final = 1.0
"""Pause before a failed renewal is repeated."""

_RELEASE_S: Final = 10.0
"""Maximum time for the release at the end; without it, the reservation expires."""

_ENDED: Final = ("RESERVATION_ENDED", "RESERVATION_NOT_FOUND")


class AsyncReservation:
    """Devices that are reserved for the jobs and sessions which name the reservation.

    Use it with `async with`. It is renewed until the block ends, and then released; if this process ends without that, the
    reservation expires by itself.
    """

    def __init__(
        self,
        stubs: Callable[[], Stubs],
        request: device_pb2.ReserveDeviceRequest,
        on_end: Callable[[EtfarmError], None] | None = None,
    ) -> None:
        """Prepare a reservation; `AsyncFarm.reserve` creates instances.

        Args:
            stubs: returns the farm's services.
            on_end: called with the reason if the reservation ends before the block.
        """
        self._stubs = stubs
        self._request = request
        self._on_end = on_end
        self._info: ReservationInfo | None = None
        self._ended: EtfarmError | None = None
        self._renewing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Reserve the devices.

        Raises:
            EtfarmError: as DeviceService.Reserve: DEVICES_UNAVAILABLE, NO_SUCH_DEVICE, BAD_RESERVATION, QUOTA_EXCEEDED.
        """
        self._request.request_id = str(uuid.uuid4())
        self._ended = None
        self._info = decoded(ReservationInfo, await self._stubs().devices.Reserve(self._request))
        self._renewing = asyncio.create_task(self._renew(), name=f"reservation {self._info.id}")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Release the devices. What runs on them continues; what waits for them fails."""
        renewing, self._renewing = self._renewing, None
        if renewing is None:
            return
        renewing.cancel()
        await asyncio.wait({renewing})
        if self._ended is None:
            request = device_pb2.ReleaseReservationRequest(reservation_id=self.info.id)
            # A server that cannot be reached lets the reservation expire.
            with suppress(EtfarmError, TimeoutError):
                async with asyncio.timeout(_RELEASE_S):
                    await self._stubs().devices.Release(request)

    @property
    def info(self) -> ReservationInfo:
        """The reservation as last renewed."""
        if self._info is None:
            raise error_for(
                "RESERVATION_NOT_OPEN",
                "The devices are not reserved yet.",
                "Use it inside `with farm.reserve(...) as reservation:`.",
            )
        return self._info

    @property
    def id(self) -> str:
        """The reservation's id, which `bench`, `run` and `session` take as `reservation`."""
        return self.info.id

    @property
    def device_ids(self) -> tuple[str, ...]:
        """The ids of the reserved devices."""
        return self.info.device_ids

    @property
    def expires_at(self) -> datetime:
        """When the reservation ends unless it is renewed, by the server's clock."""
        return self.info.expires_at

    @property
    def ended(self) -> EtfarmError | None:
        """Why the reservation ended before the block; None while it holds."""
        return self._ended

    async def renew(self, seconds: float | None = None) -> ReservationInfo:
        """Renew the reservation now, for `seconds` from now, or its duration when None.

        Raises:
            EtfarmError: RESERVATION_ENDED; SERVER_UNREACHABLE.
        """
        request = device_pb2.RenewReservationRequest(reservation_id=self.info.id, duration_s=seconds)
        self._info = decoded(ReservationInfo, await self._stubs().devices.Renew(request))
        return self._info

    async def _renew(self) -> None:
        pause_s = self._request.duration_s / RENEWALS
        while True:
            await asyncio.sleep(pause_s)
            try:
                await self.renew()
            except EtfarmError as error:
                if error.reason in _ENDED:
                    self._ended = error
                    if self._on_end is not None:
                        self._on_end(error)
                    return
                pause_s = min(_RETRY_S, self._request.duration_s / RENEWALS)
            else:
                pause_s = self._request.duration_s / RENEWALS
