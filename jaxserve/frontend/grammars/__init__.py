"""Grammars that constrain replies: what a request asks for, with calls and reasoning around it, and their check."""
