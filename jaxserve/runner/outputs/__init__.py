"""Further results of a step: scores of prompt tokens, experts that tokens chose, and tokens before the end of a call."""
