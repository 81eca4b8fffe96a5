"""The kernel self-test: compares an accelerator's kernels with XLA before a server uses them for the first time.

It runs in a process of its own, because a kernel may crash or hang; `check` starts it.
Kernels that pass are not tested again while source, versions, driver and model stay the same: the compile cache has a
mark for them.
"""
