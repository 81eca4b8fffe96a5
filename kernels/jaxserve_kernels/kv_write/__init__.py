"""Writing new keys and values into their pages, in place under donation."""

from jaxserve_kernels.kv_write.api import kv_write, storable, stored
from jaxserve_kernels.kv_write.scales import KVScales

__all__ = ["KVScales", "kv_write", "storable", "stored"]
