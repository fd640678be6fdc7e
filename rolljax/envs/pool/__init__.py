"""The host pool: thousands of episodes in threads, worker processes or Ray actors, under deadlines."""

from rolljax.envs.pool.pool import EnvPool, Episode, PoolStats
from rolljax.envs.pool.settings import PoolConfig

__all__ = ["EnvPool", "Episode", "PoolConfig", "PoolStats"]
