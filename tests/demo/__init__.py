"""`gradbox demo` as a newcomer runs it."""
