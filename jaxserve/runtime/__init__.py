"""The server's processes: settings, API processes, engine launch and supervision, signals, start-up report."""
