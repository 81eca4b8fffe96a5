"""One file per endpoint; each exports `ROUTES`."""
