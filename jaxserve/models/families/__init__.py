"""One file per decoder family, each with a FAMILY; the registry scans this folder."""
