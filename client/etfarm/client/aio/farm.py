"""`AsyncFarm`, a connection to the farm at an address or to the embedded farm."""

from __future__ import annotations

import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from pathlib import Path
from types import AsyncGeneratorType
from typing import TYPE_CHECKING, Any, Self, Unpack

from etfarm.client.aio.inventory import AsyncInventory
from etfarm.client.aio.job_records import AsyncJobRecords
from etfarm.client.aio.retention import AsyncRetention
from etfarm.client.aio.submissions import AsyncSubmissions
from etfarm.client.transport.connection import Connection

if TYPE_CHECKING:
    from etfarm.client.datasets.dataset import Dataset, Options, Result
    from etfarm.client.embedded.lease import Lease
    from etfarm.client.sessions.calls import Outputs
    from etfarm.client.submit.preparation import Model


class AsyncFarm(AsyncSubmissions, AsyncJobRecords, AsyncInventory, AsyncRetention):
    """A farm to submit jobs to.

    Use it with `async with`. Its jobs continue after the block ends.

        async with AsyncFarm() as farm:
            job = await farm.bench("demo:resnet8", recipes=["xnnpack_fp32"])
            result = await job.result()
            print(result.report.latency)

    Without an address and without ETFARM_SERVER, this is the user's embedded farm. It starts for its first user, is
    shared by later ones and stops with the last.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        token: str | None = None,
        tls_ca: str | Path | None = None,
        project: str | None = None,
        on_status: Callable[[str], None] | None = None,
        server_wait_s: float | None = None,
        prewarm: bool = True,
    ) -> None:
        """Prepare a connection; `async with` opens it.

        Args:
            address: HOST:PORT, [IPV6]:PORT or unix:PATH; ETFARM_SERVER when None.
            token: the bearer token; ETFARM_TOKEN when None.
            tls_ca: PEM file of the authority that signed the server's certificate; ETFARM_TLS_CA when None.
            project: owner of what this client creates; ETFARM_PROJECT when None, else the caller's only project, else `default`.
            on_status: called with one sentence about what the start of the embedded farm waits for, when the server is away, and
                when it is back.
            server_wait_s: seconds that calls wait for a server that is away; 0 fails at once. ETFARM_SERVER_WAIT when None, else
                30 for the first answer, lists and other calls, and 600 for submissions, jobs, watches and sessions. A name
                that does not resolve at first, TLS that fails and a wrong token fail at once.
            prewarm: whether an embedded farm that this starts loads the compiler at once. Without it, the first compilation
                takes some ten seconds longer, and a farm that only runs .pte files starts faster.

        Raises:
            BAD_ADDRESS: the file `tls_ca` does not exist, or there is no server address to use it for.
            BAD_SERVER_WAIT: `server_wait_s` or ETFARM_SERVER_WAIT is no time.
        """
        self._connection = Connection(address, token, tls_ca, on_status, project, server_wait_s=server_wait_s, prewarm=prewarm)
        self._datasets: dict[Dataset, weakref.ref[AsyncGenerator[tuple[int, Outputs], None]]] = {}
        """Data sets that may be running, each with its iteration, which the caller may drop at any time."""

    async def __aenter__(self) -> Self:
        """Connect to the farm.

        Raises:
            EtfarmError: SERVER_UNREACHABLE, UNAUTHENTICATED; BAD_ADDRESS, BAD_TLS_FILE; EMBEDDED_FARM_FAILED.
        """
        await self._connection.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End data sets, and disconnect from the farm; an embedded farm without other users stops."""
        try:
            for dataset, iteration in self._datasets.items():
                outputs = iteration()
                if isinstance(outputs, AsyncGeneratorType) and outputs.ag_running:
                    continue  # another task waits for a result; the end of the connection ends it
                if outputs is not None:
                    await outputs.aclose()
                # Python closes an iteration that nothing refers to in a task of its own.
                await dataset.wait_until_ended()
        finally:
            self._datasets.clear()
            await self._connection.close()

    @property
    def address(self) -> str:
        """The server's address."""
        return self._open.server

    @property
    def lease(self) -> Lease | None:
        """The lease on the embedded farm; None for a server with an address."""
        return self._connection.lease

    async def watch_connection(self) -> AsyncIterator[bool]:
        """Yield whether the farm's server answers, and then each change, until the farm is closed.

        Calls and watches continue by themselves after a restart of the server; this is for showing that it is unavailable.

        Raises:
            NOT_CONNECTED: the farm is not open.
        """
        async for is_connected in self._connection.watch():
            yield is_connected

    def run_dataset(
        self,
        program: Model,
        inputs: Iterable[Any],
        device: str = "",
        *,
        devices: int | None = 1,
        on_result: Callable[[Result], None] | None = None,
        **options: Unpack[Options],
    ) -> AsyncGenerator[tuple[int, Outputs], None]:
        """Yield the index and outputs of every set of inputs, in order.

        Each device keeps one program loaded and has a few samples in flight. Leaving the iteration early frees the devices.

        Args:
            program: as in `session`.
            inputs: sets of arrays by name, arrays in order, or single arrays; read in a thread as they are needed.
            devices: number of equal matching devices to split the samples over; all when None. Busy devices join once
                free.
            on_result: called with each sample's result, including failures, and the device that ran it.
            options: see `etfarm.client.datasets.dataset.Options`.

        Raises:
            EtfarmError: no session can be opened, or a sample failed; the error names it. `keep_going` skips failed
                samples.
        """
        from etfarm.client.datasets import devices as dataset_devices
        from etfarm.client.datasets.samples import number_samples

        samples = number_samples(inputs)
        dataset = dataset_devices.dataset(self, program, samples, device, devices=devices, options=options)
        outputs = dataset.outputs(on_result)
        self._datasets = {known: ref for known, ref in self._datasets.items() if known.is_running or ref() is not None}
        self._datasets[dataset] = weakref.ref(outputs)
        return outputs
