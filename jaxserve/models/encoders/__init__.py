"""One file per encoder family, each with ARCHITECTURES and encoder_config; the registry scans this folder."""
