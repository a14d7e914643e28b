"""The routes of the service, one module a noun."""
