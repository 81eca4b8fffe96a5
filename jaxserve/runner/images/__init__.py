"""Images on the devices: the encoder as a program, and its embeddings."""
