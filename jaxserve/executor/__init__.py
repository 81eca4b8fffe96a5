"""Running a step plan: on this host's devices (`local`), or by hand-computable arithmetic (`fake`)."""
