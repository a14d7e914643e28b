"""For tests of clients: the service inside the test's own process, reached by an httpx transport.

`inprocess` runs the app's lifespan and streams both ways; the twins of everything behind the app
are beside what they imitate (`MemoryRecords`, `MemoryTurns`, `Backing.in_memory`).
"""
