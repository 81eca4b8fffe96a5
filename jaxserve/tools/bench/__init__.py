"""Load generators and reports (`jaxserve bench`)."""
