"""Programs that use the server's packages: benchmarks, planning, terminal chat. Nothing imports them but the commands."""
