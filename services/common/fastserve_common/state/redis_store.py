"""Redis, for a cluster."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence

import redis.asyncio
import redis.exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from fastserve_common.buckets import Draw, Drawn
from fastserve_common.state.store import LEASE_TTL_S, Occupied, StateError

#: A Redis that is silent for so long is away.
_TIMEOUT_S = 2.0

# The server's clock decides for everybody. A role is one sorted set (member by expiry) and one hash (member to info):
# reading a role costs its members, whatever else the server holds.
_REGISTER = """
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
redis.call('ZADD', KEYS[1], now_ms + ARGV[3], ARGV[1])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
return 1
"""
_UNREGISTER = """
if ARGV[2] and redis.call('HGET', KEYS[2], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[1])
return 1
"""
_MEMBERS = """
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now_ms)) do
  redis.call('ZREM', KEYS[1], gone)
  redis.call('HDEL', KEYS[2], gone)
end
return redis.call('HGETALL', KEYS[2])
"""
_ACQUIRE = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
_INCREMENT = """
local last = tonumber(redis.call('GET', KEYS[1]) or '0')
local next = string.format('%.0f', math.max(last + 1, tonumber(ARGV[1])))
redis.call('SET', KEYS[1], next)
return next
"""
# The same as `buckets.draw`. Whoever has not drawn for a minute has full buckets: nothing need be kept.
_DRAW = """
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
local elapsed_ms = math.max(0, now_ms - tonumber(redis.call('HGET', KEYS[1], 'at') or now_ms))
local levels, granted = {}, 1
for i = 1, #ARGV, 3 do
  local per_min, cost = tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2])
  local level = tonumber(redis.call('HGET', KEYS[1], 'level:' .. ARGV[i]) or per_min)
  level = math.min(per_min, level + elapsed_ms * per_min / 60000)
  if level < cost then granted = 0 end
  levels[#levels + 1] = level
end
for i, level in ipairs(levels) do
  levels[i] = string.format('%.6f', level - granted * tonumber(ARGV[3 * i]))
  redis.call('HSET', KEYS[1], 'level:' .. ARGV[3 * i - 2], levels[i])
end
redis.call('HSET', KEYS[1], 'at', now_ms)
redis.call('PEXPIRE', KEYS[1], 60000)
return {granted, unpack(levels)}
"""
# A hash of its owner's holders: "held expiry". It goes with the last of them.
_OCCUPY = """
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
local held, more, limit, ttl_ms = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local others, said = 0, redis.call('HGETALL', KEYS[1])
for i = 1, #said, 2 do
  local theirs, until_ms = string.match(said[i + 1], '(%d+) (%d+)')
  if tonumber(until_ms) <= now_ms then redis.call('HDEL', KEYS[1], said[i])
  elseif said[i] ~= ARGV[1] then others = others + tonumber(theirs) end
end
local granted = more == 0 or others + held + more <= limit
local mine = granted and held + more or held
if mine > 0 then
  redis.call('HSET', KEYS[1], ARGV[1], string.format('%d %.0f', mine, now_ms + ttl_ms))
  redis.call('PEXPIRE', KEYS[1], ttl_ms)
else redis.call('HDEL', KEYS[1], ARGV[1]) end
return {granted and 1 or 0, others + mine}
"""
_SAVE = """
if tonumber(redis.call('HGET', KEYS[1], 'version') or '0') > tonumber(ARGV[2]) then return 0 end
redis.call('HSET', KEYS[1], 'value', ARGV[1], 'version', ARGV[2])
return 1
"""
_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


def _role_keys(role: str) -> list[str]:
    """Both on one shard of a cluster: the braces name the part that is hashed."""
    return [f"fastserve:expiry:{{{role}}}", f"fastserve:members:{{{role}}}"]


class RedisState:
    """Keys under `fastserve:`."""

    def __init__(self, url: str) -> None:
        # Everybody who asks has a loop of its own that asks again; a client that retried would only answer later.
        self._redis = redis.asyncio.Redis.from_url(
            url,
            decode_responses=True,
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        )
        self._register = self._redis.register_script(_REGISTER)
        self._unregister = self._redis.register_script(_UNREGISTER)
        self._members = self._redis.register_script(_MEMBERS)
        self._increment = self._redis.register_script(_INCREMENT)
        self._acquire = self._redis.register_script(_ACQUIRE)
        self._release = self._redis.register_script(_RELEASE)
        self._draw = self._redis.register_script(_DRAW)
        self._occupy = self._redis.register_script(_OCCUPY)
        self._save = self._redis.register_script(_SAVE)

    @contextlib.asynccontextmanager
    async def _errors(self) -> AsyncIterator[None]:
        """A call that is cancelled ends as cancelled, whatever the client makes of it: a caller that goes on and tries
        again would never end."""
        task = asyncio.current_task()
        before = task.cancelling() if task else 0
        try:
            yield
        except (redis.exceptions.RedisError, OSError) as error:
            if task and task.cancelling() > before:
                raise asyncio.CancelledError from error
            raise StateError(str(error)) from error
        if task and task.cancelling() > before:
            raise asyncio.CancelledError

    async def register(self, role: str, member: str, info: Mapping[str, str], ttl_s: float = LEASE_TTL_S) -> None:
        async with self._errors():
            await self._register(keys=_role_keys(role), args=[member, json.dumps(dict(info)), int(ttl_s * 1000)])

    async def unregister(self, role: str, member: str, info: Mapping[str, str] | None = None) -> None:
        args = [member] if info is None else [member, json.dumps(dict(info))]
        async with self._errors():
            await self._unregister(keys=_role_keys(role), args=args)

    async def members(self, role: str) -> dict[str, dict[str, str]]:
        async with self._errors():
            flat = await self._members(keys=_role_keys(role))
        pairs = flat.items() if isinstance(flat, dict) else zip(flat[::2], flat[1::2], strict=True)
        return {member: json.loads(info) for member, info in sorted(pairs)}

    async def increment(self, counter: str, least: int = 1) -> int:
        async with self._errors():
            return int(await self._increment(keys=[f"fastserve:counter:{counter}"], args=[least]))

    async def acquire(self, name: str, owner: str, ttl_s: float = LEASE_TTL_S) -> bool:
        async with self._errors():
            return bool(await self._acquire(keys=[f"fastserve:lease:{name}"], args=[owner, int(ttl_s * 1000)]))

    async def release(self, name: str, owner: str) -> None:
        async with self._errors():
            await self._release(keys=[f"fastserve:lease:{name}"], args=[owner])

    async def draw(self, owner: str, draws: Sequence[Draw]) -> Drawn:
        args = [arg for d in draws for arg in (d.name, d.per_min, d.cost)]
        async with self._errors():
            granted, *left = await self._draw(keys=[f"fastserve:buckets:{owner}"], args=args)
        levels = tuple(float(level) for level in left)
        waits_s = [0.0 if granted else d.until_enough_s(level) for d, level in zip(draws, levels, strict=True)]
        return Drawn(bool(granted), levels, max(waits_s, default=0.0))

    async def occupy(self, owner: str, holder: str, held: int, more: int, limit: int, ttl_s: float) -> Occupied:
        args: list[str | int] = [holder, held, more, limit, int(ttl_s * 1000)]
        async with self._errors():
            granted, taken = await self._occupy(keys=[f"fastserve:places:{owner}"], args=args)
        return Occupied(bool(granted), int(taken))

    async def save(self, name: str, value: str, version: int) -> bool:
        async with self._errors():
            return bool(await self._save(keys=[f"fastserve:note:{name}"], args=[value, version]))

    async def saved(self, name: str) -> str | None:
        async with self._errors():
            value = await self._redis.hget(f"fastserve:note:{name}", "value")
        return None if value is None else str(value)

    async def close(self) -> None:
        await self._redis.aclose()
