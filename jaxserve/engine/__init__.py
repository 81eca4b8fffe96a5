"""The engine process: receives requests, schedules steps, sends what came out. No HTTP, no JSON."""
