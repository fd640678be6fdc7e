"""The host pool: thousands of episodes in threads, worker processes or Ray actors, under deadlines."""

from rolljax.envs.pool.pool import Backend, EnvPool, Episode, PoolStats
from rolljax.envs.pool.settings import PoolConfig

__all__ = ["Backend", "EnvPool", "Episode", "PoolConfig", "PoolStats"]
