"""Work on a phone as long as the phone lives, which adb says of a dead link for a minute and more."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

from etfarm.device_agents.adb import PhoneGone
from etfarm.device_agents.config import PhoneOptions
from etfarm.device_agents.targets.phones.claim import Pulse
from etfarm.device_agents.targets.phones.phone import Phone

T = TypeVar("T")


async def while_alive(work: Coroutine[None, None, T], pulse: Pulse, options: PhoneOptions, phone: Phone | None = None) -> T:
    """What the work gives. It is cancelled, and has ended, where the phone dies.

    Args:
        work: on the phone.
        pulse: of the phone.
        options: how often the phone is asked, and how long it may take to answer.
        phone: once that is known. It is `gone` before the work is cancelled, so that nothing of it waits for the phone.

    Raises:
        PhoneGone: the pulse ended, or somebody else found that the phone does not answer.
        PhoneSilent: it does not answer.
        As `work`.
    """
    working = asyncio.create_task(work, name=f"work on {pulse.serial}")
    watching = asyncio.create_task(_watch(pulse, options, phone), name=f"pulse of {pulse.serial}")
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            if phone is not None:
                phone.gone = True
            watching.result()
        return await working
    finally:
        for task in (working, watching):
            task.cancel()
        # What one of them has to say about its end, the other one has told.
        await asyncio.gather(working, watching, return_exceptions=True)


async def _watch(pulse: Pulse, options: PhoneOptions, phone: Phone | None) -> None:
    """Returns never.

    Raises:
        DeviceError: the phone does not answer.
    """
    doubted = asyncio.Event() if phone is None else phone.doubted
    lost = {
        asyncio.create_task(pulse.ended(), name=f"end of {pulse.serial}"),
        asyncio.create_task(doubted.wait(), name=f"doubts of {pulse.serial}"),
    }
    try:
        while True:
            done, _ = await asyncio.wait(lost, timeout=options.probe_s, return_when=asyncio.FIRST_COMPLETED)
            if done:
                raise PhoneGone(pulse.serial, "its shell ended")
            # Behind a large file an answer on a slow link comes late.
            if phone is None or not phone.folder.is_carrying:
                await pulse.probe(options.answer_s)
    finally:
        for task in lost:
            task.cancel()
        await asyncio.wait(lost)
