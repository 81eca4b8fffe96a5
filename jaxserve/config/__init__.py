"""Every setting of the server, declared once, in the module of its section.

The CLI flag (`--max-num-seqs`), the key of a YAML file (`max_num_seqs`), the environment variable
(`JAXSERVE_MAX_NUM_SEQS`) and the reference page derive from a field and its help text. Configs are frozen: made once,
resolved once, printed at start.
"""

from jaxserve.config.cache import CacheConfig, KVCacheDtype, KVFetch, TierConfig
from jaxserve.config.compile import AttentionBackend, CompileConfig, CpuKernels, Warmup
from jaxserve.config.config import Config
from jaxserve.config.devices import ExpertExchange, HostsConfig, ParallelConfig, Placement, Routing
from jaxserve.config.images import ImagesConfig
from jaxserve.config.memory import MemoryConfig
from jaxserve.config.model import Dtype, ModelConfig, PoolingChoice, Task
from jaxserve.config.recorder import RecorderConfig
from jaxserve.config.requests import LimitsConfig, ResponsesConfig, StructuredConfig
from jaxserve.config.scheduler import SchedulerConfig, SchedulingPolicy, SpeculativeMethod
from jaxserve.config.server import ConnectionConfig, LogFormat, LogLevel, ServerConfig
from jaxserve.config.tls import TlsConfig

__all__ = [
    "AttentionBackend",
    "CacheConfig",
    "CompileConfig",
    "Config",
    "ConnectionConfig",
    "CpuKernels",
    "Dtype",
    "ExpertExchange",
    "HostsConfig",
    "ImagesConfig",
    "KVCacheDtype",
    "KVFetch",
    "LimitsConfig",
    "LogFormat",
    "LogLevel",
    "MemoryConfig",
    "ModelConfig",
    "ParallelConfig",
    "Placement",
    "PoolingChoice",
    "RecorderConfig",
    "ResponsesConfig",
    "Routing",
    "SchedulerConfig",
    "SchedulingPolicy",
    "ServerConfig",
    "SpeculativeMethod",
    "StructuredConfig",
    "Task",
    "TierConfig",
    "TlsConfig",
    "Warmup",
]
