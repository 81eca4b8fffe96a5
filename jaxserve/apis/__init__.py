"""The wire formats that the server speaks, a folder each."""
