"""The kernel self-test: compares an accelerator's kernels with XLA before a server uses them for the first time.

    check        decides if kernels need a test on this host, starts it, and turns off kernels that fail
    process      the test's own process, because a kernel may crash or hang
    comparison   a few steps with kernels and without, for the shapes of one model

Kernels that pass are not tested again while source, versions, driver and model stay the same: the compile cache has a
mark for them.
"""
