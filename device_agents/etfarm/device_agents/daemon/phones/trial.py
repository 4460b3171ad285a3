"""The trial of a runner on a phone that has just come, before any program needs it there."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import grpc

from etfarm.device_agents.attempts.cache import Cache
from etfarm.device_agents.attempts.fetch import try_out
from etfarm.device_agents.attempts.transfers import Transfers
from etfarm.device_agents.config import AgentConfig
from etfarm.device_agents.targets.phones.errors import own_runner_failed
from etfarm.device_agents.targets.phones.phone import Phone
from etfarm.v1 import agent_pb2, device_pb2, farm_pb2
from etfarm.v1.artifact_pb2_grpc import ArtifactServiceStub
from etfarm.v1.common_pb2 import RunnerKind
from etfarm.v1.farm_pb2_grpc import FarmServiceStub
from etfarm.wire.errors import EtfarmError, FarmError, UserError
from etfarm.wire.farm_channel import farm_channel

log = logging.getLogger(__name__)

_BUNDLE_S: Final = 600.0
"""Seconds within which a new phone's runner must be downloaded."""


class Trial:
    """Self-tests of runners on phones.

    Args:
        config: the agent's settings.
        cache: the artifact cache, for the farm's runner.
    """

    def __init__(self, config: AgentConfig, cache: Cache) -> None:
        assert config.phones is not None  # the agent serves phones
        self._config = config
        self._options = config.phones
        self._cache = cache

    async def run(self, phone: Phone) -> None:
        """Test the farm's runner for the phone, or the runner that was installed on it.

        Without a runner, or without the farm, the phone's first run does it.

        Raises:
            PHONE_RUNNER_UNUSABLE, DEVICE_RUNNER_UNUSABLE: the runner failed; the error names the signal or the system's message.
            DeviceError: the phone is gone, or has no room.
        """
        if phone.has_own_runner:
            phone.device.own_runners.append(await self._own_runner(phone))
            return
        try:
            async with AsyncExitStack() as opened:
                async with asyncio.timeout(self._options.farm_s):
                    try:
                        channel = await opened.enter_async_context(farm_channel(self._config.access))
                    except EtfarmError as error:
                        log.info("the phone %s tries its runner at the first job: %s", phone.serial, error)
                        return
                    offered = await _find_bundle(channel, phone.device.arch)
                if offered is None:
                    return
                with self._cache.lease(Transfers(ArtifactServiceStub(channel), self._config.pauses)) as lease:
                    async with asyncio.timeout(_BUNDLE_S):
                        bundle = await lease.open_bundle(offered.artifact)
                    await phone.install_runner(bundle)
                    await try_out(bundle, offered.artifact.digest, phone, self._config.data)
                    phone.tried.add(offered.artifact.digest)
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            log.info("the phone %s tries its runner at the first job: %s", phone.serial, error)

    async def _own_runner(self, phone: Phone) -> device_pb2.DeviceRunner:
        """Test the runner that was installed on the phone, and return its description.

        Raises:
            PHONE_RUNNER_UNUSABLE: it does not start, or computes wrong results.
            DeviceError: the phone is gone.
        """
        try:
            with tempfile.TemporaryDirectory(prefix="try-", dir=self._config.data) as folder:
                async with asyncio.timeout(phone.self_test_s), phone.start_runner(None, Path(folder), None) as runner:
                    hello = await runner.hello()
                    await runner.self_test()
        except (UserError, FarmError) as error:
            raise own_runner_failed(phone.serial, self._options.runner or "", error.message) from error
        except TimeoutError:
            why = f"it does not answer within {phone.self_test_s:g} s"
            raise own_runner_failed(phone.serial, self._options.runner or "", why) from None
        return device_pb2.DeviceRunner(
            kind=RunnerKind.RUNNER_KIND_OWN,
            executorch=hello.executorch,
            backends=hello.backends,
            operators=hello.operators,
        )


async def _find_bundle(channel: grpc.aio.Channel, arch: str) -> agent_pb2.RunnerBundle | None:
    """Return the farm's runner bundle for an architecture; None if the farm has none."""
    request = farm_pb2.ListBundlesRequest()
    while True:
        page = await FarmServiceStub(channel).ListBundles(request)
        for bundle in page.bundles:
            if bundle.arch == arch:
                return bundle
        if not page.next_page_token:
            return None
        request.page_token = page.next_page_token
