"""The processes of a cluster that meet in Redis, each started as an orchestrator would: apart, and by its own flags."""

import asyncio
import contextlib
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

from tests.conftest import free_ports

from fastserve import AsyncClient
from fastserve.cli import specs
from fastserve.cli.settings import ServeSettings
from fastserve_common.state import StateError, StateStore, open_state
from fastserve_scheduler.leadership import LEASE, MEMBER, ROLE
from fastserve_worker.fake_stage import fake_answer

from .processes import Processes
from .system import wait_until
from .words import FAKE_VOCAB_SIZE

PATIENCE_S = 100.0
#: What every process but a scheduler that stands by registers as. A gateway is called by a random name.
MEMBERS = {"gateway": None, "scheduler": [MEMBER], "stage": ["stage-0", "stage-1"], "kvstore": ["local"]}


class RedisCluster(Processes):
    """Gateway, two schedulers, two fake stages and a kvstore."""

    def __init__(self, folder: Path, words: Path, settings: ServeSettings, state_url: str) -> None:
        super().__init__(folder)
        self.state_url = state_url
        model = specs.Model(words, "words", FAKE_VOCAB_SIZE)
        self._port = free_ports(2)
        self._scheduler = specs.scheduler(settings, state_url, model)
        gateway = specs.gateway(settings, state_url, model, port=0, grpc_port=0)
        kvstore = specs.kvstore(settings, state_url)
        assert kvstore is not None
        self.others = [self.start(spec) for spec in (kvstore, *specs.workers(settings, state_url, model), gateway)]
        #: By address.
        self.schedulers = {f"127.0.0.1:{self._port + n}": self.start_scheduler(self._port + n) for n in range(2)}

    def start_scheduler(self, port: int) -> subprocess.Popen[bytes]:
        return self.start(self._scheduler, f"--listen=127.0.0.1:{port}", log=f"scheduler-{port}")

    def is_running(self, leader: dict[str, str]) -> bool:
        return self.schedulers[leader["address"]].poll() is None

    def restart_ended_schedulers(self) -> None:
        for address, process in self.schedulers.items():
            if process.poll() is not None:
                self.schedulers[address] = self.start_scheduler(int(address.rpartition(":")[2]))

    def stop(self) -> None:
        """All end by themselves when they are asked to."""
        running = [*self.others, *(process for process in self.schedulers.values() if process.poll() is None)]
        for process in running:
            process.send_signal(signal.SIGTERM)
        wait_until(lambda: all(process.poll() is not None for process in running), "all processes end")
        assert [process.returncode for process in running] == [0] * len(running), self.said()


class Facts:
    """What the store knows of the cluster."""

    def __init__(self, store: StateStore) -> None:
        self._store = store

    async def leader_of_all(self) -> dict[str, str] | None:
        """What the leader registered; None while anybody is missing."""
        try:
            found = {role: await self._store.members(role) for role in MEMBERS}
        except StateError:
            return None
        if not found["gateway"] or any(list(found[role]) != names for role, names in MEMBERS.items() if names):
            return None
        return found[ROLE][MEMBER]

    async def holds_the_lease(self, leader: dict[str, str]) -> bool:
        """Asked of one that runs only: asking renews."""
        try:
            return await self._store.acquire(LEASE, leader["incarnation"])
        except StateError:
            return False

    async def of_the_others(self) -> dict[str, dict[str, dict[str, str]]]:
        """Members of every role but the scheduler's, with what they say of themselves."""
        return {role: await self._store.members(role) for role in MEMBERS if role != ROLE}

    async def gateway(self) -> str:
        """Its gRPC address."""
        (info,) = (await self._store.members("gateway")).values()
        return info["grpc"]


@contextlib.asynccontextmanager
async def facts_of(state_url: str) -> AsyncIterator[Facts]:
    store = open_state(state_url)
    try:
        yield Facts(store)
    finally:
        await store.close()


class Stream:
    """A long answer that is read all the while."""

    MAX_TOKENS = 3000

    def __init__(self, client: AsyncClient, prompt: list[int]) -> None:
        self.ids: list[int] = []
        self._prompt = prompt
        self._task = asyncio.create_task(self._read(client))

    async def _read(self, client: AsyncClient) -> None:
        asked = {"max_tokens": self.MAX_TOKENS, "temperature": 0.0, "ignore_eos": True}
        async with client.stream(self._prompt, **asked) as stream:  # type: ignore[arg-type]  # options by name
            async for chunk in stream:
                self.ids += chunk.token_ids

    async def goes_on(self) -> None:
        """Tokens come that had not come when this was called."""
        seen = len(self.ids)
        async with asyncio.timeout(PATIENCE_S):
            while len(self.ids) < min(seen + 3, self.MAX_TOKENS):
                if self._task.done():
                    self._task.result()
                await asyncio.sleep(0.01)

    async def end(self) -> None:
        """Every token so far was the right one, none twice and none left out."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        assert self.ids == fake_answer(self._prompt, self.MAX_TOKENS)[: len(self.ids)]
