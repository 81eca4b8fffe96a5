"""Access to the ingress: it checks the API key of a request, and reads its body within limits, before it reads the prompt."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping

from jaxserve.config import Config, ServerConfig
from jaxserve.errors import AuthenticationError, ConfigError
from jaxserve.http.access import KeyRing
from jaxserve.http.api_keys import api_keys, key_records, make_tenants
from jaxserve.http.body_budget import BodyBudget
from jaxserve.http.errors import too_large, too_slow
from jaxserve.http.sockets.tls import FileVersion, file_version
from jaxserve.metrics import Metrics
from jaxserve.tenants import Tenant


class IngressKeys:
    """The API keys with which requests are passed on to a replica, which checks them again.

    A key that is added to the file is accepted at once, and one that is removed is still passed on: the servers of replicas
    read the file when their operator wants it.
    """

    def __init__(self, config: Config) -> None:
        """Read the keys. Raises ConfigError if they cannot be read."""
        self._config = config
        self._metrics = Metrics(config.model.model)  # counted by replicas, not here
        self._tenants: list[Tenant] = []
        self._ring = KeyRing()
        self._stamp = self._file_stamp()
        self._read()

    def check(self, headers: Mapping[str, str]) -> Tenant | None:
        """Return the tenant of a request's key; None without keys. Raises AuthenticationError."""
        offered = headers.get("Authorization"), headers.get("X-Api-Key", headers.get("Api-Key"))
        try:
            return self._ring.check(*offered)
        except AuthenticationError:
            if (stamp := self._file_stamp()) == self._stamp:
                raise
        self._stamp = stamp
        with contextlib.suppress(ConfigError):  # such as a file that is half written
            self._read()
        return self._ring.check(*offered)

    def shared_name(self, tenant: Tenant | None) -> str:
        """Return what `KeyRing.shared_name` does."""
        return "" if tenant is None else self._ring.shared_name(tenant)

    def _read(self) -> None:
        records = key_records(self._config.server)
        others = [tenant for tenant in self._tenants if tenant.record not in records]
        self._tenants = [*make_tenants(records, self._config, self._metrics), *others]
        self._ring.replace(self._tenants)

    def _file_stamp(self) -> FileVersion | None:
        """Return values that change when the file of the keys changes; None without a file."""
        file = self._config.server.api_key_file
        return None if file is None else file_version(file)


class OwnKey:
    """The API key with which the application asks its servers. They read the file of the keys at another time."""

    def __init__(self, config: ServerConfig) -> None:
        """Read the key. Raises ConfigError if it cannot be read."""
        self._config = config
        self._value = next(iter(api_keys(config)), None)

    @property
    def headers(self) -> dict[str, str]:
        """The headers of a question; empty without keys."""
        return {} if self._value is None else {"Authorization": f"Bearer {self._value}"}

    def note(self, status: int) -> None:
        """Read the key again if `status`, that of an answer, says that a server does not accept it any more."""
        if status == AuthenticationError.status:
            with contextlib.suppress(ConfigError):
                self._value = next(iter(api_keys(self._config)), None)


class IngressBodies:
    """Reads bodies within the limits that a server has for their size, their time, and their memory while they are read."""

    def __init__(self, config: Config) -> None:
        self._max_body_size = config.server.max_body_size
        self._timeout_s = config.connection.body_timeout
        self._budget = BodyBudget(config.server.max_body_memory)

    @contextlib.asynccontextmanager
    async def read(
        self, chunks: AsyncIterator[bytes], content_length: str | None, key_name: str
    ) -> AsyncIterator[bytes]:
        """Yield the body that `chunks` make, for which memory is reserved until the end of the block.

        key_name: as in `BodyBudget.reservation`. Raises RequestError, PayloadTooLargeError as soon as the body is known to be
        too large.
        """
        size = self._max_body_size if content_length is None else int(content_length)
        if size > self._max_body_size:
            raise too_large(self._max_body_size)
        with self._budget.reservation(key_name) as reserve:
            reserve(size)
            try:
                async with asyncio.timeout(self._timeout_s):
                    body = await self._joined(chunks)
            except TimeoutError:
                raise too_slow(self._timeout_s) from None
            yield body

    async def _joined(self, chunks: AsyncIterator[bytes]) -> bytes:
        body, num_bytes = list[bytes](), 0
        async for chunk in chunks:
            body.append(chunk)
            num_bytes += len(chunk)
            if num_bytes > self._max_body_size:
                raise too_large(self._max_body_size)
        return b"".join(body)
