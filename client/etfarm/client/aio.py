"""Steps 1 and 10, client: `AsyncFarm`, a connection to a farm: to the one that is named, else to the embedded one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import grpc

from etfarm.client import decode, embedded, submission, transfers
from etfarm.client.errors import Kind, UserError, from_rpc_error
from etfarm.client.jobs import AsyncJob
from etfarm.client.models import Bundle, Device, JobInfo, RecipeInfo, ServerInfo
from etfarm.client.retry import repeat
from etfarm.client.stubs import Stubs
from etfarm.client.submission import DEFAULT_RECIPE, Inputs, Model, Submission
from etfarm.v1 import (
    compile_pb2,
    device_pb2,
    farm_pb2,
    job_pb2,
)
from etfarm.wire import chunks, names, selectors
from etfarm.wire.channel import Access, BadAddress, open_channel
from etfarm.wire.status import Unreachable

CONNECT_TIMEOUT_S = 10.0
"""How long the first answer may take; a server on the other side of the world needs one second."""

GIVE_UP_S = 5.0
"""How long a submission that is cancelled may take to cancel the job that it made."""


class NotConnected(UserError):
    """The farm is used outside of its `with` block."""

    reason = "NOT_CONNECTED"
    kind = Kind.FAILED_PRECONDITION


class AsyncFarm:
    """A farm to submit jobs to. Use it with `async with`; its jobs go on when it is left.

    Without an address and without ETFARM_SERVER it is the embedded farm of this user: joined where one runs, started
    where none does, gone when the last one that uses it has left.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        token: str | None = None,
        tls_ca: str | Path | None = None,
        on_status: Callable[[str], None] | None = None,
    ) -> None:
        """Args:
        address: HOST:PORT, [IPV6]:PORT or unix:PATH; ETFARM_SERVER when None.
        token: the bearer token; ETFARM_TOKEN when None.
        tls_ca: PEM file of the authority that signed the server's certificate; ETFARM_TLS_CA when None.
        on_status: told in one sentence what starting the embedded farm waits for.

        Raises:
            BadAddress: there is no file `tls_ca`, or no server whose certificate it could be for.
        """
        self._address = address or os.environ.get(names.SERVER_VARIABLE) or None
        if tls_ca is not None and self._address is None:
            raise BadAddress(
                "--tls-ca is for a server that is named, and the embedded farm has no certificate.",
                f"Give --server (or {names.SERVER_VARIABLE}) too, or leave --tls-ca out.",
            )
        if tls_ca is not None and not Path(tls_ca).is_file():
            raise BadAddress(f"There is no file {tls_ca}, which --tls-ca names.", "Check the path.", path=tls_ca)
        self._token = token
        self._tls_ca = tls_ca
        self._on_status = on_status
        self._lease: embedded.Lease | None = None
        self._channel: grpc.aio.Channel | None = None
        self._stubs: Stubs | None = None

    async def __aenter__(self) -> Self:
        """Connects.

        Raises:
            EtfarmError: SERVER_UNREACHABLE, UNAUTHENTICATED; BAD_ADDRESS; EMBEDDED_FARM_FAILED.
        """
        try:
            if self._address is None:
                self._lease = await embedded.join(on_status=self._on_status)
                access = Access(self._lease.address)
            else:
                access = Access.of(self._address, self._tls_ca)
                if self._token is not None:
                    access = Access(access.server, self._token, access.tls_ca)
            self._channel = open_channel(access)
            self._stubs = Stubs.of(self._channel, access.server)
            await self._must_answer(self._stubs)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Leaves the farm; an embedded one that nobody else uses is gone afterwards."""
        channel, lease = self._channel, self._lease
        self._channel = self._stubs = self._lease = None
        if channel is not None:
            await channel.close()
        if lease is not None:
            await lease.leave()

    @property
    def address(self) -> str:
        """The server's address."""
        return self._open.server

    @property
    def lease(self) -> embedded.Lease | None:
        """The hold on the embedded farm; None at a server that was named."""
        return self._lease

    async def bench(
        self,
        model: Model | Sequence[Model],
        recipes: str | Sequence[str] = (DEFAULT_RECIPE,),
        devices: str | Sequence[str] = ("",),
        *,
        all_devices: bool = False,
        example_inputs: tuple[Any, ...] | None = None,
        inputs: Inputs | None = None,
        methods: Sequence[str] = (),
        threads: Sequence[int] = (),
        cores: str = "",
        iterations: int | None = None,
        warmup: int | None = None,
        min_time_s: float | None = None,
        profile: bool = True,
        name: str = "",
        labels: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        priority: int = 0,
        no_cache: bool = False,
        on_upload: transfers.Moved | None = None,
    ) -> AsyncJob:
        """Submits a benchmark: each model with each recipe, on each device choice, with each method and thread count.

        Args:
            model: one or several of what `etfarm.client.submission.Model` lists; exporting an eager one blocks for seconds.
            recipes: names with arguments, as on the command line, or TOML files.
            devices: selectors; each is one cell on one matching device, or one per match with `all_devices`.
            example_inputs: forward's arguments, for an nn.Module.
            inputs: what the programs are run with; the models' own example inputs when None.

        Raises:
            EtfarmError: a model, recipe, selector or input is wrong, or the server refuses the job.
        """
        measurement = job_pb2.Measurement(
            warmup=warmup, iterations=iterations, min_time_s=min_time_s, no_profile=not profile, cores=cores
        )
        spec = job_pb2.JobSpec(
            name=name,
            labels=labels,
            devices=_choices(devices, all_devices),
            methods=methods,
            threads=threads,
            measurement=measurement,
            priority=priority,
            timeout_s=timeout_s,
            no_cache=no_cache,
        )
        return await self._submit(spec, model, recipes, example_inputs, inputs, on_upload)

    async def compile(
        self,
        model: Model | Sequence[Model],
        recipes: str | Sequence[str] = (DEFAULT_RECIPE,),
        *,
        example_inputs: tuple[Any, ...] | None = None,
        name: str = "",
        labels: Mapping[str, str] | None = None,
        no_cache: bool = False,
        stop_after: str = "",
        on_upload: transfers.Moved | None = None,
    ) -> AsyncJob:
        """Submits a compilation; `AsyncJob.save_program` fetches what came of it.

        Raises:
            EtfarmError: a model or recipe is wrong, or the server refuses the job.
        """
        spec = job_pb2.JobSpec(name=name, labels=labels, no_cache=no_cache, stop_after=stop_after)
        return await self._submit(spec, model, recipes, example_inputs, None, on_upload)

    async def run(
        self,
        model: Model,
        recipes: str | Sequence[str] = (DEFAULT_RECIPE,),
        device: str = "",
        *,
        example_inputs: tuple[Any, ...] | None = None,
        inputs: Inputs | None = None,
        methods: Sequence[str] = (),
        threads: int | None = None,
        name: str = "",
        timeout_s: float | None = None,
        on_upload: transfers.Moved | None = None,
    ) -> AsyncJob:
        """Submits one run without a measurement; `AsyncJob.outputs` fetches what the program gave.

        Raises:
            EtfarmError: the model, selector or inputs are wrong, or the server refuses the job.
        """
        spec = job_pb2.JobSpec(
            name=name,
            devices=_choices(device, all_devices=False),
            methods=methods,
            threads=[threads] if threads else [],
            timeout_s=timeout_s,
        )
        return await self._submit(spec, model, recipes, example_inputs, inputs, on_upload)

    async def jobs(self, limit: int = 50) -> list[JobInfo]:
        """The farm's jobs, newest first."""
        jobs: list[JobInfo] = []
        request = job_pb2.ListJobsRequest(page_size=min(limit, 500))
        while True:
            answer = await repeat(lambda: self._open.jobs.List(request), server=self.address)
            jobs += [decode.job(job) for job in answer.jobs]
            if not answer.next_page_token or len(jobs) >= limit:
                return jobs[:limit]
            request.page_token = answer.next_page_token

    async def job(self, job_id: str) -> AsyncJob:
        """A job by its id, a unique prefix of it of at least 4 characters, or `latest`.

        Raises:
            EtfarmError: JOB_NOT_FOUND.
        """
        request = job_pb2.GetJobRequest(job_id=job_id)
        return AsyncJob(self._open, await repeat(lambda: self._open.jobs.Get(request), server=self.address))

    async def devices(self, selector: str = "") -> list[Device]:
        """The known devices that match, offline ones included.

        Raises:
            UserError: `selector` is none.
        """
        selectors.parse(selector)
        request = device_pb2.ListDevicesRequest(selector=selector)
        answer = await repeat(lambda: self._open.devices.List(request), server=self.address)
        return [decode.device(device) for device in answer.devices]

    async def device(self, device_id: str) -> Device:
        """A device by its id, a unique prefix of it, or its name.

        Raises:
            EtfarmError: DEVICE_NOT_FOUND.
        """
        request = device_pb2.GetDeviceRequest(device_id=device_id)
        return decode.device(await repeat(lambda: self._open.devices.Get(request), server=self.address))

    async def recipes(self) -> list[RecipeInfo]:
        """All recipes, and what the server lacks for those that it cannot run."""
        request = compile_pb2.ListRecipesRequest()
        answer = await repeat(lambda: self._open.compiler.ListRecipes(request), server=self.address)
        return [decode.recipe(recipe) for recipe in answer.recipes]

    async def bundles(self) -> list[Bundle]:
        """The runner bundles that devices are sent, newest first."""
        request = farm_pb2.ListBundlesRequest()
        answer = await repeat(lambda: self._open.farm.ListBundles(request), server=self.address)
        return [decode.bundle(bundle) for bundle in answer.bundles]

    async def add_bundle(self, path: Path, *, on_upload: transfers.Moved | None = None) -> Bundle:
        """Uploads a runner bundle and offers it to the devices of its architecture.

        Raises:
            EtfarmError: NOT_A_BUNDLE; PERMISSION_DENIED.
        """
        artifact = await chunks.artifact_of_file(path)
        blobs: dict[str, tuple[Any, transfers.Source]] = {artifact.digest: (artifact, path)}
        await transfers.upload_missing(self._open.artifacts, blobs, server=self.address, on_progress=on_upload)
        request = farm_pb2.AddBundleRequest(digest=artifact.digest)
        return decode.bundle(await repeat(lambda: self._open.farm.AddBundle(request), server=self.address))

    async def info(self) -> ServerInfo:
        """What the server is, and what it is still starting."""
        request = farm_pb2.GetServerInfoRequest()
        return decode.server_info(await repeat(lambda: self._open.farm.GetServerInfo(request), server=self.address))

    @property
    def _open(self) -> Stubs:
        if self._stubs is None:
            raise NotConnected("The farm is not connected.", "Use it inside of `with Farm(...) as farm:`.")
        return self._stubs

    async def _submit(
        self,
        spec: job_pb2.JobSpec,
        model: Any,
        recipes: str | Sequence[str],
        example_inputs: tuple[Any, ...] | None,
        inputs: Any,
        on_upload: transfers.Moved | None,
    ) -> AsyncJob:
        # What costs nothing to refuse is refused first.
        parsed = [submission.read_recipe(recipe) for recipe in _several(recipes)]
        for choice in spec.devices:
            selectors.parse(choice.selector)

        def gather() -> Submission:
            models = [submission.prepare(one, example_inputs=example_inputs) for one in _several(model)]
            made = Submission(spec)
            made.add_candidates(models, parsed)
            if inputs is not None:
                made.add_inputs(inputs, models, list(spec.methods))
            return made

        made = await asyncio.to_thread(gather)
        stubs = self._open
        await transfers.upload_missing(stubs.artifacts, made.blobs, server=stubs.server, on_progress=on_upload)
        request = job_pb2.SubmitRequest(request_id=made.request_id, spec=made.spec)
        submitting = asyncio.create_task(repeat(lambda: stubs.jobs.Submit(request), server=stubs.server), name="submit")
        try:
            return AsyncJob(stubs, await asyncio.shield(submitting))
        except asyncio.CancelledError:
            # The server may have the job by now, and nobody would know its id: whoever gives up wants no job.
            async with asyncio.timeout(GIVE_UP_S):
                await AsyncJob(stubs, await submitting).cancel()
            raise

    async def _must_answer(self, stubs: Stubs) -> None:
        """One quick call, so that a wrong address is heard of now and not after the patience for a restart."""
        try:
            await stubs.farm.GetServerInfo(farm_pb2.GetServerInfoRequest(), timeout=CONNECT_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise Unreachable(
                    f"The server at {stubs.server} did not answer within {CONNECT_TIMEOUT_S:.0f} s.",
                    "Check the address (--server or ETFARM_SERVER) and the network.",
                    server=stubs.server,
                ) from None
            raise from_rpc_error(error, server=stubs.server) from None


def _several(one_or_more: Any) -> list[Any]:
    return list(one_or_more) if isinstance(one_or_more, list | tuple) else [one_or_more]


def _choices(devices: str | Iterable[str], all_devices: bool) -> list[job_pb2.DeviceChoice]:
    wanted = [devices] if isinstance(devices, str) else list(devices)
    return [job_pb2.DeviceChoice(selector=selector, all=all_devices) for selector in wanted or [""]]
