"""The selective scan of Mamba-1 (arXiv 2312.00752): a state for each channel, whose decay and input depend on the token."""

from jaxserve_kernels.selective_scan.api import selective_scan
from jaxserve_kernels.selective_scan.reference import Scanned

__all__ = ["Scanned", "selective_scan"]
