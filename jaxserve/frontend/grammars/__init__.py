"""Grammars of replies with tool calls, and checks of schemas."""
