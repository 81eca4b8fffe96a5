"""Writing new keys and values into their pages, in place under donation."""

from jaxserve_kernels.kv_write.api import E4M3_BITS, kv_write, numbers, storable, stored
from jaxserve_kernels.kv_write.scales import KVScales

__all__ = ["E4M3_BITS", "KVScales", "kv_write", "numbers", "storable", "stored"]
