"""One choice of a reply: its text, its tokens, its times."""
