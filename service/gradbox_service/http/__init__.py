"""The service's HTTP side: from a socket to a call of admission, records and stores, and back.

To read in this order:

    server, listening    uvicorn, the address, TLS
    connections          what a connection may send, and how slowly bytes may move on it
    app                  the app put together: state, middleware, routes
    request_ids, rates   middleware: an id for each request; requests a second for each owner
    auth                 whose token or session, whose job
    open_requests        how many streams and transfers an owner has open
    small_bodies, heads  middleware: what any other body may have at most; HEAD as GET
    bodies, multipart    posted jobs, read whole, and the blobs that come with them
    waiting              answers that wait for a job's end, and hold its small result
    routes/              one module a noun
    event_hub            one reader of events for all listeners
    problems             every error as problem+json
    openapi, logs        what /openapi.json says; what the log says
"""
