"""What crosses between the API process and the engine process: messages, codec, transport."""
