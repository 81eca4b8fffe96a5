"""One file per family of encoders: reads its `config.json` into an EncoderConfig. Found by scanning this folder."""
