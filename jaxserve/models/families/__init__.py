"""One file per model family: which `architectures` it serves, and its config as a `DecoderConfig`."""
