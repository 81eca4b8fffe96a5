"""Generated text to reasoning, content and tool calls, piece by piece as it arrives."""
