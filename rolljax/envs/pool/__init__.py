"""The host pool: thousands of episodes in threads, worker processes or Ray actors, under deadlines."""

from rolljax.envs.pool.mixed import MixedPool, Pool, open_pool
from rolljax.envs.pool.pool import Backend, EnvPool, Episode, PoolStats
from rolljax.envs.pool.settings import PoolConfig

__all__ = ["Backend", "EnvPool", "Episode", "MixedPool", "Pool", "PoolConfig", "PoolStats", "open_pool"]
