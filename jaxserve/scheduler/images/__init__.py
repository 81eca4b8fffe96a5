"""Images and given embeddings in prompts: what the device keeps, and what it encodes before a step."""
