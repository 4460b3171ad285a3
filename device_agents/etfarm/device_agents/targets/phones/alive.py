"""Cancellation of work on a phone that dies; adb itself reports a dead link only after a minute or more."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

from etfarm.device_agents.adb import PhoneGone
from etfarm.device_agents.config import PhoneOptions
from etfarm.device_agents.targets.phones.claim import LivenessProbe
from etfarm.device_agents.targets.phones.phone import Phone
from etfarm.wire.shielding import end_tasks

T = TypeVar("T")


async def while_alive(
    work: Coroutine[None, None, T], probe: LivenessProbe, options: PhoneOptions, phone: Phone | None = None
) -> T:
    """Return the result of the work, which is cancelled, and has ended, when the phone dies.

    Args:
        work: the work on the phone.
        probe: the phone's liveness probe.
        options: how often the phone is probed, and how long it may take to answer.
        phone: the phone, once it is known; `gone` before the work is cancelled, so that the work does not wait for it.

    Raises:
        PhoneGone: the probe's shell ended, or the work reported that the phone may not answer.
        PhoneSilent: the phone does not answer.
        As `work`.
    """
    working = asyncio.create_task(work, name=f"work on {probe.serial}")
    watching = asyncio.create_task(_watch(probe, options, phone), name=f"liveness of {probe.serial}")
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            if phone is not None:
                phone.gone = True
            watching.result()
        return await working
    finally:
        # The error of one of them was raised above; the other one was cancelled.
        await end_tasks(working, watching)


async def _watch(probe: LivenessProbe, options: PhoneOptions, phone: Phone | None) -> None:
    """Probe the phone until it does not answer.

    Raises:
        DeviceError: the phone does not answer.
    """
    doubted = asyncio.Event() if phone is None else phone.doubted
    lost = {
        asyncio.create_task(probe.ended(), name=f"end of {probe.serial}"),
        asyncio.create_task(doubted.wait(), name=f"doubts of {probe.serial}"),
    }
    try:
        while True:
            done, _ = await asyncio.wait(lost, timeout=options.probe_s, return_when=asyncio.FIRST_COMPLETED)
            if done:
                raise PhoneGone(probe.serial, "its shell ended")
            # On a slow link, an answer that follows a large file arrives late.
            if phone is None or not phone.folder.is_carrying:
                await probe.check(options.answer_s)
    finally:
        for task in lost:
            task.cancel()
        await asyncio.wait(lost)
