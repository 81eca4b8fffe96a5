"""GGUF files presented as Hugging Face checkpoints. Families declare their names and keys as a `GGUFArchitecture`."""
