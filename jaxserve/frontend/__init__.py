"""From a checked request to the engine and back."""
