"""Image encoders and projectors of mmproj files, one module for each kind."""
