"""Writing new keys and values into their pages, in place under donation."""

from jaxserve_kernels.kv_write.api import kv_write

__all__ = ["kv_write"]
