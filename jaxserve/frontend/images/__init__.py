"""Images of prompts: their sources, fetching, decoding in a separate process, and the model's image processor."""
